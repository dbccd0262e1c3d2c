"""What requests ask of the logits before a token is drawn from them.

    logits [S, vocab] -> + logit_bias, - inf for banned tokens -> repetition -> frequency, presence
                      -> - inf for what the row's grammar does not allow

The order is vLLM's. Penalties need each row's tokens, and how often it has generated each. Steps in
flight sample tokens that the host has not seen, so both live on the device, one row per slot, and
are brought forward by each step's own tokens:

    step k     newcomers: enter their tokens | adjust | sample | enter token, counts[token] += 1
    step k+1   adjust (reads them) | sample | ...
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tridentlm.core.extras import I32, I64, U32, Newcomer, Penalties, StepExtras
from tridentlm.core.plan import StepPlan
from tridentlm.core.request import Limits

PLACES = 1 << 22
"""Tokens of rows with penalties that are looked at at once, padding included: about 150 MB."""


class LogitAdjuster:
    """Holds tokens and counts of the slots that have penalties.

    All that it ever holds is allocated at once: a GPU's KV pool takes what is left, so the first
    request with a penalty would find no memory. On a CPU memory is taken as it is used.
    """

    def __init__(self, device: torch.device, limits: Limits) -> None:
        self._device = device
        slots, tokens = limits.max_running, limits.max_tokens_held
        # A slot's rows are filled with its newcomer's tokens before anybody reads them.
        self._tokens = torch.empty(slots, tokens, dtype=torch.int32, device=device)
        self._output = torch.empty(slots, limits.vocab_size, dtype=torch.int32, device=device)

    def adjusts(self, plan: StepPlan) -> bool:
        """Whether a row of the plan asks for anything that changes its logits."""
        extras = plan.extras
        if extras is None:
            return False
        return len(extras.bias) > 0 or extras.penalties is not None or extras.allowed is not None

    def adjust(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """The logits [S, vocab] to sample from, float32, in memory of their own."""
        extras = plan.extras
        assert extras is not None, "adjust() without anything to adjust"
        logits = logits.to(torch.float32, copy=True)
        if len(extras.bias):
            self._add_bias(logits, extras)
        if extras.penalties is not None:
            positions = plan.sample_positions[extras.penalties.rows]
            self._penalize(logits, extras.penalties, positions)
        if extras.allowed is not None:
            self._constrain(logits, extras.constrained, extras.allowed)
        return logits

    def count(self, tokens: torch.Tensor, plan: StepPlan) -> None:
        """Takes note of the tokens [S] that the plan's rows have sampled."""
        penalties = None if plan.extras is None else plan.extras.penalties
        if penalties is None:
            return
        slots, sampled = self._to(penalties.slots), tokens[self._to(penalties.rows)]
        positions = self._to(plan.sample_positions[penalties.rows])
        self._tokens[slots, positions] = sampled.int()
        self._output[slots, sampled.long()] += 1  # a slot is in a plan once

    def _add_bias(self, logits: torch.Tensor, extras: StepExtras) -> None:
        places = (self._to(extras.bias_rows), self._to(extras.bias_tokens))
        # Accumulated, because a token may be banned and have a bias.
        logits.index_put_(places, self._to(extras.bias), accumulate=True)

    def _constrain(self, logits: torch.Tensor, rows: I32, allowed: U32) -> None:
        octets = self._to(allowed.view(np.uint8))[..., None]
        bits = (octets >> torch.arange(8, dtype=torch.uint8, device=self._device)) & 1
        banned = bits.flatten(1)[:, : logits.shape[-1]] == 0
        places = self._to(rows)
        logits[places] = logits[places].masked_fill_(banned, -torch.inf)

    def _penalize(self, logits: torch.Tensor, penalties: Penalties, positions: I64) -> None:
        """Changes the logits of each row's own tokens, of which there are few, and no others."""
        for newcomer in penalties.newcomers:
            self._enter(newcomer)
        at_once = max(1, PLACES // max(1, int(positions.max())))
        for start in range(0, len(positions), at_once):
            part = slice(start, start + at_once)
            self._penalize_rows(logits, penalties, positions, part)

    def _penalize_rows(
        self, logits: torch.Tensor, penalties: Penalties, positions: I64, part: slice
    ) -> None:
        positions, width = positions[part], int(positions[part].max())
        rows = self._to(penalties.rows[part])[:, None]
        slots = self._to(penalties.slots[part])[:, None]
        ids = self._tokens[slots[:, 0], :width].long()
        is_stale = torch.arange(width, device=self._device) >= self._to(positions)[:, None]
        ids = torch.where(is_stale, ids[:, :1], ids)  # a token twice gets the same value twice
        values, counts = logits[rows, ids], self._output[slots, ids]
        repetition = self._to(penalties.repetition[part])[:, None]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= self._to(penalties.frequency[part])[:, None] * counts
        values -= self._to(penalties.presence[part])[:, None] * (counts > 0)
        logits[rows, ids] = values

    def _enter(self, newcomer: Newcomer) -> None:
        slot, generated = newcomer.slot, self._to(newcomer.output)
        known = np.concatenate([newcomer.prompt, newcomer.output])
        self._tokens[slot, : len(known)] = self._to(known)
        self._output[slot] = 0
        ones = self._output.new_ones(len(generated))
        self._output[slot].index_put_((generated,), ones, accumulate=True)

    def _to(self, array: npt.NDArray[Any]) -> torch.Tensor:
        if array.dtype == np.int32:
            array = array.astype(np.int64)  # as indexes, all of them
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
