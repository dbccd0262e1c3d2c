"""What the scheduler costs: CPU time of a step, and of one prefix lookup, as sizes grow.

    python -m benchmarks.scheduler

A step is schedule() and commit() of rows that all decode, beside waiting requests that do not fit
and a radix cache full of other prompts. No model runs. `blocked`: slots are free and pages are not,
so every step looks at the queue again, as the policy and the number of clients make it.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from benchmarks.record import write
from tridentlm.core.policy import POLICIES
from tridentlm.core.radix import RadixCache
from tridentlm.core.request import Limits, Request
from tridentlm.core.scheduler import Scheduler

VOCAB, PAGE = 50_000, 16
STEPS, WARM = 300, 20


def random_prompt(rng: np.random.Generator, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return rng.integers(0, VOCAB, length).astype(np.int32)


def loaded(running: int, waiting: int, cached_pages: int) -> Scheduler:
    """A scheduler in that state: prompts of 512 tokens, answers of up to 1,000."""
    rng = np.random.default_rng(0)
    limits = Limits(
        max_model_len=2048,
        num_pages=cached_pages + running * 128,
        page_size=PAGE,
        max_running=running,
        max_queue=waiting,
        max_step_tokens=running * 512,
        vocab_size=VOCAB,
    )
    cache = RadixCache(PAGE)
    scheduler = Scheduler(limits, cache=cache)
    for _ in range(cached_pages // 64):
        pages = scheduler.kv.take(64)
        cache.insert(random_prompt(rng, 64 * PAGE), pages, 0)
    for number in range(running + waiting):
        scheduler.add(Request(number, random_prompt(rng, 512), 1000))
    return scheduler


def blocked(running: int, waiting: int, policy: str, clients: int) -> Scheduler:
    """Twice as many slots as the pages are for; a quarter of the prompts begins alike."""
    rng, tokens = np.random.default_rng(0), 1512
    pages = running * -(-tokens // PAGE)
    limits = Limits(2048, pages, PAGE, 2 * running, waiting, running * 512, VOCAB)
    scheduler = Scheduler(limits, cache=RadixCache(PAGE), policy=POLICIES[policy], reserve=True)
    common = random_prompt(rng, 256)
    for number in range(running + waiting):
        prompt = random_prompt(rng, 512)
        if number % 4 == 0:
            prompt[:256] = common
        client, urgency = str(number % clients), number % 7
        scheduler.add(Request(number, prompt, 1000, client=client, priority=urgency))
    return scheduler


def step_ms(scheduler: Scheduler, running: int) -> dict[str, float]:
    times = []
    for _ in range(STEPS):
        start = time.thread_time()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, np.ones(len(plan.sampled), np.int32))
        times.append((time.thread_time() - start) * 1e3)
    assert running <= scheduler.stats().running < 1.3 * running
    p50, p99 = np.percentile(times[WARM:], [50, 99])
    return {"p50_ms": round(float(p50), 4), "p99_ms": round(float(p99), 4)}


def match_ms(tokens: int, node: int) -> dict[str, float]:
    """A prompt that lies in the tree in nodes of `node` tokens: found, and locked and unlocked."""
    rng, cache = np.random.default_rng(0), RadixCache(PAGE)
    prompt = random_prompt(rng, tokens)
    cache.insert(prompt, np.arange(tokens // PAGE, dtype=np.int32), 0)
    for end in range(tokens - node, 0, -node):
        cache.match_prefix(prompt[:end])  # cuts the first node there
    times = []
    for _ in range(20):
        start = time.thread_time()
        match = cache.match_prefix(prompt)
        found = time.thread_time()
        cache.lock(match.handle)
        cache.unlock(match.handle)
        times.append([found - start, time.thread_time() - found])
    assert match.length == tokens
    match_s, lock_s = np.median(times, axis=0).tolist()
    return {"match_ms": round(match_s * 1e3, 4), "lock_unlock_ms": round(lock_s * 1e3, 4)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    steps = [
        {"running": r, "waiting": w, "cached_pages": c, **step_ms(loaded(r, w, c), r)}
        for r, w, c in (
            *((r, 1000, 50_000) for r in (16, 64, 256)),
            *((256, w, 50_000) for w in (0, 4000)),
            *((256, 1000, c) for c in (0, 200_000)),
        )
    ]
    queues = [
        {"policy": p, "clients": c, "waiting": w, **step_ms(blocked(256, w, p, c), 256)}
        for p in POLICIES
        for w, c in ((1000, 1), (1000, 100), (4000, 100))
    ]
    matches = [
        {"tokens": tokens, "node_tokens": node, **match_ms(tokens, node)}
        for tokens in (16_000, 48_000, 100_000, 200_000, 400_000)
        for node in (16, 256, 2_000)
    ]
    for row in (*steps, *queues, *matches):
        print(json.dumps(row))
    result = {"benchmark": "scheduler", "steps": steps, "blocked": queues, "matches": matches}
    print(write("scheduler", result))


if __name__ == "__main__":
    main()
