"""What the engine asks of whatever computes the steps."""

from __future__ import annotations

from typing import Protocol

from tridentlm.core.extras import Logprobs
from tridentlm.core.plan import I32, StepPlan
from tridentlm.core.request import Limits


class PendingStep(Protocol):
    def collect(self) -> I32:
        """Waits for the step and returns its tokens, int32[S], one per `plan.sampled` row."""

    def logprobs(self) -> Logprobs | None:
        """What `plan.extras.measured` asked for, if it did. Called after `collect`."""


class Runner(Protocol):
    """Computes steps in the order of their launches.

    A step may be launched before the step before it is collected: its FROM_DEVICE inputs are what
    that one samples. `device` and `dtype` are names for people ("cpu", "float32").
    """

    limits: Limits
    device: str
    dtype: str

    def launch(self, plan: StepPlan) -> PendingStep: ...

    def close(self) -> None: ...
