"""Tokens to text to stops, over every family of tokenizers: what a client gets, exactly.

The stream's parts, however they are taken, join to the decode of all ids, cut where a stop string
ends first.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.families import CORPUS, FAMILIES
from tests.text.test_stops import expected
from tridentlm.core.request import FinishReason, SamplingParams
from tridentlm.streams import TextStream
from tridentlm.text.tokenizer import Tokenizer

NAMES = [*FAMILIES, "smollm"]
TEXTS = [
    *CORPUS,
    "A 世世😀a😀b",
    "❤️\u200d🔥👩🏽\u200d🚀",
    "\ufffd \ufffd\ufffd",
    "aaabaaab",
    "e\u0301te\u0301",
]


class Nobody:
    def mark(self, stream: TextStream) -> None:
        pass


def stream_of(tokenizer: Tokenizer, stops: list[str], **more: Any) -> TextStream:
    params = SamplingParams.from_mapping({"stop": stops, **more})
    detokenizer = tokenizer.detokenizer(params.skip_special_tokens)
    return TextStream(1, "u", Nobody(), 1, params, detokenizer, arrived=0.0, keep_ids=False)


def feed(stream: TextStream, ids: list[int], takes: set[int]) -> str:
    """Feeds all `ids` until the stream ends by itself; takes its text after those in `takes`."""
    text = ""
    for place, token in enumerate(ids):
        last = place == len(ids) - 1
        stream.feed(token, FinishReason.LENGTH if last else FinishReason.NONE)
        if place in takes:
            text += stream.take()[0]
        if stream.end is not None:
            break
    return text + stream.take()[0]


@st.composite
def stops_for(draw: st.DrawFn, text: str) -> list[str]:
    """Pieces of `text` that start and end anywhere, their prefixes, what overlaps them, and others
    that nearly match."""
    stops: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(len(text) - 1, 0)))
        piece = text[start : start + draw(st.integers(1, 8))] or "x"
        kinds = [piece, piece[: (len(piece) + 1) // 2], piece[len(piece) // 2 :], piece + "z"]
        kinds += [text[start + 1 : start + 4] or piece, piece[-1]]
        stops += draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    return stops


def check(tokenizer: Tokenizer, ids: list[int], stops: list[str], takes: set[int]) -> None:
    whole, matched = expected(tokenizer.decode(ids), stops)
    stream = stream_of(tokenizer, stops)
    assert feed(stream, ids, takes) == whole
    assert stream.end is not None
    reason = "length" if matched is None else "stop"
    assert (stream.end["finish_reason"], stream.end["stop_reason"]) == (reason, matched)
    kept = stream_of(tokenizer, stops, include_stop_str_in_output=True)
    assert feed(kept, ids, takes) == whole + (matched or "")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_text_ends_exactly_before_the_first_stop(
    families: dict[str, Tokenizer], name: str, data: st.DataObject
) -> None:
    tokenizer = families[name]
    text = "".join(data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=2)))
    ids = tokenizer.encode(text)
    decoded = tokenizer.decode(ids)
    stops = data.draw(stops_for(decoded))
    check(tokenizer, ids, stops, data.draw(st.sets(st.integers(0, len(ids)), max_size=8)))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_stops_in_the_text_of_any_ids(
    families: dict[str, Tokenizer], name: str, data: st.DataObject
) -> None:
    """Broken characters, specials in the middle, bytes that never become text."""
    tokenizer = families[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=20))
    stops = data.draw(stops_for(tokenizer.decode(ids)))
    check(tokenizer, ids, stops, data.draw(st.sets(st.integers(0, len(ids)), max_size=8)))


@pytest.mark.parametrize("name", ["byte-level", "qwen", "llama-3", "smollm"])
@pytest.mark.parametrize("stop", ["世", "😀", "\u200d", "🏽", "️", "\u0301"])
def test_a_stop_whose_bytes_are_tokens_of_their_own(
    families: dict[str, Tokenizer], name: str, stop: str
) -> None:
    """A character spread over tokens, or inside what a reader takes for one character."""
    tokenizer = families[name]
    text = "ab世c😀d❤️\u200d🔥e👩🏽\u200d🚀fe\u0301g"
    one_by_one = [i for char in text for i in tokenizer.encode(char)]
    ids = [i for i in one_by_one if tokenizer.decode([i])]
    check(tokenizer, ids, [stop, stop + "?"], set(range(len(ids))))
    assert stop in tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_held_back_that_no_stop_can_need(
    families: dict[str, Tokenizer], name: str
) -> None:
    """With a stop that never comes near, each token's text is there as without a stop."""
    tokenizer = families[name]
    ids = tokenizer.encode(CORPUS[0])
    plain, stopping = stream_of(tokenizer, []), stream_of(tokenizer, ["\x00"])
    for token in ids:
        for stream in (plain, stopping):
            stream.feed(token, FinishReason.NONE)
        assert plain.take()[0] == stopping.take()[0]


def test_the_texts_have_what_makes_it_hard() -> None:
    joined = "".join(TEXTS)
    assert any(len(char.encode()) == 4 for char in joined)
    assert "\ufffd" in joined
    assert any(a == b for a, b in pairwise(joined))
