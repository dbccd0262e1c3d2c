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

from tests.core.driver import Driver, Reckless
from tests.core.fake_model import VOCAB
from tridentlm.core.plan import I32
from tridentlm.core.policy import POLICIES, Policy
from tridentlm.core.radix import RadixCache
from tridentlm.core.request import FinishReason, Limits, Request
from tridentlm.errors import InvalidRequest

lengths = st.one_of(st.integers(1, 8), st.integers(1, 70))
prompts = st.one_of(
    st.builds(lambda n, token: [token] * n, lengths, st.integers(0, 3)),  # share prefixes
    st.builds(lambda n, seed: [(seed * 7 + i) % VOCAB for i in range(n)], lengths, st.integers()),
)


class Traffic(RuleBasedStateMachine):
    """Arrivals, aborts, deadlines, flushes, launches and collects, in any order."""

    steps = 0

    def count_steps(self) -> None:
        Traffic.steps += self.driver.scheduler.stats().steps

    @initialize(
        page_size=st.one_of(st.integers(1, 4), st.integers(1, 64)),
        num_pages=st.integers(1, 40),
        max_running=st.integers(1, 6),
        max_step_tokens=st.integers(1, 40),
        max_model_len=st.integers(2, 80),
        steps_in_flight=st.integers(1, 2),
        cached=st.booleans(),
        policy=st.sampled_from(list(POLICIES.values())),
        reserve=st.booleans(),
        mixed_tokens=st.integers(0, 20),
        reckless=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        max_running: int,
        max_step_tokens: int,
        max_model_len: int,
        steps_in_flight: int,
        cached: bool,
        policy: Policy,
        reserve: bool,
        mixed_tokens: int,
        reckless: bool,
    ) -> None:
        self.limits = Limits(
            max_model_len=max_model_len,
            num_pages=num_pages,
            page_size=page_size,
            max_running=max_running,
            max_queue=100,
            max_step_tokens=max_step_tokens,
            vocab_size=VOCAB,
        )
        self.steps_in_flight = steps_in_flight
        self.make_driver = lambda: Driver(
            self.limits,
            cache=RadixCache(page_size) if cached else None,
            policy=policy,
            reserve=reserve,
            mixed_tokens=mixed_tokens,
            expected=Reckless() if reckless else None,
        )
        self.driver = self.make_driver()
        self.now = 0.0
        self.next_id = 0
        self.aborted: set[int] = set()

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
            deadline=self.now + seconds,
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
        ids = [*self.driver.requests[earlier].prompt.tolist(), *self.driver.tokens[earlier]]
        kept = data.draw(st.one_of(st.just(len(ids)), st.integers(1, len(ids))))
        self.send(np.array(ids[:kept] + suffix, np.int32), data.draw(st.integers(1, 6)))

    def send(self, prompt: I32, max_tokens: int, **fields: Any) -> None:
        request = Request(self.next_id, prompt, max_tokens, **fields)
        self.next_id += 1
        fits = len(prompt) + max_tokens <= self.limits.max_tokens_held
        try:
            self.driver.add(request)
        except InvalidRequest:
            assert not fits
        else:
            assert fits

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.integers(0, self.next_id + 1))
        self.driver.scheduler.abort(request_id)
        self.aborted.add(request_id)

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.driver.scheduler.expire(self.now)
        for request in self.driver.requests.values():
            if request.deadline <= self.now:
                assert request.id not in self.driver.scheduler._holders
                assert request.id not in self.driver.scheduler._queue

    @rule()
    def restart(self) -> None:
        """The engine fails: everybody hears of it, and a new one takes over."""
        self.driver.scheduler.fail_all("lost")
        self.driver.drain()
        assert self.driver.finish.keys() == self.driver.requests.keys()
        self.count_steps()
        self.driver = self.make_driver()

    @rule()
    def flush(self) -> None:
        self.driver.scheduler.flush_cache()

    @rule()
    def drain(self) -> None:
        self.driver.drain()

    @precondition(lambda self: len(self.driver.launched) < self.steps_in_flight)
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
        held = self.limits.max_tokens_held
        for _ in range(steps):
            if held > 1 and rng.random() < load and len(self.driver.scheduler._queue) < 8:
                length = int(rng.integers(1, held))
                prompt = rng.integers(0, 2, length).astype(np.int32)
                priority = int(rng.integers(3))
                self.send(prompt, int(rng.integers(1, held - length + 1)), priority=priority)
            if len(self.driver.launched) < self.steps_in_flight:
                self.driver.launch()
            if self.driver.launched:
                self.driver.collect()
            self.driver.scheduler.check_integrity()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run(self.steps_in_flight)
        self.count_steps()
        for request_id, finish in self.driver.finish.items():
            late = self.driver.requests[request_id].deadline <= self.now
            if request_id not in self.aborted and not late:
                assert finish in (FinishReason.STOP, FinishReason.LENGTH)


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
