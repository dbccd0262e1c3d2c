"""The engine while grammars are compiled, and when one fails: the others notice nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from tests.text.families import FAMILIES
from tridentlm.config import EngineSettings
from tridentlm.core.plan import StepOutput
from tridentlm.core.request import FinishReason, Request, SamplingParams
from tridentlm.engine import Engine, build_runner, load_grammars
from tridentlm.errors import InvalidRequest
from tridentlm.grammar.matching import Grammars
from tridentlm.simulated import SimulatedRunner
from tridentlm.text import Tokenizer

GRAMMAR = {"type": "choice", "value": ["yes", "no"]}
EOS = frozenset({0, 2})  # the tiny model's


@pytest.fixture(scope="module")
def parts(folder: Path) -> Iterator[tuple[EngineSettings, Any]]:
    settings = EngineSettings(
        model=str(folder), device="cpu", num_pages=64, max_running=4, threads=1
    )
    runner, _ = build_runner(settings)
    yield settings, runner
    runner.close()


class Held(Grammars):
    """Compiles when told."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.may_go = threading.Event()

    def _compile(self, grammar: str) -> LLMatcher:
        assert self.may_go.wait(30)
        return super()._compile(grammar)


@pytest.fixture
def engine(parts: tuple[EngineSettings, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    settings, runner = parts
    monkeypatch.setattr("tridentlm.grammar.matching.Grammars", Held)
    grammars = load_grammars(runner, settings)
    assert isinstance(grammars, Held)
    yield Engine.from_settings(runner, settings, grammars)
    grammars.may_go.set()
    grammars.close()


def make(engine: Engine, request_id: int, grammar: Any = None, **fields: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 20, "temperature": 0, "grammar": grammar, **fields})
    prompt = np.arange(5, 15, dtype=np.int32)
    return Request.build(request_id, prompt, params, engine.limits, EOS)


def held(engine: Engine) -> threading.Event:
    assert isinstance(engine._grammars, Held)
    return engine._grammars.may_go


def endings(output: StepOutput | None) -> dict[int, FinishReason]:
    if output is None:
        return {}
    pairs = zip(output.ids.tolist(), output.finish.tolist(), strict=True)
    return {i: FinishReason(finish) for i, finish in pairs if finish}


def run(engine: Engine, *until: int) -> dict[int, FinishReason]:
    ended: dict[int, FinishReason] = {}
    while engine.has_work and not (until and ended.keys() >= {*until}):
        ended |= endings(engine.step())
    return ended


def test_nobody_waits_for_a_grammar_that_is_compiled(engine: Engine) -> None:
    engine.add(make(engine, 1, GRAMMAR))
    engine.add(make(engine, 2, ignore_eos=True))
    assert run(engine, 2) == {2: FinishReason.LENGTH}
    assert engine.has_work
    assert engine.stats().waiting == 1
    held(engine).set()
    assert run(engine) == {1: FinishReason.STOP}
    assert not engine.has_work


def test_it_can_be_aborted_meanwhile(engine: Engine) -> None:
    engine.add(make(engine, 1, GRAMMAR))
    engine.abort(1)
    assert run(engine) == {1: FinishReason.ABORT}


@pytest.mark.parametrize("ended_by", ["shut_down", "fail_all"])
def test_who_waits_hears_of_the_end(engine: Engine, ended_by: str) -> None:
    engine.add(make(engine, 1, GRAMMAR))
    output = engine.shut_down() if ended_by == "shut_down" else engine.fail_all("broken")
    reason = FinishReason.ABORT if ended_by == "shut_down" else FinishReason.ERROR
    assert endings(output) == {1: reason}


def test_one_that_does_not_compile_fails_alone(engine: Engine) -> None:
    held(engine).set()
    engine.add(make(engine, 1, {"type": "grammar", "value": "start: <|nothing|>"}))
    engine.add(make(engine, 2, ignore_eos=True))
    assert run(engine) == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}


def test_one_that_comes_to_a_dead_end_fails_alone(engine: Engine) -> None:
    held(engine).set()
    dead_end = {"type": "grammar", "value": 'start: "a" B\nB: /[bc]/ & /[de]/'}
    engine.add(make(engine, 1, dead_end))
    engine.add(make(engine, 2, ignore_eos=True))
    assert run(engine) == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}


def test_one_grammar_is_compiled_once_and_each_request_has_its_own_place(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held(engine).set()
    engine.add(make(engine, 1, GRAMMAR))
    assert run(engine) == {1: FinishReason.STOP}
    monkeypatch.setattr(Held, "_compile", None)
    for i in range(2, 8):
        engine.add(make(engine, i, GRAMMAR, temperature=1.0, seed=i))
    assert run(engine) == dict.fromkeys(range(2, 8), FinishReason.STOP)


def test_a_tokenizer_that_is_not_of_bytes_has_no_grammars(
    parts: tuple[EngineSettings, Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings, runner = parts
    tokenizer = Tokenizer(FAMILIES["unigram"](), eos_token_ids=[1])
    assert load_grammars(runner, settings, tokenizer) is None
    assert "decoder" in caplog.text


def test_an_engine_without_a_tokenizer_refuses() -> None:
    settings = EngineSettings(runner="simulated", max_model_len=64, num_pages=64, step_ms=0)
    runner = SimulatedRunner(settings)
    assert load_grammars(runner, settings) is None
    engine = Engine.from_settings(runner, settings)
    with pytest.raises(InvalidRequest):
        engine.add(make(engine, 1, GRAMMAR))
