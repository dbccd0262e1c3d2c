"""Seeded random traffic on a scheduler over the hashing fake model, checked after every step.

    python -m tests.core.traffic --steps 5000000 --seed 0 [--processes 2]

Each world draws its limits, cache, policy and admission from its seed, takes random arrivals,
aborts, deadlines, flushes and engine failures for some hundred steps, and must then come to an end
by itself.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

from tests.core.driver import Driver, Reckless
from tests.core.fake_model import VOCAB
from tridentlm.core.extras import RequestExtras
from tridentlm.core.policy import POLICIES, Policy
from tridentlm.core.radix import RadixCache
from tridentlm.core.request import FinishReason, Limits, Request

CONSTRAINED = RequestExtras(grammar="some")
ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class World:
    """One engine's life after the other, in which time passes, with all that each may be told."""

    def __init__(
        self,
        limits: Limits,
        *,
        steps_in_flight: int,
        cached: bool,
        policy: Policy,
        reserve: bool,
        mixed_tokens: int,
        reckless: bool,
        checked: bool = True,
    ) -> None:
        self.limits, self.steps_in_flight = limits, steps_in_flight
        self.make_driver = lambda: Driver(
            limits,
            checked=checked,
            cache=RadixCache(limits.page_size) if cached else None,
            policy=policy,
            reserve=reserve,
            mixed_tokens=mixed_tokens,
            expected=Reckless() if reckless else None,
        )
        self.driver = self.make_driver()
        self.counts = Counter[str]()  # of engines that are gone
        self.now = 0.0
        self.aborted: set[int] = set()

    def abort(self, request_id: int) -> None:
        self.driver.scheduler.abort(request_id)
        self.aborted.add(request_id)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.driver.scheduler.expire(self.now)

    def fail(self) -> None:
        """The engine fails: everybody hears of it, once, and a new one takes over."""
        self.driver.scheduler.fail_all("lost")
        self.driver.drain()
        assert self.driver.finish.keys() == self.driver.requests.keys()
        self.count()
        self.driver = self.make_driver()

    def step(self) -> None:
        driver = self.driver
        launched = driver.launch() if len(driver.launched) < self.steps_in_flight else None
        if driver.launched and (launched is None or len(driver.launched) == self.steps_in_flight):
            driver.collect()
        driver.drain()
        driver.check()

    def conversation(self, request_id: int) -> list[int]:
        """A request's prompt and its answer so far."""
        return [*self.driver.requests[request_id].prompt.tolist(), *self.driver.tokens[request_id]]

    def end(self) -> None:
        """Runs until nothing is left; whoever was not cut short has a whole answer."""
        self.driver.run(self.steps_in_flight, limit=20_000)
        for request_id, finish in self.driver.finish.items():
            late = self.driver.requests[request_id].deadline <= self.now
            assert finish in ENDS or late or request_id in self.aborted
        self.count()

    def count(self) -> None:
        stats = self.driver.scheduler.stats()
        self.counts.update(steps=stats.steps, preemptions=stats.preemptions)


class SeededWorld(World):
    """`run` returns the number of steps and of preemptions."""

    def __init__(self, seed: int, *, checked: bool = True) -> None:
        self.rng = rng = np.random.default_rng(seed)
        page_size = int(rng.choice([1, 2, 3, 4, 8, 16, 64]))
        held = int(rng.integers(8, 64))
        pages = -(-held // page_size)
        limits = Limits(
            max_model_len=held,
            num_pages=pages + int(rng.integers(0, (1 + 2 * (rng.random() < 0.3)) * pages + 1)),
            page_size=page_size,
            max_running=int(rng.integers(1, 10)),
            max_queue=100,
            max_step_tokens=int(rng.integers(1, 40)),
            vocab_size=VOCAB,
        )
        super().__init__(
            limits,
            steps_in_flight=int(rng.integers(1, 3)),
            cached=rng.random() < 0.8,
            reserve=rng.random() < 0.2,
            reckless=rng.random() < 0.7,
            policy=POLICIES[str(rng.choice(list(POLICIES)))],
            mixed_tokens=int(rng.integers(0, 2) * rng.integers(1, 20)),
            checked=checked,
        )
        self.load = rng.uniform(0.05, 0.9)
        self.stops = int(rng.integers(1, 4))

    def run(self, turns: int) -> tuple[int, int]:
        ids = itertools.count()
        for _ in range(turns):
            if self.rng.random() < self.load and len(self.driver.scheduler._queue) < 12:
                self.driver.add(self.draw(next(ids)))
            self.disturb()
            self.step()
        self.end()
        return self.counts["steps"], self.counts["preemptions"]

    def disturb(self) -> None:
        chance = self.rng.random()
        if chance < 0.02 and self.driver.requests:
            self.abort(int(self.rng.choice(list(self.driver.requests)[-8:])))
        elif chance < 0.022:
            self.driver.scheduler.flush_cache()
        elif chance < 0.023:
            self.fail()
        self.pass_time(1)

    def draw(self, request_id: int) -> Request:
        """Half of all prompts go on from an earlier request and its answer."""
        rng, held = self.rng, self.limits.max_tokens_held
        ids = rng.integers(
            0, VOCAB, int(rng.integers(1, 1 + held // int(rng.choice([1, 4]))))
        ).tolist()
        if self.driver.requests and rng.random() < 0.6:
            earlier = int(rng.choice(list(self.driver.requests)[-20:]))
            known = self.conversation(earlier)
            ids = known[: int(rng.integers(1, len(known) + 1))] + ids[: int(rng.integers(0, 9))]
        length = min(len(ids), held - 1)
        deadline = math.inf
        if rng.random() < 0.03:
            deadline = self.now + int(rng.integers(1, 40))
        return Request(
            request_id,
            np.array(ids[:length], np.int32),
            int(rng.integers(1, held - length + 1)),
            temperature=float(rng.integers(2)),
            seed=int(rng.integers(3)),
            stop_token_ids=frozenset(rng.integers(0, VOCAB, rng.integers(0, self.stops)).tolist()),
            deadline=deadline,
            priority=int(rng.integers(-2, 3)),
            cache_salt=str(rng.choice(["", "", "a"])),
            client=str(rng.choice(["", "", "x"])),
            extras=CONSTRAINED if rng.random() < 0.2 else None,
        )


def run_worlds(seeds: Iterator[int], steps: int) -> tuple[int, int, int]:
    """Worlds, steps and preemptions, until there are `steps` steps."""
    worlds = done = preemptions = 0
    while done < steps:
        seed = next(seeds)
        try:
            counts = SeededWorld(seed).run(turns=400)
        except BaseException:
            print(f"seed {seed}", flush=True)
            raise
        worlds, done, preemptions = worlds + 1, done + counts[0], preemptions + counts[1]
    return worlds, done, preemptions


def _run_share(share: tuple[int, int, int]) -> tuple[int, int, int]:
    first, stride, steps = share
    return run_worlds(itertools.count(first, stride), steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    start, count = time.monotonic(), options.processes
    shares = [(options.seed + i, count, -(-options.steps // count)) for i in range(count)]
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        worlds, steps, preemptions = np.sum(pool.map(_run_share, shares, 1), axis=0).tolist()
    seconds = time.monotonic() - start
    print(f"{worlds} worlds, {steps} steps, {preemptions} preemptions in {seconds:.0f} s: all held")


if __name__ == "__main__":
    main()
