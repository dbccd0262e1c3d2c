"""Steps in plain torch, on any device: the reference, and what a CPU runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tridentlm.adjust import LogitAdjuster
from tridentlm.backends.torch import TorchBackend
from tridentlm.core.extras import Logprobs, Measured, Newcomer, Penalties, StepExtras
from tridentlm.core.params import MAX_LOGPROBS
from tridentlm.core.plan import FROM_DEVICE, I32, StepPlan
from tridentlm.core.request import Limits
from tridentlm.logprobs import Table, measure, to_host
from tridentlm.models.decoder import Decoder
from tridentlm.sampling import sample


class TorchExecutor:
    """Computes step plans one by one.

    The token sampled last for each slot stays on the device, so the next step can be launched
    before anyone has read it:

        launch k:    ... -> sample -> last_token[slots] = tokens -> copy to the host
        launch k+1:  token_ids, FROM_DEVICE replaced by last_token[slot] -> ...
        collect k:   wait for k's copy
    """

    def __init__(self, decoder: Decoder, backend: TorchBackend, limits: Limits) -> None:
        self._decoder, self._backend = decoder, backend
        self._device = backend.device
        self._last_token = torch.zeros(limits.max_running, dtype=torch.int32, device=self._device)
        self._adjuster = LogitAdjuster(self._device, limits)

    def launch(self, plan: StepPlan) -> PendingTokens:
        count = len(plan.sampled)
        step = self._backend.begin_step(plan)
        rows = None if count == plan.num_tokens else self._to_device(output_rows(plan))
        hidden = self._decoder.forward(self._token_ids(plan), step, rows)
        if not len(hidden):
            return PendingTokens(plan, self._last_token[:0])
        logits = self._decoder.logits(hidden[:count])
        tokens = self._choose(logits, plan) if count else self._last_token[:0]
        if plan.extras is None or plan.extras.measured is None:
            return PendingTokens(plan, tokens)
        table = measure(plan, logits, tokens, hidden[count:], self._decoder.logits)
        return PendingTokens(plan, tokens, table)

    def _choose(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        group, slots = self._decoder.group, self._to_device(plan.slots[plan.sampled])
        if group.is_leader:
            if self._adjuster.adjusts(plan):
                logits = self._adjuster.adjust(logits, plan)
            tokens = sample(logits, plan).int()
            self._adjuster.count(tokens, plan)
            self._last_token[slots] = tokens
        group.broadcast(self._last_token)
        return self._last_token[slots]

    def _token_ids(self, plan: StepPlan) -> torch.Tensor:
        ids = self._to_device(plan.token_ids)
        if not (plan.token_ids == FROM_DEVICE).any():
            return ids
        slots = np.repeat(plan.slots, np.diff(plan.query_starts))
        return torch.where(ids == FROM_DEVICE, self._last_token[self._to_device(slots)], ids)

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def output_rows(plan: StepPlan) -> I32:
    """The plan's tokens whose last hidden state is needed: S that sample, Q measured in prompts."""
    rows: I32 = plan.query_starts[plan.sampled + 1] - 1
    if plan.extras is None or plan.extras.measured is None:
        return rows
    return np.concatenate([rows, plan.extras.measured.places])


class PendingTokens:
    """A launched step; its tokens and log-probabilities are on their way to the host."""

    def __init__(self, plan: StepPlan, tokens: torch.Tensor, table: Table | None = None) -> None:
        self._plan = plan
        self._copied: torch.cuda.Event | None = None
        self._tokens, self._table = tokens, table
        if tokens.is_cuda:
            self._tokens = _copy(tokens)
            if table is not None:
                tokens_told, values, ranks = map(_copy, table)
                self._table = tokens_told, values, ranks
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def collect(self) -> I32:
        """Waits for the step. Returns int32 [S]."""
        if self._copied is not None:
            self._copied.synchronize()
        array: I32 = self._tokens.numpy()
        return array

    def logprobs(self) -> Logprobs | None:
        """Of the collected step."""
        return None if self._table is None else to_host(self._plan, self._table)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)


def profile_plan(tokens: int, longest: int, page_size: int, max_running: int) -> StepPlan:
    """The costliest step of `tokens` tokens: rows of `longest`, as many sampled as may run.

    Its pages are the first ones of a cache.
    """
    tokens = min(tokens, longest * max_running)
    sampled = min(max_running, tokens)
    starts = np.append(np.arange(0, tokens, longest, dtype=np.int32), np.int32(tokens))
    lengths = np.diff(starts)
    width = -(-longest // page_size)
    tables = np.arange(len(lengths) * width, dtype=np.int32).reshape(len(lengths), width)
    positions = np.arange(tokens, dtype=np.int32) % longest
    first = np.repeat(tables[:, 0], lengths).astype(np.int64)
    return StepPlan(
        step=0,
        slots=np.zeros(len(lengths), np.int32),
        query_starts=starts,
        context_lens=lengths,
        block_tables=tables,
        token_ids=np.zeros(tokens, np.int32),
        positions=positions,
        kv_slots=first * page_size + positions,
        sampled=np.zeros(sampled, np.int32),
        temperature=np.ones(sampled, np.float32),
        top_k=np.zeros(sampled, np.int32),
        top_p=np.full(sampled, 0.9, np.float32),
        min_p=np.zeros(sampled, np.float32),
        seeds=np.zeros(sampled, np.uint64),
        sample_positions=np.zeros(sampled, np.int64),
    )


def with_all_extras(plan: StepPlan, limits: Limits) -> StepPlan:
    """The plan when all of its rows ask for everything, at the end of the longest request."""
    count, total = len(plan.sampled), plan.num_tokens
    places = np.arange(total if total > count else 0, dtype=np.int32)  # all within prompts
    rows, last = np.arange(count, dtype=np.int32), limits.max_tokens_held - 1
    nothing, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
    prompt = np.zeros(last, np.int32)
    newcomers = tuple(Newcomer(i, prompt, prompt[:0]) for i in range(count))
    extras = StepExtras(
        request_ids=np.zeros(count, np.int64),
        bias_rows=rows,
        bias_tokens=np.zeros(count, np.int32),
        bias=nothing,
        penalties=Penalties(rows, rows, ones, ones, ones, newcomers),
        measured=Measured(
            places=places,
            targets=np.zeros_like(places),
            rows=rows,
            ids=np.zeros(len(places) + count, np.int64),
            positions=np.zeros(len(places) + count, np.int64),
            top=MAX_LOGPROBS,
        ),
        constrained=rows,
        allowed=np.full((count, -(-limits.vocab_size // 32)), 0xFFFFFFFF, np.uint32),
    )
    return replace(plan, sample_positions=np.full(count, last, np.int64), extras=extras)
