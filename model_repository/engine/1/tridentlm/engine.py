"""The engine: a scheduler, a runner, and the steps in flight between them."""

from __future__ import annotations

import time
from collections import deque

from tridentlm.config import EngineSettings
from tridentlm.core.plan import EngineStats, StepOutput, StepPlan
from tridentlm.core.policy import POLICIES
from tridentlm.core.radix import RadixCache
from tridentlm.core.request import Limits, Request
from tridentlm.core.runner import PendingStep, Runner
from tridentlm.core.scheduler import Scheduler
from tridentlm.hub import resolve_model
from tridentlm.simulated import SimulatedRunner


def build_runner(settings: EngineSettings) -> tuple[Runner, str]:
    """The runner that `settings` ask for, and the name of what it runs.

    Raises ModelNotFound or InvalidRequest when the model cannot be had or loaded.
    """
    if settings.runner == "simulated":
        return SimulatedRunner(settings), settings.served_model_name or "simulated"
    files = resolve_model(settings)
    if settings.tp > 1:
        from tridentlm.parallel.leader import ParallelRunner

        return ParallelRunner(settings, files), files.name
    from tridentlm.runner import ModelRunner  # torch takes seconds: a wrong path fails before it

    return ModelRunner(settings, files), files.name


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
    ) -> None:
        """The keywords are the settings of these names."""
        self.runner = runner
        self.scheduler = Scheduler(
            runner.limits,
            cache=RadixCache(runner.limits.page_size) if prefix_cache == "radix" else None,
            policy=POLICIES[policy],
            reserve=admission == "reserve",
        )
        self._steps_in_flight = steps_in_flight or (2 if runner.device == "cuda" else 1)
        self._launched: deque[tuple[StepPlan, PendingStep]] = deque()

    @classmethod
    def from_settings(cls, runner: Runner, settings: EngineSettings) -> Engine:
        return cls(
            runner,
            steps_in_flight=settings.steps_in_flight,
            prefix_cache=settings.prefix_cache,
            admission=settings.admission,
            policy=settings.policy,
        )

    @property
    def limits(self) -> Limits:
        return self.runner.limits

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request; raises InvalidRequest if it can never be served."""
        self.scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """Ends a request; the next `step` reports it. An unknown id is ignored."""
        self.scheduler.abort(request_id)

    def fail(self, request_id: int, message: str) -> None:
        """Ends a request with an error; the next `step` reports it."""
        self.scheduler.fail(request_id, message)

    def step(self) -> StepOutput | None:
        """Launches the next step, and collects the oldest when the pipeline is full or has ended.

        None: nothing to report yet.
        """
        self.scheduler.expire(time.monotonic())
        plan = self.scheduler.schedule()
        if plan is not None:
            self._launched.append((plan, self.runner.launch(plan)))
        full = len(self._launched) >= self._steps_in_flight
        if self._launched and (full or plan is None):
            oldest, pending = self._launched.popleft()
            return self._commit(oldest, pending)
        return self.scheduler.drain()

    def _commit(self, plan: StepPlan, pending: PendingStep) -> StepOutput:
        tokens = pending.collect()
        return self.scheduler.commit(plan, tokens, pending.logprobs())

    def shut_down(self) -> StepOutput | None:
        """Aborts everything and waits for the steps in flight; returns the terminal outputs."""
        self.scheduler.abort_all()
        output = self.scheduler.drain()
        while self._launched:
            plan, pending = self._launched.popleft()
            self._commit(plan, pending)
        return output

    def fail_all(self, message: str) -> StepOutput | None:
        """Ends every request with an error. The engine is of no use afterwards."""
        self.scheduler.fail_all(message)
        return self.scheduler.drain()

    def flush_cache(self) -> None:
        self.scheduler.flush_cache()

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
