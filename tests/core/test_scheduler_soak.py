"""A busy engine, many requests at once: what single rules in random order seldom reach."""

from __future__ import annotations

import numpy as np
import pytest
from tridentlm.core.radix import RadixCache
from tridentlm.core.request import FinishReason, Request

from tests.core.driver import Driver, make_limits
from tests.core.fake_model import VOCAB

ROUNDS = 100


def draw_request(rng: np.random.Generator, driver: Driver, request_id: int) -> Request:
    """Half of all prompts go on from an earlier request and its answer."""
    held = driver.scheduler.limits.max_tokens_held
    ids = rng.integers(0, VOCAB, held).tolist()
    if driver.requests and rng.random() < 0.5:
        earlier = int(rng.choice(list(driver.requests)))
        ids = [*driver.requests[earlier].prompt.tolist(), *driver.tokens[earlier], *ids[:2]]
    length = int(rng.integers(1, min(len(ids) + 1, held)))
    if rng.random() < 0.5:
        length = min(len(ids), held - 1)
    return Request(
        request_id,
        np.array(ids[:length], np.int32),
        int(rng.integers(1, min(held - length, 12) + 1)),
        temperature=float(rng.integers(2)),
        stop_token_ids=frozenset(rng.integers(0, VOCAB, rng.integers(0, 6)).tolist()),
    )


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(16))
def test_every_promise_holds_under_load(seed: int, steps_in_flight: int) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 2, 3, 4, 16]))
    limits = make_limits(
        page_size=page_size,
        num_pages=int(rng.integers(24, 120)) // page_size + 1,
        max_running=int(rng.integers(2, 8)),
        max_step_tokens=int(rng.integers(3, 40)),
        max_model_len=48,
    )
    driver = Driver(limits, cache=RadixCache(page_size) if rng.random() < 0.7 else None)
    aborted: set[int] = set()
    for turn in range(ROUNDS):
        for i in range(int(rng.integers(0, 3))):
            driver.add(draw_request(rng, driver, turn * 10 + i))
        launched = driver.launch()
        if driver.requests and rng.random() < 0.2:
            victim = int(rng.choice(list(driver.requests)[-8:]))
            driver.scheduler.abort(victim)
            aborted.add(victim)
        if driver.launched and (launched is None or len(driver.launched) == steps_in_flight):
            driver.collect()
        driver.scheduler.check_integrity()
    driver.run(steps_in_flight)
    ends = {driver.finish[i] for i in driver.requests if i not in aborted}
    assert ends == {FinishReason.STOP, FinishReason.LENGTH}
