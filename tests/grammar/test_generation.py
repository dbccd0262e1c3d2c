"""Answers of the real engine, held to grammars: what ends them, what cannot break them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.core.driver import Reckless
from tridentlm import LLM, SamplingParams
from tridentlm.errors import InvalidRequest

PROMPT = "The quick brown fox"
DIGITS = {"type": "regex", "value": "[0-9]{3,40}"}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["kind", "count", "names"],
    "additionalProperties": False,
}


def params(grammar: Any, **fields: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar, **{"max_tokens": 200, "seed": 1, **fields})


def texts(llm: LLM, *wanted: SamplingParams) -> list[str]:
    return [answer.text for answer in llm.generate([PROMPT] * len(wanted), wanted)]


def mixed() -> list[SamplingParams]:
    """Half of them without a grammar."""
    schema = {"type": "json_schema", "value": SCHEMA}
    held = [params(schema, seed=i) for i in range(6)]
    return held + [SamplingParams(max_tokens=60, seed=i, ignore_eos=True) for i in range(6)]


@pytest.mark.parametrize(
    "settings",
    [
        {"steps_in_flight": 2},
        {"steps_in_flight": 2, "max_step_tokens": 16},
        {"num_pages": 24, "steps_in_flight": 2},
        {"num_pages": 24},
    ],
)
def test_two_steps_in_flight_and_preemption_change_no_answer(
    llm: LLM, folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tridentlm.core.scheduler.ExpectedLength", Reckless)
    expected = llm.generate([PROMPT] * 12, mixed())
    fixed: dict[str, Any] = {"device": "cpu", "max_running": 12, "num_pages": 1024, "threads": 1}
    with LLM(str(folder), **(fixed | settings)) as other:
        assert other.generate([PROMPT] * 12, mixed()) == expected
        preempted = other._engine.stats().preemptions
    assert (preempted > 0) == ("num_pages" in settings)
    for answer in expected[:6]:
        assert json.loads(answer.text).keys() == {"kind", "count", "names"}
        assert answer.finish_reason == "stop"


def test_rows_with_a_grammar_change_nothing_for_the_others(llm: LLM) -> None:
    assert texts(llm, *mixed())[6:] == texts(llm, *mixed()[6:])


def test_every_kind_of_grammar(llm: LLM) -> None:
    lark = 'start: "<" WORD ">"\nWORD: /[a-z]{1,5}/'
    gbnf = 'root ::= "<" word ">"\nword ::= [a-z] [a-z]? [a-z]?'
    answers = texts(
        llm,
        params({"type": "choice", "value": ["yes", "no/never\n", "é[x]"]}),
        params(DIGITS),
        params({"type": "grammar", "value": lark}),
        params({"type": "grammar", "value": gbnf}),
        params({"type": "json_schema", "value": SCHEMA}),
    )
    assert answers[0] in ("yes", "no/never\n", "é[x]")
    assert re.fullmatch("[0-9]{3,40}", answers[1])
    assert re.fullmatch("<[a-z]{1,5}>", answers[2])
    assert re.fullmatch("<[a-z]{1,3}>", answers[3])
    assert json.loads(answers[4])["kind"] in ("a", "b")


def test_max_tokens_cuts_an_answer(llm: LLM) -> None:
    answer = llm.generate(PROMPT, params(DIGITS, max_tokens=3, ignore_eos=True))[0]
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 3)
    assert answer.text.isdigit()


def test_it_ends_no_sooner_than_min_tokens_but_where_the_grammar_ends(llm: LLM) -> None:
    early = llm.generate(PROMPT, params(DIGITS))[0]
    late = llm.generate(PROMPT, params(DIGITS, min_tokens=len(early.token_ids) + 5))[0]
    assert len(late.token_ids) > len(early.token_ids) + 5
    for fields in ({"min_tokens": 150}, {"ignore_eos": True}):
        full = llm.generate(PROMPT, params(DIGITS, **fields))[0]
        assert (len(full.text), full.finish_reason) == (40, "stop")


def test_a_stop_text_ends_it_sooner(llm: LLM) -> None:
    text = llm.generate(PROMPT, params(DIGITS, ignore_eos=True))[0].text
    stop = text[5:7]
    answer = llm.generate(PROMPT, params(DIGITS, ignore_eos=True, stop=(stop,)))[0]
    assert answer.text == text[: text.index(stop)]
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 50},
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"repetition_penalty": 3.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"logit_bias": tuple((i, -100.0) for i in range(260))},
        {"logit_bias": tuple((i, 100.0) for i in range(100, 360))},
    ],
)
def test_no_other_parameter_breaks_it(llm: LLM, fields: dict[str, Any]) -> None:
    answer = llm.generate(PROMPT, params(DIGITS, **fields))[0]
    assert re.fullmatch("[0-9]{3,40}", answer.text)


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    answer = llm.generate(PROMPT, params(DIGITS, logprobs=2, temperature=0))[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    assert any(entry.top[0] != entry.chosen for entry in answer.logprobs)


@pytest.mark.parametrize(
    ("grammar", "code"),
    [
        ({"type": "xml"}, "invalid_grammar"),
        ({"type": "json_schema", "value": {"not": {}}}, "unsupported_keyword"),
        ({"type": "regex", "value": "("}, "invalid_grammar"),
    ],
)
def test_what_cannot_be_held_to_is_refused(llm: LLM, grammar: Any, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(PROMPT, params(grammar))
    assert (caught.value.param, caught.value.code) == ("grammar", code)
    assert not llm._engine.has_work
