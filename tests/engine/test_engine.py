"""The loop around scheduler and runner, with one and with two steps in flight."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.core.driver import make_limits, make_request
from tests.core.fake_model import FakeRunner, answer
from tridentlm.core.request import FinishReason, Request
from tridentlm.engine import Engine

Answers = dict[int, tuple[list[int], FinishReason]]


def run(engine: Engine) -> Answers:
    tokens: dict[int, list[int]] = {}
    answers: Answers = {}
    while engine.has_work:
        output = engine.step()
        if output is None:
            continue
        for i, token, finish in zip(output.ids, output.tokens, output.finish, strict=True):
            tokens.setdefault(int(i), [])
            if token >= 0:
                tokens[int(i)].append(int(token))
            if finish:
                answers[int(i)] = tokens[int(i)], FinishReason(finish)
    engine.check_integrity()
    return answers


def requests(count: int) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        make_request(
            i,
            prompt_len=int(rng.integers(1, 40)),
            max_tokens=int(rng.integers(1, 20)),
            stop_token_ids=frozenset(rng.integers(0, 64, 3).tolist()),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_everybody_gets_the_answer_of_running_alone(steps_in_flight: int) -> None:
    engine = Engine(FakeRunner(make_limits()), steps_in_flight=steps_in_flight)
    asked = requests(30)
    for request in asked:
        engine.add(request)
    assert run(engine) == {r.id: answer(r) for r in asked}
    assert engine.stats().generation_tokens == sum(len(answer(r)[0]) for r in asked)


def test_second_step_is_launched_before_the_first_is_collected() -> None:
    runner = FakeRunner(make_limits())
    engine = Engine(runner, steps_in_flight=2)
    engine.add(make_request(1))
    assert engine.step() is None
    assert engine.step() is not None
    assert len(runner.plans) == 2


def test_one_step_in_flight_reports_every_step_at_once() -> None:
    engine = Engine(FakeRunner(make_limits()))
    engine.add(make_request(1, max_tokens=2))
    outputs = [engine.step(), engine.step()]
    assert [output is not None and len(output.ids) for output in outputs] == [1, 1]
    assert not engine.has_work


def test_overdue_request_is_aborted_by_the_next_step() -> None:
    engine = Engine(FakeRunner(make_limits(max_running=1)))
    engine.add(make_request(1, max_tokens=50))
    engine.add(make_request(2, deadline=time.monotonic() - 1))
    output = engine.step()
    assert output is not None
    assert dict(zip(output.ids.tolist(), output.finish.tolist(), strict=True)) == {1: 0, 2: 3}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_shut_down_aborts_all_and_leaves_the_engine_empty(steps_in_flight: int) -> None:
    engine = Engine(FakeRunner(make_limits()), steps_in_flight=steps_in_flight)
    for i in range(6):
        engine.add(make_request(i, max_tokens=50))
    engine.step()
    output = engine.shut_down()
    assert output is not None
    assert sorted(output.ids.tolist()) == list(range(6))
    assert set(output.finish.tolist()) == {FinishReason.ABORT}
    assert not engine.has_work
    engine.check_integrity()
    assert engine.stats().free_slots == 4


def test_failing_everything_reports_each_request_once_with_the_reason() -> None:
    engine = Engine(FakeRunner(make_limits()), steps_in_flight=2)
    for i in range(6):
        engine.add(make_request(i))
    engine.step()
    output = engine.fail_all("device lost")
    assert output is not None
    assert output.errors == dict.fromkeys(range(6), "device lost")
    assert sorted(output.ids.tolist()) == list(range(6))
