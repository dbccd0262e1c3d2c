"""Random traffic against a naive model: the promises hold in every state that hypothesis finds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.core.driver import Driver
from tests.core.fake_model import VOCAB
from tests.core.traffic import World
from tridentlm.core.plan import I32
from tridentlm.core.policy import POLICIES
from tridentlm.core.request import Limits, Request
from tridentlm.errors import InvalidRequest

lengths = st.one_of(st.integers(1, 8), st.integers(1, 70))
prompts = st.one_of(
    st.builds(lambda n, token: [token] * n, lengths, st.integers(0, 3)),  # share prefixes
    st.builds(lambda n, seed: [(seed * 7 + i) % VOCAB for i in range(n)], lengths, st.integers()),
)


worlds = st.builds(
    World,
    st.builds(
        Limits,
        max_model_len=st.integers(2, 80),
        num_pages=st.integers(1, 40),
        page_size=st.one_of(st.integers(1, 4), st.integers(1, 64)),
        max_running=st.integers(1, 6),
        max_queue=st.just(100),
        max_step_tokens=st.integers(1, 40),
        vocab_size=st.just(VOCAB),
    ),
    steps_in_flight=st.integers(1, 2),
    cached=st.booleans(),
    policy=st.sampled_from(list(POLICIES.values())),
    reserve=st.booleans(),
    mixed_tokens=st.integers(0, 20),
    reckless=st.booleans(),
)


class Traffic(RuleBasedStateMachine):
    """Arrivals, aborts, deadlines, flushes, launches and collects, in any order."""

    steps = 0

    @initialize(world=worlds)
    def start(self, world: World) -> None:
        self.world = world
        self.next_id = 0

    @property
    def driver(self) -> Driver:
        return self.world.driver

    @rule(
        prompt=prompts,
        max_tokens=st.one_of(st.integers(1, 6), st.integers(1, 80)),
        stops=st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, VOCAB), max_size=20)),
        seconds=st.one_of(st.just(math.inf), st.integers(0, 20)),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 2**64 - 1),
        others=st.tuples(st.integers(-1, 1), st.sampled_from("-ab"), st.sampled_from("-xy")),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        stops: frozenset[int],
        seconds: float,
        temperature: float,
        seed: int,
        others: tuple[int, str, str],
    ) -> None:
        priority, salt, client = others
        self.send(
            np.array(prompt, np.int32),
            max_tokens,
            stop_token_ids=stops,
            deadline=self.world.now + seconds,
            temperature=temperature,
            seed=seed,
            priority=priority,
            cache_salt=salt,
            client=client,
        )

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data(), suffix=st.lists(st.integers(0, 3), max_size=4))
    def follow_up(self, data: st.DataObject, suffix: list[int]) -> None:
        """A prompt that begins like an earlier request and its answer: food for the cache."""
        earlier = data.draw(st.sampled_from(sorted(self.driver.requests)))
        ids = self.world.conversation(earlier)
        kept = data.draw(st.one_of(st.just(len(ids)), st.integers(1, len(ids))))
        self.send(np.array(ids[:kept] + suffix, np.int32), data.draw(st.integers(1, 6)))

    def send(self, prompt: I32, max_tokens: int, **fields: Any) -> None:
        request = Request(self.next_id, prompt, max_tokens, **fields)
        self.next_id += 1
        fits = len(prompt) + max_tokens <= self.world.limits.max_tokens_held
        try:
            self.driver.add(request)
        except InvalidRequest:
            assert not fits
        else:
            assert fits

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.integers(0, self.next_id + 1)))

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds: int) -> None:
        self.world.pass_time(seconds)
        for request in self.driver.requests.values():
            if request.deadline <= self.world.now:
                assert request.id not in self.driver.scheduler._holders
                assert request.id not in self.driver.scheduler._queue

    @rule()
    def restart(self) -> None:
        self.world.fail()

    @rule()
    def flush(self) -> None:
        self.driver.scheduler.flush_cache()

    @rule()
    def drain(self) -> None:
        self.driver.drain()

    @precondition(lambda self: len(self.driver.launched) < self.world.steps_in_flight)
    @rule()
    def launch(self) -> None:
        self.driver.launch()

    @precondition(lambda self: self.driver.launched)
    @rule()
    def collect(self) -> None:
        self.driver.collect()

    @rule(steps=st.integers(1, 120), seed=st.integers(0, 2**32), load=st.floats(0, 0.9))
    def run_on(self, steps: int, seed: int, load: float) -> None:
        rng = np.random.default_rng(seed)
        held = self.world.limits.max_tokens_held
        for _ in range(steps):
            if held > 1 and rng.random() < load and len(self.driver.scheduler._queue) < 8:
                length = int(rng.integers(1, held))
                prompt = rng.integers(0, 2, length).astype(np.int32)
                priority = int(rng.integers(3))
                self.send(prompt, int(rng.integers(1, held - length + 1)), priority=priority)
            self.world.step()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            self.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()
            Traffic.steps += self.world.counts["steps"]


def test_every_promise_holds_in_fifty_thousand_steps() -> None:
    calm = settings(
        max_examples=50,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    for round in range(20):
        run_state_machine_as_test(seed(round)(Traffic), settings=calm)
        if Traffic.steps >= 50_000:
            break
    assert Traffic.steps >= 50_000
