"""When the pages run out: who gives them up, and that nobody's text changes by it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.driver import Driver, Reckless, make_limits, make_request
from tests.core.fake_model import answer
from tridentlm.core.expect import ExpectedLength
from tridentlm.core.radix import RadixCache
from tridentlm.core.request import FinishReason


def tight(
    num_pages: int = 8, *, reserve: bool = False, cached: bool = True, **limits: int
) -> Driver:
    """Admits whoever fits for the moment; four rows of up to 32 tokens, pages of 4."""
    return Driver(
        make_limits(num_pages=num_pages, **limits),
        cache=RadixCache(4) if cached else None,
        expected=Reckless(),
        reserve=reserve,
    )


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("cached", [True, False])
def test_preempted_requests_get_the_text_that_they_would_have_got(
    steps_in_flight: int, cached: bool
) -> None:
    driver = tight(cached=cached)
    for i in range(6):
        driver.add(make_request(i, prompt_len=5, max_tokens=24, temperature=1.0, seed=i))
    driver.run(steps_in_flight)
    assert driver.scheduler.stats().preemptions > 0
    assert set(driver.finish.values()) == {FinishReason.LENGTH}


def test_the_youngest_gives_way_and_the_oldest_never_does() -> None:
    driver = tight()
    driver.add(*(make_request(i, prompt_len=4, max_tokens=28) for i in range(3)))
    preempted: list[int] = []
    while driver.scheduler.has_work:
        before = set(driver.scheduler._holders)
        driver.step()
        gone = before - set(driver.scheduler._holders) - set(driver.finish)
        preempted += sorted(gone)
    assert preempted[0] == 2
    assert 0 not in preempted
    assert list(driver.finish) == [0, 1, 2]


def test_a_weaker_priority_gives_way_before_a_younger_request() -> None:
    driver = tight()
    driver.add(make_request(0, prompt_len=4, max_tokens=28, priority=5))
    driver.add(make_request(1, prompt_len=4, max_tokens=28))
    driver.run()
    assert list(driver.finish) == [1, 0]


def test_reserving_never_preempts() -> None:
    driver = tight(reserve=True)
    for i in range(6):
        driver.add(make_request(i, prompt_len=5, max_tokens=24))
    driver.run(steps_in_flight=2)
    assert driver.scheduler.stats().preemptions == 0


def test_what_was_computed_before_the_preemption_is_found_again() -> None:
    driver = tight(num_pages=12)
    driver.add(*(make_request(i, prompt_len=8, max_tokens=20) for i in range(2)))
    driver.run()
    assert driver.scheduler.stats().preemptions == 1
    computed = sum(plan.num_tokens for plan in driver.runner.plans)
    again = computed - 2 * (8 + 20 - 1)
    assert again <= 8, "the page that the other took, and the unfinished one"


def test_cached_tokens_of_a_preempted_request_are_those_of_its_first_admission() -> None:
    driver = tight(num_pages=8, max_step_tokens=4)
    driver.add(make_request(0, prompt_len=4, max_tokens=28))
    driver.step()
    driver.add(make_request(1, prompt_len=20, max_tokens=4))
    cached: dict[int, int] = {}
    while driver.scheduler.has_work:
        if driver.launch() is not None:
            cached.update(driver.collect().cached)
        driver.drain()
    assert driver.scheduler.stats().preemptions > 0
    assert cached == {1: 0}


def test_the_largest_admissible_request_completes_in_a_crowd() -> None:
    driver = tight(num_pages=8)
    driver.add(*(make_request(i, prompt_len=3, max_tokens=20) for i in range(5)))
    driver.add(make_request(9, prompt_len=16, max_tokens=16))
    driver.add(*(make_request(i, prompt_len=3, max_tokens=20) for i in range(10, 15)))
    driver.run(steps_in_flight=2)
    assert driver.finish[9] is FinishReason.LENGTH


def test_victim_in_a_launched_step_keeps_its_pages_and_token_until_the_step_ends() -> None:
    driver = tight(num_pages=4)
    driver.add(*(make_request(i, prompt_len=3, max_tokens=12) for i in range(2)))
    while not driver.scheduler.stats().preemptions:
        driver.launch()
        if len(driver.launched) == 2:
            driver.collect()
    stats = driver.scheduler.stats()
    assert stats.running == 2, "the victim is still in the step before"
    driver.collect()
    assert driver.scheduler.stats().waiting == 1
    driver.run(steps_in_flight=2)
    assert driver.tokens[1] == answer(driver.requests[1])[0]


@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_preempted_request_can_end_while_it_waits(end: str) -> None:
    driver = tight()
    driver.add(*(make_request(i, prompt_len=4, max_tokens=28, deadline=99.0) for i in range(3)))
    while not driver.scheduler.stats().preemptions:
        driver.step()
    if end == "abort":
        driver.scheduler.abort(2)
    else:
        driver.scheduler.expire(99.0)
    driver.run()
    assert driver.finish[2] is FinishReason.ABORT


def test_optimistic_admission_runs_more_at_once_than_reserving() -> None:
    running = []
    for reserve in (False, True):
        driver = tight(num_pages=16, reserve=reserve, max_running=8)
        driver.add(*(make_request(i, prompt_len=4, max_tokens=28) for i in range(8)))
        driver.step()
        running.append(driver.scheduler.stats().running)
        driver.run()
    assert running == [8, 2]


def test_expected_length_follows_what_answers_come_to() -> None:
    expected = ExpectedLength()
    for _ in range(300):
        expected.observe(10.0)
    prompt, length, final = (np.array([v], np.int64) for v in (100, 100, 5000))
    assert 110 <= expected.final_len(prompt, length, final)[0] <= 112
    assert expected.final_len(prompt, length + 200, final)[0] == 401
    assert expected.final_len(prompt, length, final * 0 + 105)[0] == 105
    expected.preempted()
    assert expected.final_len(prompt, length, final)[0] > 112
