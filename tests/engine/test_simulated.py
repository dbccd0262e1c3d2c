from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.test_engine import run
from tridentlm.config import EngineSettings
from tridentlm.core.request import Request, SamplingParams
from tridentlm.engine import Engine
from tridentlm.errors import InvalidRequest
from tridentlm.simulated import END_TOKEN, FIRST_TOKEN, SimulatedRunner, check_simulated


def make_engine(step_ms: float = 0.0, steps_in_flight: int = 1, **values: int) -> Engine:
    settings = EngineSettings(runner="simulated", step_ms=step_ms, max_running=32, **values)
    return Engine(SimulatedRunner(settings), steps_in_flight=steps_in_flight)


def make_request(i: int, max_tokens: int, temperature: float = 1.0) -> Request:
    prompt = np.arange(1, i % 50 + 2, dtype=np.int32)
    return Request(i, prompt, max_tokens, seed=i, temperature=temperature)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_an_answer_does_not_depend_on_neighbours_chunks_or_pipelining(steps_in_flight: int) -> None:
    crowd = make_engine(steps_in_flight=steps_in_flight, max_step_tokens=40)
    for i in range(100):
        crowd.add(make_request(i, 20))
    together = run(crowd)
    for i in (0, 31, 99):
        alone = make_engine()
        alone.add(make_request(i, 20))
        assert run(alone)[i] == together[i]
    tokens = {token for answer, _ in together.values() for token in answer}
    assert len(tokens) > 1000
    assert min(tokens) >= FIRST_TOKEN
    assert max(tokens) < END_TOKEN


def test_seed_matters_unless_greedy() -> None:
    answers = []
    for seed, temperature in ((1, 1.0), (2, 1.0), (1, 0.0), (2, 0.0)):
        engine = make_engine()
        prompt = np.array([7], np.int32)
        engine.add(Request(1, prompt, 8, seed=seed, temperature=temperature))
        answers.append(run(engine)[1][0])
    assert answers[0] != answers[1]
    assert answers[2] == answers[3]


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_steps_keep_an_ideal_cadence(steps_in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that the host spends between steps of 5 ms is not added to them."""
    clock = Clock()
    monkeypatch.setattr("tridentlm.simulated.time", clock)
    engine = make_engine(step_ms=5.0, steps_in_flight=steps_in_flight)
    engine.add(make_request(1, 41))
    ends = []
    while engine.has_work:
        if engine.step() is not None:
            ends.append(clock.now)
            clock.sleep(0.001)
    assert np.diff(ends) == pytest.approx([0.005] * 40)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tp", 2), ("quantize", "fp8"), ("kv_dtype", "fp8")],
)
def test_what_only_a_model_has_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        EngineSettings(runner="simulated", **{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((7, 1.0),)},
        {"min_tokens": 3, "stop_token_ids": (400,)},
    ],
)
def test_what_only_logits_could_follow_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="no logits") as caught:
        check_simulated(SamplingParams(**asked))
    assert caught.value.param == next(iter(asked))


def test_what_it_can_do_is_taken() -> None:
    stops = {"stop": ("x",), "stop_token_ids": (5,), "ignore_eos": True}
    check_simulated(SamplingParams(temperature=0.7, seed=1, top_k=-1, logprobs=5, **stops))
    check_simulated(SamplingParams(min_tokens=3, prompt_logprobs=1))
