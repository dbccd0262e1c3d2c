"""Requests that end outside a step: told with the next step's output, or alone."""

from __future__ import annotations

import numpy as np

from tridentlm.core.plan import StepOutput
from tridentlm.core.request import FinishReason
from tridentlm.core.table import NO_TOKEN


class Endings:
    """Terminal outputs that are not handed out yet."""

    def __init__(self) -> None:
        self._reasons: dict[int, FinishReason] = {}
        self._errors: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    def note(self, request_id: int, reason: FinishReason, message: str | None) -> None:
        """`message` goes with an ERROR."""
        self._reasons[request_id] = reason
        if message is not None:
            self._errors[request_id] = message

    def add_to(self, output: StepOutput) -> StepOutput:
        """Hands everything noted out with `output`."""
        count = len(self._reasons)
        if count:
            output.ids = np.append(output.ids, np.fromiter(self._reasons, np.int64, count))
            output.tokens = np.append(output.tokens, np.full(count, NO_TOKEN, np.int32))
            reasons = np.fromiter(self._reasons.values(), np.uint8, count)
            output.finish = np.append(output.finish, reasons)
            output.errors, self._reasons, self._errors = self._errors, {}, {}
        return output


def no_output() -> StepOutput:
    """A step's output without any entry."""
    return StepOutput(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8))
