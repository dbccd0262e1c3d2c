"""What a plan tells of penalties, bias, bans and log-probabilities, whatever the scheduler does."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from tests.core.driver import Driver, Reckless, make_limits, make_request
from tests.core.fake_model import VOCAB, FakeRunner, FakeStep
from tridentlm.core.extras import RequestExtras
from tridentlm.core.plan import FROM_DEVICE, StepPlan
from tridentlm.core.radix import RadixCache
from tridentlm.core.request import Limits, Request, SamplingParams


class Countant(FakeRunner):
    """Counts as a device does, and checks each count against the row's whole prefix in memory."""

    def __init__(self, limits: Limits, requests: dict[int, Request]) -> None:
        super().__init__(limits)
        self.requests = requests
        self.counts: dict[int, tuple[list[int], list[int]]] = {}  # by slot: prompt, output
        self.penalized = 0
        self.banned: dict[int, list[int]] = defaultdict(list)  # by id: outputs so far
        self.told: dict[int, list[int]] = defaultdict(list)  # by id: positions
        self.targets: dict[tuple[int, int], int] = {}

    def launch(self, plan: StepPlan) -> FakeStep:
        step = super().launch(plan)
        asks = [self._extras(plan, row) is not None for row in range(plan.num_rows)]
        assert (plan.extras is not None) == any(asks)
        if plan.extras is not None:
            self._check_penalties(plan, step.tokens)
            self._note(plan)
        return step

    def _prefix(self, plan: StepPlan, row: int) -> list[int]:
        context, size = int(plan.context_lens[row]), self.limits.page_size
        where = np.arange(context)
        places = plan.block_tables[row, where // size] * size + where % size
        return self.memory[places, 0].tolist()

    def _extras(self, plan: StepPlan, row: int) -> RequestExtras | None:
        prefix = self._prefix(plan, row)
        [request] = [
            request
            for request in self.requests.values()
            if request.prompt.tolist()[: len(prefix)] == prefix[: len(request.prompt)]
        ]
        return request.extras

    def _check_penalties(self, plan: StepPlan, tokens: np.ndarray) -> None:
        assert plan.extras is not None
        penalties = plan.extras.penalties
        rows = [] if penalties is None else penalties.rows.tolist()
        ids = plan.extras.request_ids.tolist()
        extras = [self.requests[id].extras for id in ids]
        assert rows == [i for i, asked in enumerate(extras) if asked and asked.has_penalties]
        if penalties is None:
            return
        for new in penalties.newcomers:
            self.counts[new.slot] = new.prompt.tolist(), new.output.tolist()
        for i, slot in zip(rows, penalties.slots.tolist(), strict=True):
            assert slot == plan.slots[plan.sampled[i]]
            prompt, output = self.counts[slot]
            assert prompt == self.requests[ids[i]].prompt.tolist()
            assert prompt + output == self._prefix(plan, plan.sampled[i])
            output.append(int(tokens[i]))
            self.penalized += 1

    def _note(self, plan: StepPlan) -> None:
        extras = plan.extras
        assert extras is not None
        bans = np.isneginf(extras.bias)
        for row in np.unique(extras.bias_rows[bans]).tolist():
            request = self.requests[int(extras.request_ids[row])]
            stops = extras.bias_tokens[bans & (extras.bias_rows == row)].tolist()
            assert sorted(stops) == sorted(t for t in request.stop_token_ids if t < VOCAB)
            self.banned[request.id].append(int(plan.sample_positions[row]) - len(request.prompt))
        if extras.measured is None:
            return
        measured = extras.measured
        for place, target, id, position in zip(
            measured.places, measured.targets, measured.ids, measured.positions, strict=False
        ):
            assert plan.positions[place] == position - 1
            assert plan.token_ids[place] != FROM_DEVICE
            assert target == self.requests[int(id)].prompt[position]
        sampled = measured.ids[len(measured.places) :]
        assert sampled.tolist() == extras.request_ids[measured.rows].tolist()
        for id, position in zip(measured.ids.tolist(), measured.positions.tolist(), strict=True):
            self.told[id].append(position)


def drive(requests: list[Request], steps_in_flight: int, **limits: int) -> tuple[Driver, Countant]:
    driver = Driver(make_limits(**limits), cache=RadixCache(4), expected=Reckless())
    runner = driver.runner = Countant(driver.scheduler.limits, driver.requests)
    driver.add(*requests)
    driver.run(steps_in_flight)
    return driver, runner


PENALTIES = RequestExtras(presence_penalty=1.0, repetition_penalty=1.2)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_counts_are_those_of_the_prefix_through_preemptions(steps_in_flight: int) -> None:
    requests = [
        make_request(i, max_tokens=24, extras=PENALTIES if i % 3 else None) for i in range(8)
    ]
    driver, runner = drive(requests, steps_in_flight, num_pages=8, max_step_tokens=12)
    assert driver.scheduler.stats().preemptions > 0
    assert runner.penalized >= 5 * 24


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_stop_tokens_are_banned_for_the_first_min_tokens(steps_in_flight: int) -> None:
    stops = frozenset({3, 5, 2**30})
    asked = [
        make_request(i, max_tokens=20, stop_token_ids=stops, extras=RequestExtras(min_tokens=7 * i))
        for i in range(1, 3)
    ]
    _, runner = drive([make_request(9, max_tokens=30), *asked], steps_in_flight, num_pages=12)
    for request in asked:
        assert request.extras is not None
        banned = sorted(set(runner.banned[request.id]))
        assert banned == list(range(len(banned)))  # the fake model may stop all the same
        assert 0 < len(banned) <= request.extras.min_tokens


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("budget", [7, 32])
def test_each_row_of_a_prompt_is_told_in_order_chunk_by_chunk(
    steps_in_flight: int, budget: int
) -> None:
    extras = [None, RequestExtras(prompt_logprobs=2), RequestExtras(logprobs=0, prompt_logprobs=0)]
    requests = [make_request(i, 21, 6, extras=extras[i]) for i in range(3)]
    driver, runner = drive(requests, steps_in_flight, max_step_tokens=budget)
    assert driver.scheduler.stats().preemptions == 0
    assert runner.told[1] == list(range(1, 21))
    assert runner.told[2] == list(range(1, 27))
    assert not runner.told[0]


def test_a_cached_prompt_is_computed_again_for_its_log_probabilities() -> None:
    plain = make_request(1, 17, 2)
    driver, runner = drive([plain], 1)
    again = Request(2, plain.prompt, 2, extras=RequestExtras(prompt_logprobs=1))
    driver.add(again)
    del driver.requests[1]
    driver.run()
    assert runner.told[2] == list(range(1, 17))
    assert driver.scheduler.stats().prefix_hit_tokens == 0


def test_what_was_told_before_a_preemption_comes_again_only_when_the_prompt_was_not_done() -> None:
    asked = RequestExtras(prompt_logprobs=0)
    requests = [make_request(i, 9, 20, extras=asked) for i in range(4)]
    driver, runner = drive(requests, 2, num_pages=12, max_step_tokens=10)
    assert driver.scheduler.stats().preemptions > 0
    for request in requests:
        assert set(runner.told[request.id]) == set(range(1, 9))


def test_a_request_that_asks_for_nothing_has_no_extras() -> None:
    params = SamplingParams(max_tokens=5, stop=("x",), include_stop_str_in_output=True, echo=True)
    prompt, limits = np.array([1, 2], np.int32), make_limits()
    assert Request.build(1, prompt, params, limits, frozenset()).extras is None
    told = SamplingParams(max_tokens=0, echo=True, logprobs=3)
    request = Request.build(1, prompt, told, limits, frozenset())
    assert request.extras == RequestExtras(logprobs=3, prompt_logprobs=3)
    assert request.max_tokens == 1
