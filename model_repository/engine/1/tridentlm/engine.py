"""The engine: a scheduler, a runner, and the steps in flight between them."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from tridentlm.config import EngineSettings
from tridentlm.core.plan import EngineStats, StepOutput, StepPlan
from tridentlm.core.policy import POLICIES
from tridentlm.core.radix import RadixCache
from tridentlm.core.request import Limits, Request
from tridentlm.core.runner import PendingStep, Runner
from tridentlm.core.scheduler import Scheduler
from tridentlm.errors import InvalidRequest
from tridentlm.hub import resolve_model
from tridentlm.simulated import SimulatedRunner

if TYPE_CHECKING:
    from tridentlm.grammar.matching import Grammars
    from tridentlm.text import Tokenizer

logger = logging.getLogger(__name__)

MIXED_TOKENS = {"cpu": 128}
"""Prompt tokens of a step in which others decode, by device; elsewhere what the budget leaves."""

COMPILING_SECONDS = 0.005
"""How long a step without anything else to do waits for a grammar."""


def build_runner(settings: EngineSettings) -> tuple[Runner, str]:
    """The runner that `settings` ask for, and the name of what it runs.

    Raises ModelNotFound or InvalidRequest when the model cannot be had or loaded.
    """
    if settings.runner == "simulated":
        return SimulatedRunner(settings), settings.served_model_name or "simulated"
    files = resolve_model(settings)
    if settings.tp > 1:
        from tridentlm.parallel.check import check_ranks
        from tridentlm.parallel.followers import Followers

        check_ranks(settings, files)
        followers = Followers(settings.tp - 1)  # load torch while this process does
        from tridentlm.parallel.leader import ParallelRunner

        return ParallelRunner(settings, files, followers), files.name
    from tridentlm.runner import ModelRunner  # torch takes seconds: a wrong path fails before it

    return ModelRunner(settings, files), files.name


def load_grammars(
    runner: Runner, settings: EngineSettings, tokenizer: Tokenizer | None = None
) -> Grammars | None:
    """What holds the runner's answers to grammars; None when nothing can, which is logged."""
    if settings.runner == "simulated":
        return None
    from tridentlm.grammar.matching import Grammars
    from tridentlm.text import Tokenizer

    tokenizer = tokenizer or Tokenizer.load(resolve_model(settings))
    try:
        return Grammars(
            tokenizer,
            [i for i in tokenizer.eos_token_ids if i < runner.limits.vocab_size],
            runner.limits.vocab_size,
            settings.threads,
        )
    except ValueError as error:
        logger.warning("Grammars are refused: %s", error)
        return None


class Engine:
    """Single-threaded and without I/O: `add` and `abort` between calls of `step`.

    `steps_in_flight` 0: what suits the runner's device. With two steps in flight the host's work
    hides behind the device's:

        host    schedule k+1 | launch k+1 | collect k . . . | commit k | schedule k+2 | ...
        device  ....... step k ..........................|.. step k+1 .................
    """

    def __init__(
        self,
        runner: Runner,
        *,
        steps_in_flight: int = 1,
        prefix_cache: str = "radix",
        admission: str = "optimistic",
        policy: str = "fcfs",
        max_mixed_tokens: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        """The keywords are the settings of these names; without `grammars` they are refused."""
        self.runner = runner
        self.scheduler = Scheduler(
            runner.limits,
            cache=RadixCache(runner.limits.page_size) if prefix_cache == "radix" else None,
            policy=POLICIES[policy],
            reserve=admission == "reserve",
            mixed_tokens=max_mixed_tokens or MIXED_TOKENS.get(runner.device, 0),
        )
        self._steps_in_flight = steps_in_flight or (2 if runner.device == "cuda" else 1)
        self._launched: deque[tuple[StepPlan, PendingStep]] = deque()
        self._grammars = grammars

    @classmethod
    def from_settings(
        cls, runner: Runner, settings: EngineSettings, grammars: Grammars | None = None
    ) -> Engine:
        return cls(
            runner,
            steps_in_flight=settings.steps_in_flight,
            prefix_cache=settings.prefix_cache,
            admission=settings.admission,
            policy=settings.policy,
            max_mixed_tokens=settings.max_mixed_tokens,
            grammars=grammars,
        )

    @property
    def holds_grammars(self) -> bool:
        """Whether requests may have a grammar."""
        return self._grammars is not None

    @property
    def limits(self) -> Limits:
        return self.runner.limits

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return self.scheduler.has_work or self._compiling > 0

    @property
    def _compiling(self) -> int:
        return self._grammars.compiling if self._grammars else 0

    def add(self, request: Request) -> None:
        """Queues a request; raises InvalidRequest if it can never be served.

        One with a grammar is queued when the grammar is compiled; nobody waits for that meanwhile.
        """
        if request.extras is None or not request.extras.grammar:
            self.scheduler.add(request)
        elif self._grammars is None:
            raise InvalidRequest("This engine cannot hold answers to a grammar.", param="grammar")
        else:
            self._grammars.begin(request)

    def abort(self, request_id: int) -> None:
        """Ends a request; the next `step` reports it. An unknown id is ignored."""
        if self._grammars and (request := self._grammars.withdraw(request_id)):
            self._enter(request, None)
        self.scheduler.abort(request_id)

    def fail(self, request_id: int, message: str) -> None:
        """Ends a request with an error; the next `step` reports it."""
        self.scheduler.fail(request_id, message)

    def step(self) -> StepOutput | None:
        """Launches the next step, and collects the oldest when the pipeline is full or has ended.

        None: nothing to report yet.
        """
        if self._compiling:
            self._enter_compiled()
        self.scheduler.expire(time.monotonic())
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launched.append((plan, self.runner.launch(self._constrained(plan))))
        full = len(self._launched) >= self._steps_in_flight
        if self._launched and (full or plan is None):
            oldest, pending = self._launched.popleft()
            return self._commit(oldest, pending)
        return self._told(self.scheduler.drain())

    def _commit(self, plan: StepPlan, pending: PendingStep) -> StepOutput:
        tokens = pending.collect()
        output = self.scheduler.commit(plan, tokens, pending.logprobs())
        self._told(output)
        return output

    def _told(self, output: StepOutput | None) -> StepOutput | None:
        if self._grammars and output is not None:
            self._grammars.advance(output)
        return output

    def _constrained(self, plan: StepPlan) -> StepPlan:
        """The plan with what the grammars of its rows allow them to sample."""
        extras = plan.extras
        if self._grammars is None or extras is None or not len(extras.constrained):
            return plan
        ids = extras.request_ids[extras.constrained].tolist()
        allowed, failed = self._grammars.allowed(ids)
        for request_id, reason in failed.items():
            self.scheduler.fail(request_id, reason)
        return replace(plan, extras=replace(extras, allowed=allowed))

    def _enter_compiled(self) -> None:
        assert self._grammars is not None, "something is compiled"
        for request, reason in self._grammars.ready(
            0.0 if self.scheduler.has_work else COMPILING_SECONDS
        ):
            self._enter(request, reason)

    def _enter(self, request: Request, reason: str | None) -> None:
        try:
            if reason is None:
                self.scheduler.add(request)
        except InvalidRequest as error:
            reason = error.message
        if reason is not None:
            self.scheduler.fail(request.id, reason)

    def _enter_uncompiled(self) -> None:
        """For who ends everything: the scheduler reports these requests too."""
        for request in self._grammars.withdraw_all() if self._grammars else ():
            self._enter(request, None)

    def shut_down(self) -> StepOutput | None:
        """Aborts everything and waits for the steps in flight; returns the terminal outputs."""
        self._enter_uncompiled()
        self.scheduler.abort_all()
        output = self._told(self.scheduler.drain())
        while self._launched:
            plan, pending = self._launched.popleft()
            self._commit(plan, pending)
        return output

    def fail_all(self, message: str) -> StepOutput | None:
        """Ends every request with an error. The engine is of no use afterwards."""
        self._enter_uncompiled()
        self.scheduler.fail_all(message)
        return self.scheduler.drain()

    def flush_cache(self) -> None:
        self.scheduler.flush_cache()

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        compiling = self._compiling
        return replace(stats, waiting=stats.waiting + compiling) if compiling else stats

    def close(self) -> None:
        """Frees the model and the threads. The engine is of no use afterwards."""
        self.runner.close()
        if self._grammars:
            self._grammars.close()

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
