"""What went wrong in the system that this one began from must not go wrong here.

Each test is named for the behaviour that was seen there. A defect of a single structure is tested
beside it:

    a pinned buffer refilled while its copy was pending (#103)        models/test_staging.py
    heads and samples that differ between ranks (#98, #88, #113)      parallel/
    pages counted as tokens, views for copies, locks that miss their
    own node, an integrity check that checks nothing (#80, #149 ...)  core/test_radix.py
    a slot given away while a step still writes to it                 core/test_scheduler.py
    no integrity check when idle (#48), a failing step that leaves
    its clients waiting                                               engine/test_worker.py
    offline answers mixed up, short of their last token or too long   engine/test_llm.py
    two servers on one host, exits that hang                          server/, parallel/
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_model import answer
from tridentlm.core.plan import I64
from tridentlm.core.radix import RadixCache
from tridentlm.core.request import FinishReason, Request
from tridentlm.core.scheduler import Scheduler
from tridentlm.errors import InvalidRequest


class NoHolding(Scheduler):
    """Admits prompts that share a prefix side by side, so that both compute it."""

    def _admit(self, pending: I64) -> bool:
        self._admission._next_page = lambda slot: None  # type: ignore[method-assign]
        return super()._admit(pending)


def twins(scheduler: type[Scheduler]) -> Driver:
    driver = Driver(
        make_limits(num_pages=24, max_running=3), cache=RadixCache(4), scheduler=scheduler
    )
    prompt = np.arange(12, dtype=np.int32)
    driver.add(Request(0, prompt, 12), Request(1, prompt, 12, seed=1))
    driver.launch()
    return driver


def test_duplicate_pages_are_remapped_before_they_are_freed() -> None:
    driver = twins(NoHolding)
    table = driver.scheduler.table
    assert np.array_equal(table.block_table[0, :3], table.block_table[1, :3])
    assert driver.scheduler.stats().free_pages == 24 - 6, "the launched step still reads them"
    driver.collect()
    assert driver.scheduler.stats().free_pages == 24 - 3
    driver.add(make_request(2, prompt_len=20))
    driver.run(steps_in_flight=2)


def test_duplicate_pages_that_a_row_still_reads_do_not_go_unnoticed() -> None:
    """The row keeps the old mapping, as upstream's did, after the pages have gone back."""
    driver = twins(NoHolding)
    driver.collect()
    free = driver.scheduler.kv.pool.allocate(3)
    driver.scheduler.table.block_table[1, :3] = free
    driver.scheduler.kv.pool.free(free)
    with pytest.raises(AssertionError, match="not locked"):
        driver.scheduler.check_integrity()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_no_token_after_the_end_of_sequence(steps_in_flight: int) -> None:
    driver = Driver(make_limits())
    request = make_request(1, max_tokens=10)
    third = answer(request)[0][2]
    driver.add(make_request(1, max_tokens=10, stop_token_ids=frozenset({third})))
    driver.run(steps_in_flight)
    assert driver.tokens[1][-1] == third
    assert driver.tokens[1].count(third) == 1


def test_too_long_a_prompt_is_refused_not_dropped() -> None:
    driver = Driver(make_limits(max_model_len=16))
    with pytest.raises(InvalidRequest):
        driver.add(make_request(1, prompt_len=16))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_request_gets_its_terminal_output(steps: int) -> None:
    driver = Driver(make_limits(), cache=RadixCache(4))
    driver.add(make_request(1, prompt_len=9, max_tokens=9))
    for _ in range(steps):
        driver.step()
    driver.scheduler.abort(1)
    driver.drain()
    assert driver.finish == {1: FinishReason.ABORT}


def test_abort_while_the_last_token_is_in_flight_frees_once() -> None:
    """#111: a double free when a request is aborted while it finishes."""
    driver = Driver(make_limits(), cache=RadixCache(4))
    driver.add(make_request(1, max_tokens=2))
    driver.launch()
    driver.launch()
    driver.scheduler.abort(1)
    driver.collect()
    driver.scheduler.check_integrity()
    driver.collect()
    driver.run()
    assert driver.finish == {1: FinishReason.ABORT}


def test_a_chunks_sample_never_overwrites_a_prompt_token() -> None:
    """ef4367f; the fake model reads back every input."""
    driver = Driver(make_limits(max_step_tokens=3), cache=RadixCache(4))
    driver.add(make_request(1, prompt_len=17, max_tokens=3))
    plan = driver.launch()
    assert plan is not None
    assert not len(plan.sampled)
    driver.run(steps_in_flight=2)


def test_longest_sequence_fits_its_row_whatever_the_page_size() -> None:
    """ab5d260: an aligned length overflowed the page table."""
    for page_size in (1, 3, 16, 64):
        driver = Driver(make_limits(max_model_len=50, page_size=page_size))
        driver.add(make_request(1, prompt_len=20, max_tokens=30))
        driver.run(steps_in_flight=2)


def test_rows_keep_their_order_between_runs() -> None:
    """#113: running requests in a set came in another order in each process."""
    orders = []
    for _ in range(2):
        driver = Driver(make_limits())
        driver.add(*(make_request(i) for i in (7, 3, 9, 1)))
        driver.run()
        orders.append(driver.first)
    assert orders == [[7, 3, 9, 1]] * 2
