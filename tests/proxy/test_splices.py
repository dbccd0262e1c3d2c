"""What a stream splices from ready bytes is the JSON that a whole answer has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openai_proxy.logprobs import block_of, json_of
from openai_proxy.tools.pieces import held

LOGPROBS = st.one_of(st.none(), st.floats(-9999, 0))
CANDIDATES = st.tuples(
    st.integers(0, 50000),
    LOGPROBS,
    st.integers(1, 9),
    st.text(max_size=6),
    st.one_of(st.none(), st.lists(st.integers(0, 255), max_size=4)),
).map(list)
ENTRIES = st.lists(
    st.tuples(st.integers(0, 99), CANDIDATES, st.lists(CANDIDATES, max_size=3)).map(list),
    max_size=4,
)


@pytest.mark.parametrize("chat", [True, False])
@given(entries=ENTRIES)
def test_streamed_logprobs_are_those_of_a_whole_answer(chat: bool, entries: list[Any]) -> None:
    spliced = json.loads(b'{"x":0' + json_of(entries, chat=chat) + b"}")["logprobs"]
    assert spliced == (json.loads(json.dumps(block_of(entries, chat=chat))) if entries else None)


@given(st.text("<tol_ca>", max_size=20), st.sampled_from(["<tool_call>", "<<a", "aab", "ab"]))
def test_the_longest_beginning_of_a_mark_is_held(text: str, mark: str) -> None:
    sizes = (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n]))
    assert held(text, mark) == next(sizes, 0)
