"""Who goes next: policies, turns between clients, prefixes in work, and the bound on waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.core.driver import Driver, make_limits, make_request
from tridentlm.core.params import SamplingParams
from tridentlm.core.policy import POLICIES, check_priority
from tridentlm.core.radix import RadixCache
from tridentlm.core.request import Request
from tridentlm.errors import InvalidRequest


def one_slot(policy: str, **limits: int) -> Driver:
    return Driver(
        make_limits(max_running=1, **limits), cache=RadixCache(4), policy=POLICIES[policy]
    )


def finish_order(driver: Driver) -> list[int]:
    driver.run()
    return list(driver.finish)


def test_lowest_priority_value_first_and_arrival_among_equals() -> None:
    driver = one_slot("priority")
    for i, priority in enumerate([1, 0, 1, -3, 0]):
        driver.add(make_request(i, priority=priority))
    assert finish_order(driver) == [3, 1, 4, 0, 2]


def test_first_come_first_served_ignores_priority() -> None:
    driver = one_slot("fcfs")
    for i, priority in enumerate([1, 0, -3]):
        driver.add(make_request(i, priority=priority))
    assert finish_order(driver) == [0, 1, 2]


def test_longest_cached_prefix_first() -> None:
    driver = one_slot("longest-prefix")
    warm = np.arange(20, dtype=np.int32)
    driver.add(Request(0, warm, 2))
    while driver.scheduler.has_work:
        driver.step()
    driver.add(make_request(1, prompt_len=20))
    driver.add(Request(2, np.append(warm[:8], [50, 51]).astype(np.int32), 2))
    driver.add(Request(3, warm, 2))
    assert finish_order(driver) == [0, 3, 2, 1]


@pytest.mark.parametrize("policy", ["priority", "longest-prefix"])
def test_no_policy_overtakes_anyone_for_ever(policy: str) -> None:
    driver = one_slot(policy)
    driver.scheduler._queue.patience = 5
    favoured = np.arange(20, dtype=np.int32)
    driver.add(Request(0, favoured, 1))
    driver.add(make_request(1, prompt_len=10, max_tokens=1, priority=9))
    for i in range(2, 30):
        driver.add(Request(i, favoured, 1))
        driver.step()
    driver.run()
    assert list(driver.finish).index(1) == 5


def test_clients_take_turns_however_many_requests_one_has_queued() -> None:
    driver = Driver(make_limits(max_running=2), cache=RadixCache(4))
    driver.add(*(make_request(i, client="greedy") for i in range(6)))
    driver.step()
    driver.add(*(make_request(i, client="modest") for i in (10, 11)))
    driver.run()
    assert driver.first[2:6] == [2, 10, 3, 11]


def test_prompts_that_arrive_together_compute_their_common_prefix_once() -> None:
    driver = Driver(make_limits(max_running=8, max_step_tokens=64), cache=RadixCache(4))
    common = np.arange(40, dtype=np.int32)
    for i in range(6):
        driver.add(Request(i, np.append(common, [i, i]).astype(np.int32), 2))
    driver.run()
    assert driver.scheduler.stats().prefix_hit_tokens == 5 * 40


def test_long_prompt_is_shared_chunk_by_chunk_before_it_is_done() -> None:
    driver = Driver(make_limits(max_step_tokens=16), cache=RadixCache(4))
    prompt = np.arange(48, dtype=np.int32)
    driver.add(Request(0, prompt, 2))
    driver.step()
    driver.add(Request(1, np.append(prompt[:16], [60, 61]).astype(np.int32), 2))
    cached: dict[int, int] = {}
    while driver.scheduler.has_work:
        if driver.launch() is not None:
            cached.update(driver.collect().cached)
        driver.drain()
    assert cached == {0: 0, 1: 16}
    driver.run()


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    driver = Driver(make_limits(), cache=RadixCache(4))
    driver.add(make_request(0, prompt_len=6, max_tokens=11))
    while driver.scheduler.has_work:
        driver.step()
    turn = [*driver.requests[0].prompt.tolist(), *driver.tokens[0], 1, 2]
    driver.add(Request(1, np.array(turn, np.int32), 2))
    driver.launch()
    assert driver.collect().cached == [(1, 16)]
    driver.run()


@pytest.mark.parametrize("salts", [("a", "b"), ("", "a")])
def test_salted_prompts_are_not_shared(salts: tuple[str, str]) -> None:
    driver = Driver(make_limits(), cache=RadixCache(4))
    prompt = np.arange(20, dtype=np.int32)
    for i, salt in enumerate([*salts, *salts]):
        driver.add(Request(i, prompt, 2, cache_salt=salt))
    hits = 0

    def run() -> Any:
        nonlocal hits
        driver.run()
        hits = driver.scheduler.stats().prefix_hit_tokens

    run()
    assert hits == 2 * 16


def test_a_users_requests_are_one_client_whatever_session_brings_them() -> None:
    limits, prompt = make_limits(), np.arange(5, dtype=np.int32)

    def client(user: str, session: str) -> str:
        params = SamplingParams(max_tokens=2, user=user)
        return Request.build(1, prompt, params, limits, frozenset(), session).client

    assert client("u", "s1") == client("u", "s2") != client("v", "s1")
    assert client("", "s1") == "s1" != client("s1", "s1")


@pytest.mark.parametrize("policy", ["fcfs", "longest-prefix"])
def test_a_priority_is_not_ignored_in_silence(policy: str) -> None:
    with pytest.raises(InvalidRequest, match="--policy priority"):
        check_priority(policy, -1)
    check_priority(policy, 0)
    check_priority("priority", -1)


def test_flush_forgets_what_nobody_reads() -> None:
    driver = Driver(make_limits(), cache=RadixCache(4))
    driver.add(make_request(0, prompt_len=20))
    while driver.scheduler.has_work:
        driver.step()
    assert driver.scheduler.stats().cached_pages > 0
    assert driver.scheduler.stats().free_pages == driver.scheduler.limits.num_pages
    driver.scheduler.flush_cache()
    assert driver.scheduler.stats().cached_pages == 0
    driver.scheduler.check_integrity()
