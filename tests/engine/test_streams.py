"""One request in the stub: text, counts and the end that its client sees."""

from __future__ import annotations

import pytest

from tridentlm.core.request import FinishReason, SamplingParams
from tridentlm.errors import EngineDown
from tridentlm.streams import TextStream

TEXT = {1: "ab", 2: "cd", 3: "<e", 4: "nd>", 9: "<eos>"}


class Letters:
    """A detokenizer that holds its last character back until the next token or the end."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> str:
        text = self.held + TEXT[token_id]
        self.held = text[-1]
        return text[:-1]

    def flush(self) -> str:
        return self.held


class Nowhere:
    def mark(self, stream: TextStream) -> None:
        raise AssertionError("only the pump marks")


def make(params: SamplingParams | None = None, *, keep_ids: bool = True) -> TextStream:
    params = params or SamplingParams()
    return TextStream(7, "u", Nowhere(), 3, params, Letters(), arrived=0.0, keep_ids=keep_ids)


def test_news_add_up_and_are_taken_once() -> None:
    stream = make()
    stream.feed(1, FinishReason.NONE)
    stream.feed(2, FinishReason.NONE)
    assert stream.take() == ("abc", 2, [1, 2])
    assert stream.take() == ("", 0, [])
    assert stream.end is None


def test_the_last_token_of_a_length_end_is_in_the_text() -> None:
    stream = make()
    stream.set_cached(2)
    stream.feed(1, FinishReason.NONE)
    stream.feed(2, FinishReason.LENGTH)
    assert stream.take() == ("abcd", 2, [1, 2])
    assert stream.end == {
        "finish_reason": "length",
        "stop_reason": None,
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 2},
    }


def test_an_eos_token_counts_but_is_not_text() -> None:
    stream = make()
    stream.feed(1, FinishReason.NONE)
    stream.feed(9, FinishReason.STOP)
    assert stream.take() == ("ab", 2, [1, 9])
    assert stream.end is not None
    assert (stream.end["finish_reason"], stream.end["stop_reason"]) == ("stop", None)


def test_a_stop_token_of_the_request_is_the_stop_reason() -> None:
    stream = make(SamplingParams(stop_token_ids=(9,)))
    stream.feed(9, FinishReason.STOP)
    assert stream.end is not None
    assert stream.end["stop_reason"] == 9


def test_a_stop_string_across_tokens_ends_the_stream_where_it_starts() -> None:
    stream = make(SamplingParams(stop=("<end>",)))
    for token in (1, 3, 4, 2):
        stream.feed(token, FinishReason.NONE)
    text, _, _ = stream.take()
    assert text == "ab"
    assert stream.end is not None
    assert (stream.end["finish_reason"], stream.end["stop_reason"]) == ("stop", "<end>")


def test_a_stop_string_completed_by_the_flush_still_counts() -> None:
    stream = make(SamplingParams(stop=("d",)))
    stream.feed(2, FinishReason.LENGTH)
    assert stream.take()[0] == "c"
    assert stream.end is not None
    assert stream.end["finish_reason"] == "stop"


def test_text_held_for_a_stop_string_is_not_lost_at_the_end() -> None:
    stream = make(SamplingParams(stop=("<end>",)))
    stream.feed(3, FinishReason.LENGTH)
    assert stream.take()[0] == "<e"


@pytest.mark.parametrize(("timeout", "stop_reason"), [(None, None), (2.0, "timeout")])
def test_an_abort_by_deadline_says_timeout(timeout: float | None, stop_reason: str | None) -> None:
    stream = make(SamplingParams(timeout=timeout))
    stream.feed(-1, FinishReason.ABORT)
    assert stream.end is not None
    assert stream.end["finish_reason"] == "abort"
    assert stream.end["stop_reason"] == stop_reason


def test_the_first_end_stays() -> None:
    stream = make()
    stream.feed(1, FinishReason.LENGTH)
    stream.fail(EngineDown("gone"))
    assert stream.end is not None
    assert stream.end["finish_reason"] == "length"


def test_a_failure_keeps_what_the_client_has_and_carries_the_error() -> None:
    stream = make()
    stream.feed(1, FinishReason.NONE)
    stream.fail(EngineDown("gone"))
    assert stream.end is not None
    assert stream.end["error"]["code"] == "engine_down"
    assert stream.take()[0] == "a"
