"""Steps in plain torch, on any device: the reference, and what a CPU runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tridentlm.backends.torch import TorchBackend
from tridentlm.core.plan import FROM_DEVICE, I32, StepPlan
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

    def __init__(self, decoder: Decoder, backend: TorchBackend, max_running: int) -> None:
        self._decoder, self._backend = decoder, backend
        self._device = backend.device
        self._last_token = torch.zeros(max_running, dtype=torch.int32, device=self._device)

    def launch(self, plan: StepPlan) -> PendingTokens:
        return PendingTokens(self._compute(plan))

    def _compute(self, plan: StepPlan) -> torch.Tensor:
        rows: torch.Tensor | None = None
        if len(plan.sampled) < plan.num_tokens:
            rows = self._to_device(plan.query_starts[plan.sampled + 1] - 1)
        step = self._backend.begin_step(plan)
        hidden = self._decoder.forward(self._token_ids(plan), step, rows)
        if not len(plan.sampled):
            return self._last_token[:0]
        tokens = sample(self._decoder.logits(hidden), plan).int()
        self._last_token[self._to_device(plan.slots[plan.sampled])] = tokens
        return tokens

    def _token_ids(self, plan: StepPlan) -> torch.Tensor:
        ids = self._to_device(plan.token_ids)
        if not (plan.token_ids == FROM_DEVICE).any():
            return ids
        slots = np.repeat(plan.slots, np.diff(plan.query_starts))
        return torch.where(ids == FROM_DEVICE, self._last_token[self._to_device(slots)], ids)

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class PendingTokens:
    """A launched step; its tokens are on their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._tokens = tokens
        if tokens.is_cuda:
            self._tokens = torch.empty_like(tokens, device="cpu", pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def collect(self) -> I32:
        """Waits for the step. Returns int32 [S]."""
        if self._copied is not None:
            self._copied.synchronize()
        array: I32 = self._tokens.numpy()
        return array


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
