"""A runner without a model (`runner=simulated`): for transport benchmarks and fault tests.

Every step takes `step_ms`, whatever it holds, and the next token is a hash of the last one, the
position and, unless greedy, the seed: a request's answer does not depend on its neighbours.
Log-probabilities are made up (-1, -2, ...); penalties and biases have no effect.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from tridentlm.config import EngineSettings
from tridentlm.core.extras import Logprobs
from tridentlm.core.plan import FROM_DEVICE, I32, I64, StepPlan
from tridentlm.core.request import Limits

VOCAB_SIZE = 49152
FIRST_TOKEN, END_TOKEN = 300, 40000  # ordinary words in the default model's tokenizer
PAGE_SIZE = 16
MAX_MODEL_LEN = 8192
MAX_STEP_TOKENS = 8192


class SimulatedStep:
    def __init__(self, plan: StepPlan, tokens: I32, done_at: float) -> None:
        self._plan = plan
        self._tokens = tokens
        self._done_at = done_at

    def collect(self) -> I32:
        time.sleep(max(self._done_at - time.monotonic(), 0.0))
        return self._tokens

    def logprobs(self) -> Logprobs | None:
        extras = self._plan.extras
        if extras is None or extras.measured is None:
            return None
        measured = extras.measured
        tokens = np.concatenate([measured.targets, self._tokens[measured.rows]])
        columns = np.arange(1 + measured.top)
        return Logprobs(
            ids=measured.ids,
            positions=measured.positions,
            tokens=((tokens[:, None] + np.maximum(columns - 1, 0)) % VOCAB_SIZE).astype(np.int32),
            values=np.tile(-np.maximum(columns, 1), (len(tokens), 1)).astype(np.float32),
            ranks=np.ones(len(tokens), np.int32),
        )


class SimulatedRunner:
    """Steps end at an ideal cadence: host time between two steps does not delay the second."""

    device = "simulated"
    dtype = "none"

    def __init__(self, settings: EngineSettings) -> None:
        length = settings.max_model_len or MAX_MODEL_LEN
        page_size = settings.page_size or PAGE_SIZE
        ample = settings.max_running * -(-length // page_size)
        self.limits = Limits(
            max_model_len=length,
            num_pages=settings.num_pages or ample,
            page_size=page_size,
            max_running=settings.max_running,
            max_queue=settings.max_queue,
            max_step_tokens=settings.max_step_tokens or MAX_STEP_TOKENS,
            vocab_size=VOCAB_SIZE,
        )
        self._step_seconds = settings.step_ms / 1e3
        self._done_at = 0.0
        self._last: I32 = np.zeros(settings.max_running, np.int32)  # the slots' last tokens

    def launch(self, plan: StepPlan) -> SimulatedStep:
        slots = plan.slots[plan.sampled]
        last = plan.token_ids[plan.query_starts[plan.sampled + 1] - 1]
        last = np.where(last == FROM_DEVICE, self._last[slots], last)
        seeds = np.where(plan.temperature > 0, plan.seeds, np.uint64(0))
        tokens = next_tokens(last, plan.sample_positions, seeds)
        self._last[slots] = tokens
        self._done_at = max(time.monotonic(), self._done_at + self._step_seconds)
        return SimulatedStep(plan, tokens, self._done_at)

    def close(self) -> None:
        pass


def next_tokens(last: I32, positions: I64, seeds: npt.NDArray[np.uint64]) -> I32:
    """The tokens, int32[n], that follow `last` at `positions`: a fixed mix of all three inputs."""
    mixed = last.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= positions.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= seeds
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    return (FIRST_TOKEN + mixed % np.uint64(END_TOKEN - FIRST_TOKEN)).astype(np.int32)
