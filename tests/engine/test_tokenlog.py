"""Log-probabilities in the stub: entries, their order, and their pace beside the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.test_streams import Nowhere
from tridentlm import tokenlog
from tridentlm.core.extras import Logprobs
from tridentlm.core.request import FinishReason, SamplingParams
from tridentlm.protocol import Candidate, TokenLogprob
from tridentlm.streams import TextStream
from tridentlm.tokenlog import LEAST, TokenLog, tell

WORDS = {1: "ab", 2: "cd", 3: "<e", 4: "nd>", 5: "x", 9: "<eos>"}


class Plain:
    def push(self, token_id: int) -> str:
        return WORDS[token_id]

    def flush(self) -> str:
        return ""


class Texts(dict[int, "tuple[str, list[int] | None]"]):
    def __missing__(self, token_id: int) -> tuple[str, list[int] | None]:
        return WORDS[token_id], None


PROMPT = [5, 1]


def make(**fields: Any) -> TextStream:
    params = SamplingParams(**fields)
    log = TokenLog.of(params, np.array(PROMPT, np.int32), Texts())  # type: ignore[arg-type]
    echo = PROMPT if params.echo else []
    return TextStream(
        7, "u", Nowhere(), 2, params, Plain(), arrived=0.0, keep_ids=True, echo=echo, log=log
    )


def feed(stream: TextStream, position: int, token: int, finish: int = FinishReason.NONE) -> None:
    """One step's result: the token, of rank 3, and two likelier ones."""
    assert stream.log is not None
    stream.log.note(position, ([token, 1, 2], [-3.0, -1.0, -2.0], 3))
    stream.feed(token, finish)


def told(stream: TextStream, name: str = "logprobs") -> list[TokenLogprob]:
    while stream.log is not None and stream.log.owes:
        stream.log.build()
    taken = stream.take_logprobs()
    assert taken is not None
    return [TokenLogprob.unpack(entry) for entry in taken.get(name, [])]


def tokens(entries: list[TokenLogprob]) -> list[int]:
    return [entry.chosen.token_id for entry in entries]


def test_an_entry_has_the_token_itself_and_as_many_others_as_were_asked_for() -> None:
    for top in (0, 1, 2):
        stream = make(logprobs=top)
        feed(stream, 2, 5)
        [entry] = told(stream)
        others = [Candidate(1, -1.0, 1, "ab", None), Candidate(2, -2.0, 2, "cd", None)]
        assert entry == TokenLogprob(0, Candidate(5, -3.0, 3, "x", None), others[:top])


def test_offsets_count_the_text_before_each_token() -> None:
    stream = make(logprobs=0)
    for position, token in enumerate([1, 5, 2, 5], 2):
        feed(stream, position, token)
    assert [entry.offset for entry in told(stream)] == [0, 2, 3, 5]


def test_entries_wait_for_text_that_a_stop_string_holds_back() -> None:
    stream = make(logprobs=0, stop=("<end>!",))
    feed(stream, 2, 1)
    feed(stream, 3, 3)
    assert stream.take()[0] == "ab"
    assert tokens(told(stream)) == [1]
    feed(stream, 4, 4)
    assert stream.take()[0] == ""
    assert told(stream) == []
    feed(stream, 5, 5)
    assert stream.take()[0] == "<end>x"
    assert tokens(told(stream)) == [3, 4, 5]


def test_a_stop_strings_own_tokens_are_told_at_the_end() -> None:
    stream = make(logprobs=0, stop=("<end>",))
    for position, token in enumerate([1, 3, 4], 2):
        feed(stream, position, token)
    assert stream.take()[0] == "ab"
    assert tokens(told(stream)) == [1, 3, 4]
    assert stream.end is not None
    assert stream.end["usage"]["completion_tokens"] == 3


def test_a_stop_token_is_told_too() -> None:
    stream = make(logprobs=0)
    feed(stream, 2, 9, FinishReason.STOP)
    assert stream.take() == ("", 1, [9])
    assert tokens(told(stream)) == [9]


def test_minus_infinity_becomes_a_number() -> None:
    stream = make(logprobs=1)
    assert stream.log is not None
    stream.log.note(2, ([5, 1], [-np.inf, 0.0], 9))
    stream.feed(5, FinishReason.NONE)
    assert told(stream)[0].chosen.logprob == LEAST == -9999.0


def test_the_prompts_come_once_and_complete_and_its_first_token_has_none() -> None:
    stream = make(prompt_logprobs=1)
    assert told(stream, "prompt_logprobs") == []
    assert stream.log is not None
    stream.log.note(1, ([1, 5, 2], [-3.0, -1.0, -2.0], 4))
    stream.log.note(1, ([1, 5, 2], [-8.0, -1.0, -2.0], 4))  # computed again after a preemption
    stream.feed(2, FinishReason.LENGTH)
    first, second = told(stream, "prompt_logprobs")
    assert first == TokenLogprob(None, Candidate(5, None, None, "x", None), [])
    top = [Candidate(5, -1.0, 1, "x", None)]
    assert second == TokenLogprob(None, Candidate(1, -3.0, 4, "ab", None), top)
    assert told(stream, "prompt_logprobs") == []


def test_a_prompts_are_built_in_parts_and_an_answers_wait_for_those_of_its_echo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenlog, "PART_CANDIDATES", 4)
    stream = make(logprobs=1, prompt_logprobs=1, echo=True)
    assert stream.log is not None
    stream.log.note(1, ([1, 5], [-3.0, -1.0], 4))
    feed(stream, 2, 2)
    for expected, left in (([5], True), ([1, 2], False)):
        assert stream.log.owes
        stream.log.build()
        assert stream.log.owes == left
        taken = stream.take_logprobs() or {}
        assert [entry[1][0] for entry in taken["logprobs"]] == expected
        assert [entry[1][0] for entry in taken["prompt_logprobs"]] == expected[:1]


def test_an_echo_puts_the_prompt_before_the_text_and_its_tokens_before_the_others() -> None:
    stream = make(logprobs=1, echo=True)
    assert stream.log is not None
    stream.log.note(1, ([1, 5], [-3.0, -1.0], 4))
    feed(stream, 2, 2)
    assert stream.take() == ("xabcd", 1, [2])
    entries = told(stream)
    assert tokens(entries) == [5, 1, 2]
    assert [entry.offset for entry in entries] == [0, 1, 3]
    assert entries[0].chosen.logprob is None


def test_an_echo_alone_has_no_log_and_stop_texts_in_the_prompt_do_not_count() -> None:
    stream = make(echo=True, stop=("xa",))
    assert stream.log is None
    stream.feed(2, FinishReason.NONE)
    assert stream.take()[0] == "xabcd"
    assert stream.take_logprobs() is None


def test_no_tokens_wanted_is_an_end_without_any() -> None:
    stream = make(echo=True, max_tokens=0)
    stream.feed(2, FinishReason.LENGTH)
    assert stream.take() == ("xab", 0, [])
    assert stream.end is not None
    assert stream.end["finish_reason"] == "length"
    assert stream.end["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(("least", "text"), [(0, "ab"), (1, "ab"), (2, "ab<end>ab")])
def test_the_text_of_the_first_min_tokens_is_not_part_of_a_stop_text(least: int, text: str) -> None:
    stream = make(stop=("<end>", "cd"), min_tokens=least)
    for token in (1, 3, 4, 1, 2):
        if stream.end is None:
            stream.feed(token, FinishReason.NONE)
    assert stream.take()[0] == text


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_text_or_token_is_part_of_the_text_on_request(include: bool) -> None:
    stream = make(stop=("d<e",), include_stop_str_in_output=include)
    for token in (2, 3):
        stream.feed(token, FinishReason.NONE)
    assert stream.take()[0] == ("cd<e" if include else "c")
    stream = make(include_stop_str_in_output=include, stop_token_ids=(5,))
    stream.feed(1, FinishReason.NONE)
    stream.feed(5, FinishReason.STOP)
    assert stream.take()[0] == ("abx" if include else "ab")


def test_rows_of_a_step_find_their_requests() -> None:
    streams = {1: make(logprobs=0), 2: make(logprobs=0)}
    rows = Logprobs(
        ids=np.array([2, 5, 1]),
        positions=np.array([2, 2, 2]),
        tokens=np.array([[1], [3], [2]], np.int32),
        values=np.array([[-1.5], [-9.0], [-2.5]], np.float32),
        ranks=np.array([1, 1, 2], np.int32),
    )
    tell(rows, lambda id: streams[id].log if id in streams else None)
    streams[1].feed(2, FinishReason.NONE)
    streams[2].feed(1, FinishReason.NONE)
    assert [told(streams[id])[0].chosen.logprob for id in (1, 2)] == [-2.5, -1.5]
