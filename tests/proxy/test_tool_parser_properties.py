"""Tool calls of any arguments, in any text, cut anywhere: the pieces add up to what was written."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openai_proxy.tools import Piece
from tests.proxy.test_tool_parsers import (
    FORMATS,
    NAMES,
    cut,
    mistral,
    parse,
)

MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "</think>"]
STRINGS = st.one_of(
    st.text(max_size=8),
    st.text('{}[]"\\,:; \n', max_size=8),
    st.sampled_from([*MARKS, "é", "😀🙂", "\\u00e9", "}}", '"}']),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), STRINGS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(STRINGS, inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(STRINGS, VALUES, max_size=3)


@dataclass(frozen=True)
class Written:
    """A model's text, and what a client has to make of it."""

    kind: str
    text: str
    calls: list[tuple[str, str]]
    content: str


@st.composite
def arguments(draw: st.DrawFn) -> str:
    """An object as JSON: compact or spread out, with or without escapes for what is not ASCII."""
    value = draw(ARGUMENTS)
    escaped, indent = draw(st.booleans()), draw(st.sampled_from([None, 0, 2]))
    return json.dumps(value, ensure_ascii=escaped, indent=indent)


@st.composite
def words(draw: st.DrawFn) -> str:
    """Text that holds no mark; what is near one is welcome."""
    pieces = st.sampled_from(
        ["Let me see.", "<tool", "[TOOL_", "{", "}", " ", "\n", "é", "<", "😀"]
    )
    return "".join(draw(st.lists(pieces, max_size=4)))


@st.composite
def written(draw: st.DrawFn) -> Written:
    kind = draw(st.sampled_from(sorted(FORMATS)))
    make = draw(st.sampled_from(FORMATS[kind]))
    calls = [
        (draw(st.sampled_from(NAMES)), draw(arguments())) for _ in range(draw(st.integers(1, 3)))
    ]
    before, after = draw(words()), draw(words())
    if kind == "llama3_json":
        before, text = "", "; ".join(make(*call) for call in calls)
        after = "" if after.lstrip(" \n").startswith("{") else after
    elif make is mistral:
        after = after if not after.lstrip().startswith(",") else ""
        inner = ", ".join(f'{{"name": "{name}", "arguments": {a}}}' for name, a in calls)
        text = f"[TOOL_CALLS][{inner}]"
    else:
        text = draw(st.sampled_from(["", "\n"])).join(make(*call) for call in calls)
    return Written(kind, before + text + after, calls, f"{before}\0{after}")


def calls_of(pieces: list[Piece]) -> list[tuple[str, str]]:
    return [
        (
            call.text,
            "".join(p.text for p in pieces if p.kind == "arguments" and p.nth == call.nth),
        )
        for call in pieces
        if call.kind == "call"
    ]


def content_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == "content")


def plain(text: str) -> str:
    """Without the whitespace next to a call, which is formatting."""
    return "".join(text.replace("\0", "").split())


@settings(max_examples=300, deadline=None)
@given(written(), st.lists(st.integers(0, 10_000), max_size=12))
def test_every_call_and_all_text_around_come_out_however_they_are_cut(
    answer: Written, places: list[int]
) -> None:
    whole = parse(answer.kind, [answer.text])
    assert calls_of(whole) == answer.calls
    assert plain(content_of(whole)) == plain(answer.content)
    assert parse(answer.kind, cut(answer.text, places)) == whole
    assert parse(answer.kind, list(answer.text)) == whole


@settings(max_examples=150, deadline=None)
@given(written())
def test_arguments_that_were_json_are_the_same_json(answer: Written) -> None:
    for (_, given_text), (_, text) in zip(
        answer.calls, calls_of(parse(answer.kind, [answer.text])), strict=True
    ):
        assert json.loads(text) == json.loads(given_text)


@settings(max_examples=200, deadline=None)
@given(written(), st.integers(0, 10_000), st.lists(st.integers(0, 10_000), max_size=6))
def test_an_answer_cut_short_keeps_what_it_had(
    answer: Written, end: int, places: list[int]
) -> None:
    """Calls are those of the whole answer or the beginnings of them; none is made up."""
    short = answer.text[: end % (len(answer.text) + 1)]
    pieces = parse(answer.kind, [short])
    assert parse(answer.kind, cut(short, places)) == pieces
    calls = calls_of(pieces)
    for (name, text), (full_name, full) in zip(calls, answer.calls, strict=False):
        assert name == full_name
        assert full.startswith(text)
    assert calls[:-1] == answer.calls[: max(len(calls) - 1, 0)], "only the last one can be cut"
    assert len(calls) <= len(answer.calls)


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_every_pair_of_cuts_of_every_example(kind: str) -> None:
    nested = '{"a": {"b": [{"c": "}\\u00e9"}]}}'
    for make in FORMATS[kind]:
        between = {"llama3_json": "; "}.get(kind, "\n")
        text = make("f", nested) + between + make("get_weather", "{}")
        whole = parse(kind, [text])
        assert calls_of(whole) == [("f", nested), ("get_weather", "{}")]
        for first, second in itertools.combinations(range(0, len(text), 3), 2):
            assert parse(kind, [text[:first], text[first:second], text[second:]]) == whole
