"""A runner without a model (`runner=simulated`): for transport benchmarks and fault tests.

Every step takes `step_ms`, whatever it holds, and the next token is a hash of the last one, the
position and, unless greedy, the seed: a request's answer does not depend on its neighbours.
Log-probabilities are made up like the text (-1, -2, ...). There are no logits, and what would
change or filter them is refused: `check_simulated`.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from tridentlm.config import EngineSettings
from tridentlm.core.extras import Logprobs
from tridentlm.core.params import SamplingParams
from tridentlm.core.plan import FROM_DEVICE, I32, I64, StepPlan
from tridentlm.core.request import Limits
from tridentlm.errors import InvalidRequest

VOCAB_SIZE = 49152
FIRST_TOKEN, END_TOKEN = 300, 40000  # ordinary words in the default model's tokenizer
PAGE_SIZE = 16
MAX_MODEL_LEN = 8192
MAX_STEP_TOKENS = 8192

OF_LOGITS = (
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
PLAIN = SamplingParams()


def check_simulated(params: SamplingParams) -> None:
    """Raises InvalidRequest for a parameter that only a model's logits could follow."""
    asked = {name: getattr(params, name) != getattr(PLAIN, name) for name in OF_LOGITS}
    asked["top_k"] = params.top_k > 0
    asked["min_tokens"] = bool(params.min_tokens and params.stop_token_ids)  # it samples no EOS
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidRequest(
                f"The simulated runner has no logits, so it cannot follow {name}.",
                param=name,
                code="unsupported_parameter",
            )


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
