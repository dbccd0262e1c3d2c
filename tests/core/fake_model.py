"""A model whose next token is a hash of the whole prefix as it lies in a paged memory.

A wrong page, position, input token or sampling parameter changes the text from there on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tridentlm.core.plan import FROM_DEVICE, I32, StepPlan
from tridentlm.core.request import FinishReason, Limits, Request

VOCAB = 64
_PRIME = 1_000_003
_MASK = (1 << 61) - 1
DTYPES: dict[str, np.dtype[Any]] = {
    "slots": np.dtype(np.int32),
    "query_starts": np.dtype(np.int32),
    "context_lens": np.dtype(np.int32),
    "block_tables": np.dtype(np.int32),
    "token_ids": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "kv_slots": np.dtype(np.int64),
    "sampled": np.dtype(np.int32),
    "temperature": np.dtype(np.float32),
    "top_k": np.dtype(np.int32),
    "top_p": np.dtype(np.float32),
    "min_p": np.dtype(np.float32),
    "seeds": np.dtype(np.uint64),
    "sample_positions": np.dtype(np.int64),
}


def next_token(prefix: Sequence[int], params: tuple[float, ...]) -> int:
    state = hash(params) & _MASK
    for token in prefix:
        state = (state * _PRIME + int(token) + 1) & _MASK
    return (state ^ (state >> 29)) % VOCAB


def params_of(request: Request) -> tuple[float, ...]:
    values = (request.temperature, request.top_p, request.min_p)
    return (*(float(np.float32(v)) for v in values), request.top_k, request.seed)


def answer(request: Request) -> tuple[list[int], FinishReason]:
    """What the request gets when it runs alone, token by token, without pages or steps."""
    tokens = request.prompt.tolist()
    for _ in range(request.max_tokens):
        tokens.append(next_token(tokens, params_of(request)))
        if tokens[-1] in request.stop_token_ids:
            return tokens[len(request.prompt) :], FinishReason.STOP
    return tokens[len(request.prompt) :], FinishReason.LENGTH


class FakeStep:
    def __init__(self, tokens: I32) -> None:
        self.tokens = tokens

    def collect(self) -> I32:
        return self.tokens

    def logprobs(self) -> None:
        return None


class FakeRunner:
    """Executes steps in launch order, and checks each plan against StepPlan's contract."""

    device = "fake"
    dtype = "none"

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.memory = np.full((limits.num_pages * limits.page_size, 2), -1)  # token, position
        self.last = np.full(limits.max_running, -1)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> FakeStep:
        self.check(plan)
        self.plans.append(plan)
        rows = np.repeat(np.arange(plan.num_rows), np.diff(plan.query_starts))
        inputs = np.where(
            plan.token_ids == FROM_DEVICE, self.last[plan.slots[rows]], plan.token_ids
        )
        assert (inputs >= 0).all(), "an input that no step has sampled"
        self.memory[plan.kv_slots] = np.stack([inputs, plan.positions], axis=1)
        tokens = [self.sample(plan, i, row) for i, row in enumerate(plan.sampled.tolist())]
        self.last[plan.slots[plan.sampled]] = tokens
        return FakeStep(np.array(tokens, np.int32))

    def sample(self, plan: StepPlan, i: int, row: int) -> int:
        context, size = int(plan.context_lens[row]), self.limits.page_size
        where = np.arange(context)
        places = plan.block_tables[row, where // size] * size + where % size
        tokens, positions = self.memory[places].T
        assert np.array_equal(positions, where), "the prefix in memory has other positions"
        assert plan.sample_positions[i] == context
        floats = (plan.temperature[i], plan.top_p[i], plan.min_p[i])
        params = (*map(float, floats), int(plan.top_k[i]), int(plan.seeds[i]))
        return next_token(tokens.tolist(), params)

    def check(self, plan: StepPlan) -> None:
        starts, sampled = plan.query_starts.tolist(), plan.sampled.tolist()
        counts = [end - start for start, end in itertools.pairwise(starts)]
        assert starts[0] == 0
        assert min(counts) > 0
        assert starts[-1] == plan.num_tokens <= self.limits.max_step_tokens
        assert len(set(plan.slots.tolist())) == plan.num_rows <= self.limits.max_running
        assert len(set(plan.kv_slots.tolist())) == plan.num_tokens
        assert sampled == sorted(set(sampled))
        chunks = [count > 1 for count in counts]
        assert chunks == sorted(chunks) or counts[-1] == 1
        last = plan.positions[plan.query_starts[1:] - 1]
        assert (last + 1).tolist() == plan.context_lens.tolist()
        for name, dtype in DTYPES.items():
            assert getattr(plan, name).dtype == dtype, name

    def close(self) -> None:
        pass
