"""The scheduler's single promises, each in the smallest situation that shows it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_model import answer
from tridentlm.core.holders import SlotHolders
from tridentlm.core.plan import FROM_DEVICE, I32, I64
from tridentlm.core.radix import RadixCache
from tridentlm.core.request import FinishReason, Limits, Request
from tridentlm.core.scheduler import Scheduler
from tridentlm.errors import ContextLengthExceeded, InvalidRequest


def first_tokens(request: Request, count: int) -> frozenset[int]:
    """A stop set that ends the request at its `count`th token."""
    return frozenset(answer(request)[0][count - 1 : count])


def test_decodes_and_several_prompts_share_a_step_with_decodes_first() -> None:
    driver = Driver(make_limits())
    driver.add(make_request(1, prompt_len=3))
    driver.step()
    driver.add(make_request(2, prompt_len=7), make_request(3, prompt_len=6))
    plan = driver.launch()
    assert plan is not None
    assert np.diff(plan.query_starts).tolist() == [1, 7, 6]
    assert plan.sampled.tolist() == [0, 1, 2]
    driver.collect()
    driver.run()


def test_long_prompt_is_cut_into_chunks_that_leave_room_for_decodes() -> None:
    driver = Driver(make_limits(max_step_tokens=8))
    driver.add(make_request(1, prompt_len=3, max_tokens=20))
    driver.step()
    driver.add(make_request(2, prompt_len=20))
    counts = []
    for _ in range(3):
        plan = driver.launch()
        assert plan is not None
        counts.append((np.diff(plan.query_starts).tolist(), plan.sampled.tolist()))
        driver.collect()
    assert counts == [([1, 7], [0]), ([1, 7], [0]), ([1, 6], [0, 1])]
    driver.run()


def test_more_decodes_than_the_budget_still_all_finish() -> None:
    driver = Driver(make_limits(max_step_tokens=2))
    driver.add(*(make_request(i, prompt_len=2, max_tokens=9) for i in range(4)))
    driver.run()


def test_first_come_is_first_served_and_nobody_overtakes_a_large_one() -> None:
    driver = Driver(make_limits(num_pages=10))
    driver.add(make_request(1, prompt_len=20, max_tokens=4))  # 6 of 10 pages
    driver.add(make_request(2, prompt_len=20, max_tokens=4))  # does not fit beside it
    driver.add(make_request(3, prompt_len=2, max_tokens=2))  # would fit
    driver.step()
    assert driver.scheduler.stats().waiting == 2
    driver.run()
    assert driver.first == [1, 2, 3]


def test_prompts_beside_decodes_get_no_more_than_their_share_and_alone_the_whole_budget() -> None:
    driver = Driver(make_limits(max_step_tokens=16), mixed_tokens=3)
    driver.add(make_request(1, prompt_len=20, max_tokens=9))
    alone = driver.launch()
    assert alone is not None
    assert alone.num_tokens == 16
    driver.collect()
    driver.step()
    driver.add(make_request(2, prompt_len=9, max_tokens=9))
    mixed = driver.launch()
    assert mixed is not None
    assert np.diff(mixed.query_starts).tolist() == [1, 3]
    driver.collect()
    driver.run()


def test_row_ahead_of_its_tokens_takes_them_from_the_device() -> None:
    driver = Driver(make_limits())
    driver.add(make_request(1, max_tokens=3))
    driver.launch()
    plan = driver.launch()
    assert plan is not None
    assert plan.token_ids.tolist() == [FROM_DEVICE]
    driver.collect()
    driver.run(steps_in_flight=2)


def test_ending_by_length_is_foreseen_and_costs_no_extra_row() -> None:
    driver = Driver(make_limits())
    driver.add(make_request(1, max_tokens=2))
    driver.launch()
    driver.launch()
    assert driver.launch() is None
    driver.collect()
    driver.collect()
    assert driver.finish == {1: FinishReason.LENGTH}
    driver.run()


class RetiresAtOnce(SlotHolders):
    """Slots and pages without the retire rule."""

    def _retire(self, slots: I64 | I32) -> None:
        self._table.in_flight[slots] = 0
        super()._retire(slots)


class WithoutRetireRule(Scheduler):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._holders = RetiresAtOnce(self.table, self.kv, self._admission)


def one_slot_two_steps(scheduler: type[Scheduler]) -> Driver:
    """Request 1 meets its stop token while the next step, which contains it, is in flight."""
    driver = Driver(make_limits(max_running=1), scheduler=scheduler)
    request = make_request(1, max_tokens=8)
    driver.add(make_request(1, max_tokens=8, stop_token_ids=first_tokens(request, 2)))
    driver.add(make_request(2, max_tokens=8))
    driver.launch()
    driver.launch()
    driver.collect()
    driver.launch()
    driver.collect()
    assert driver.finish == {1: FinishReason.STOP}
    return driver


def test_slot_and_pages_stay_taken_until_no_launched_step_contains_the_request() -> None:
    driver = one_slot_two_steps(Scheduler)
    assert driver.scheduler.stats().free_slots == 0
    assert driver.scheduler.stats().free_pages < driver.scheduler.limits.num_pages
    assert driver.launch() is None
    driver.collect()
    assert driver.scheduler.stats().free_slots == 1
    driver.run(steps_in_flight=2)
    assert driver.tokens[2] == answer(driver.requests[2])[0]


def test_without_the_retire_rule_a_request_reads_its_predecessors_token() -> None:
    driver = one_slot_two_steps(WithoutRetireRule)
    assert driver.launch() is not None, "the slot was given away at once"
    driver.collect()
    assert driver.tokens[2][:1] != answer(driver.requests[2])[0][:1]


def test_what_a_step_still_computes_for_an_aborted_request_is_dropped() -> None:
    driver = Driver(make_limits())
    driver.add(make_request(1), make_request(2))
    driver.launch()
    driver.launch()
    driver.scheduler.abort(1)
    output = driver.collect()
    assert output.ids.tolist() == [2, 1]
    assert output.tokens.tolist()[1] == -1
    assert driver.collect().ids.tolist() == [2]
    driver.run()
    assert driver.tokens[1] == []


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_abort_in_every_state_ends_once_and_frees_everything(steps: int) -> None:
    """Queued, in the middle of the prompt, decoding, and ended already."""
    driver = Driver(make_limits(max_step_tokens=4))
    driver.add(make_request(1, prompt_len=6, max_tokens=2))
    for _ in range(steps):
        driver.step()
    driver.scheduler.abort(1)
    driver.scheduler.abort(1)
    driver.scheduler.abort(99)
    driver.run()
    assert driver.finish == {1: FinishReason.ABORT if steps < 3 else FinishReason.LENGTH}


def test_aborted_while_queued_is_reported_without_a_step() -> None:
    driver = Driver(make_limits(max_running=1))
    driver.add(make_request(1), make_request(2))
    driver.launch()
    driver.scheduler.abort(2)
    driver.drain()
    assert driver.finish == {2: FinishReason.ABORT}
    driver.run()


def test_deadline_ends_running_and_queued_requests_alike() -> None:
    driver = Driver(make_limits(max_running=1))
    driver.add(make_request(1, deadline=10.0), make_request(2, deadline=9.0), make_request(3))
    driver.step()
    driver.scheduler.expire(9.5)
    driver.drain()
    assert driver.finish == {2: FinishReason.ABORT}
    driver.scheduler.expire(10.0)
    driver.run()
    assert driver.finish[1] is FinishReason.ABORT
    assert driver.finish[3] is FinishReason.LENGTH
    assert driver.errors == {}


def test_failing_carries_the_message_also_for_an_unknown_request() -> None:
    driver = Driver(make_limits())
    driver.add(make_request(1))
    driver.step()
    driver.scheduler.fail_all("broken")
    driver.scheduler.fail(7, "refused")
    driver.drain()
    assert driver.errors == {1: "broken", 7: "refused"}
    assert set(driver.finish.values()) == {FinishReason.ERROR}
    driver.run()


def test_stop_token_at_the_last_place_is_a_stop() -> None:
    driver = Driver(make_limits())
    request = make_request(1, max_tokens=1)
    driver.add(make_request(1, max_tokens=1, stop_token_ids=first_tokens(request, 1)))
    driver.run()
    assert driver.finish == {1: FinishReason.STOP}


def test_what_can_never_fit_is_refused_and_what_just_fits_is_served() -> None:
    driver = Driver(make_limits(num_pages=8, max_model_len=32))
    driver.add(make_request(1, prompt_len=20, max_tokens=12))
    with pytest.raises(ContextLengthExceeded):
        driver.add(make_request(2, prompt_len=20, max_tokens=13))
    driver.run()
    small = Driver(make_limits(num_pages=4))
    with pytest.raises(InvalidRequest, match="KV cache holds 16"):
        small.add(make_request(1, prompt_len=10, max_tokens=7))
    small.add(make_request(1, prompt_len=10, max_tokens=6))
    small.run()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": 1}, "in use"),
        ({"request_id": -5}, "in use or negative"),
        ({"request_id": 2, "max_tokens": 0}, "max_tokens"),
        ({"request_id": 2, "prompt_len": 0}, "empty"),
    ],
)
def test_bad_request_is_refused_and_the_others_run_on(fields: dict[str, Any], message: str) -> None:
    driver = Driver(make_limits())
    driver.add(make_request(1))
    with pytest.raises(InvalidRequest, match=message):
        driver.scheduler.add(
            Request(
                fields["request_id"],
                np.zeros(fields.get("prompt_len", 3), np.int32),
                fields.get("max_tokens", 4),
            )
        )
    driver.run()


def test_token_outside_the_vocabulary_is_refused() -> None:
    driver = Driver(make_limits())
    with pytest.raises(InvalidRequest, match="Token ids"):
        driver.scheduler.add(Request(1, np.array([3, 64], np.int32), 1))


def test_cached_prefix_is_not_computed_again_and_is_reported() -> None:
    driver = Driver(make_limits(), cache=RadixCache(4))
    prompt = np.arange(14, dtype=np.int32)
    driver.add(Request(1, prompt, 4))
    while driver.scheduler.has_work:
        driver.step()
    driver.add(Request(2, prompt, 4))
    plan = driver.launch()
    assert plan is not None
    assert plan.num_tokens == 2
    assert driver.collect().cached == [(2, 12)]
    assert driver.scheduler.stats().prefix_hit_tokens == 12
    driver.run()


def test_page_whose_last_token_was_never_computed_is_not_cached() -> None:
    driver = Driver(make_limits(), cache=RadixCache(4))
    driver.add(make_request(1, prompt_len=6, max_tokens=2))  # the KV of token 8 is not needed
    while driver.scheduler.has_work:
        driver.step()
    ids = [*driver.requests[1].prompt.tolist(), *driver.tokens[1]]
    driver.add(Request(2, np.array([*ids, 1], np.int32), 2))
    driver.launch()
    assert driver.collect().cached == [(2, 4)]
    driver.run()


def test_cached_pages_are_evicted_for_who_needs_them() -> None:
    driver = Driver(make_limits(num_pages=8), cache=RadixCache(4))
    for request_id in range(4):
        driver.add(make_request(request_id, prompt_len=20, max_tokens=8))
    driver.run(steps_in_flight=2)


def test_a_page_held_twice_does_not_go_unnoticed() -> None:
    driver = Driver(make_limits())
    driver.add(make_request(1), make_request(2))
    driver.launch()
    table = driver.scheduler.table
    table.block_table[0, 0] = table.block_table[1, 0]
    with pytest.raises(AssertionError, match=r"held [02] times"):
        driver.scheduler.check_integrity()


def test_a_step_of_256_rows_costs_the_scheduler_well_under_a_millisecond() -> None:
    limits = Limits(
        max_model_len=2048,
        num_pages=256 * 128,
        page_size=16,
        max_running=256,
        max_queue=0,
        max_step_tokens=8192,
        vocab_size=64,
    )
    scheduler = Scheduler(limits)
    for i in range(256):
        scheduler.add(make_request(i, prompt_len=30, max_tokens=1000, stop_token_ids={64}))
    seconds = []
    for _ in range(60):
        start = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, np.zeros(256, np.int32))
        seconds.append(time.perf_counter() - start)
        assert plan.num_rows == 256
    assert sorted(seconds)[10] < 1e-3
