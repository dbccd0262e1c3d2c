"""How long will an answer get? What optimistic admission reckons with."""

from __future__ import annotations

import numpy as np

from tridentlm.core.plan import I64

FIRST_GUESS = 256.0
WEIGHT = 1 / 32
CAUTION_STEP, MOST_CAUTION, CALM = 0.25, 4.0, 0.998


class ExpectedLength:
    """A running mean of the answers' lengths, times a caution that grows with each preemption.

    An answer that is already longer than that is expected to get half as long again.
    """

    def __init__(self) -> None:
        self._mean = FIRST_GUESS
        self._caution = 1.0

    def observe(self, generated: float) -> None:
        """An answer of `generated` tokens has ended."""
        self._mean += WEIGHT * (generated - self._mean)
        self._caution = max(1.0, self._caution * CALM)

    def preempted(self) -> None:
        self._caution = min(MOST_CAUTION, self._caution + CAUTION_STEP)

    def final_len(self, prompt_len: I64, length: I64, final_len: I64) -> I64:
        """Tokens that sequences of `length` are expected to end with, at most `final_len`."""
        answer = np.maximum(self._mean * self._caution, 1.5 * (length - prompt_len) + 1)
        return np.minimum(final_len, prompt_len + np.ceil(answer).astype(np.int64))
