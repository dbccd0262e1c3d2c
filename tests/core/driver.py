"""Drives a scheduler with a fake model and keeps the books on what each request got."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from tests.core.fake_model import FakeRunner, answer
from tridentlm.core.cache import PrefixCache
from tridentlm.core.expect import ExpectedLength
from tridentlm.core.plan import FROM_DEVICE, I64, StepOutput, StepPlan
from tridentlm.core.policy import Policy, fcfs
from tridentlm.core.request import FinishReason, Limits, Request
from tridentlm.core.scheduler import Scheduler


def make_limits(**values: int) -> Limits:
    defaults = {
        "max_model_len": 64,
        "num_pages": 64,
        "page_size": 4,
        "max_running": 4,
        "max_queue": 100,
        "max_step_tokens": 32,
        "vocab_size": 64,
    }
    return Limits(**{**defaults, **values})


def make_request(
    request_id: int, prompt_len: int = 5, max_tokens: int = 4, **fields: Any
) -> Request:
    prompt = np.random.default_rng(request_id).integers(0, 64, prompt_len, np.int32)
    return Request(request_id, prompt, max_tokens, **fields)


PATIENCE = 8
"""In place of queue.PATIENCE, which short traffic would not reach."""


class Reckless(ExpectedLength):
    """Expects every answer to end with the next token, so that preemptions are many."""

    def final_len(self, prompt_len: I64, length: I64, final_len: I64) -> I64:
        return np.minimum(final_len, length + 1)


def check_constrained(plan: StepPlan) -> None:
    """What a grammar allows next is known: the row's last token has come."""
    if plan.extras is None:
        return
    for row in plan.sampled[plan.extras.constrained].tolist():
        own = plan.token_ids[slice(*plan.query_starts[row : row + 2].tolist())]
        assert not np.any(own == FROM_DEVICE), "a constrained row is launched blindly"


class Driver:
    def __init__(
        self,
        limits: Limits,
        *,
        cache: PrefixCache | None = None,
        scheduler: type[Scheduler] = Scheduler,
        policy: Policy = fcfs,
        reserve: bool = False,
        mixed_tokens: int = 0,
        checked: bool = True,
        expected: ExpectedLength | None = None,
    ) -> None:
        self.scheduler = scheduler(
            limits,
            cache=cache,
            policy=policy,
            reserve=reserve,
            mixed_tokens=mixed_tokens,
            expected=expected,
        )
        self.checked = checked
        self.scheduler._queue.patience = PATIENCE
        self.most_waiting = 0
        self.runner = FakeRunner(limits)
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}
        self.first: list[int] = []  # ids in order of their first token
        self.launched: deque[tuple[StepPlan, Any]] = deque()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests[request.id] = request
            self.tokens[request.id] = []

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            check_constrained(plan)
            self.launched.append((plan, self.runner.launch(plan)))
        return plan

    def collect(self) -> StepOutput:
        plan, step = self.launched.popleft()
        output = self.scheduler.commit(plan, step.collect())
        self.record(output)
        return output

    def drain(self) -> None:
        output = self.scheduler.drain()
        if output is not None:
            self.record(output)

    def record(self, output: StepOutput) -> None:
        assert len(output.ids) == len(output.tokens) == len(output.finish)
        assert len(set(output.ids.tolist())) == len(output.ids)
        rows = zip(output.ids.tolist(), output.tokens.tolist(), output.finish, strict=True)
        for request_id, token, finish in rows:
            assert request_id not in self.finish, "an output after the terminal one"
            if token >= 0:
                if not self.tokens[request_id]:
                    self.first.append(request_id)
                self.tokens[request_id].append(token)
            if finish:
                self.finish[request_id] = FinishReason(finish)
            else:
                assert token >= 0, "an entry without news"
        self.errors.update(output.errors)

    def check(self) -> None:
        if self.checked:
            self.scheduler.check_integrity()
            self.check_waiting()

    def check_waiting(self) -> None:
        """Nobody is overtaken for ever: a bound on the admissions that a request sees go by.

        Beyond its patience these are of older requests, which are not many at any time, each once
        and again after a preemption.
        """
        scheduler = self.scheduler
        waiting = scheduler._queue._entries.values()
        self.most_waiting = max(self.most_waiting, len(waiting))
        bound = PATIENCE + 3 * (self.most_waiting + scheduler.limits.max_running)
        admissions = scheduler._admission.count
        assert all(admissions - entry.seen <= bound for entry in waiting), "a request starves"

    def step(self) -> None:
        """One iteration of an engine with one step in flight."""
        if self.launch() is not None:
            self.collect()
        self.drain()
        self.check()

    def run(self, steps_in_flight: int = 1, limit: int = 10_000) -> None:
        """Runs until nothing is left, and checks that nothing is."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            launched = self.launch()
            if self.launched and (launched is None or len(self.launched) >= steps_in_flight):
                self.collect()
            self.drain()
            self.check()
        else:
            raise AssertionError("the scheduler does not come to an end")
        self.check_end()

    def check_end(self) -> None:
        """Everybody got one terminal output and the right text; every slot and page is free."""
        assert self.finish.keys() >= self.requests.keys()
        for request_id, request in self.requests.items():
            tokens, finish = answer(request)
            if self.finish[request_id] in (FinishReason.STOP, FinishReason.LENGTH):
                assert (self.tokens[request_id], self.finish[request_id]) == (tokens, finish)
            else:
                got = self.tokens[request_id]
                assert got == tokens[: len(got)]
        self.scheduler.flush_cache()
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_slots == self.scheduler.limits.max_running
        assert stats.free_pages == self.scheduler.limits.num_pages
