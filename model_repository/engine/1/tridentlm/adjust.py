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


class LogitAdjuster:
    """Holds tokens and counts of the slots that have penalties; nothing until one has."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens: torch.Tensor | None = None  # int32 [slots, tokens]: prompt and output
        self._output: torch.Tensor | None = None  # int32 [slots, vocab]: times generated

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
        assert self._tokens is not None, "adjust() goes before count()"
        assert self._output is not None, "adjust() goes before count()"
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
        width = int(positions.max())
        tokens, output = self._state(int(penalties.slots.max()) + 1, width + 1, logits.shape[-1])
        for newcomer in penalties.newcomers:
            self._enter(newcomer, tokens, output)
        slots, rows = self._to(penalties.slots)[:, None], self._to(penalties.rows)[:, None]
        ids = tokens[slots[:, 0], :width].long()
        is_stale = torch.arange(width, device=self._device) >= self._to(positions)[:, None]
        ids = torch.where(is_stale, ids[:, :1], ids)  # a token twice gets the same value twice
        values, counts = logits[rows, ids], output[slots, ids]
        repetition = self._to(penalties.repetition)[:, None]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= self._to(penalties.frequency)[:, None] * counts
        values -= self._to(penalties.presence)[:, None] * (counts > 0)
        logits[rows, ids] = values

    def _enter(self, newcomer: Newcomer, tokens: torch.Tensor, output: torch.Tensor) -> None:
        slot, generated = newcomer.slot, self._to(newcomer.output)
        known = np.concatenate([newcomer.prompt, newcomer.output])
        tokens[slot, : len(known)] = self._to(known)
        output[slot] = 0
        ones = output.new_ones(len(generated))
        output[slot].index_put_((generated,), ones, accumulate=True)

    def _state(self, slots: int, width: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and counts with room for so many slots and tokens; slots begin at 0."""
        if self._tokens is None or self._output is None:
            self._tokens = torch.zeros(0, 0, dtype=torch.int32, device=self._device)
            self._output = torch.zeros(0, vocab, dtype=torch.int32, device=self._device)
        rows = max(len(self._tokens), 1 << (slots - 1).bit_length())
        columns = max(self._tokens.shape[1], 1 << (width - 1).bit_length())
        self._tokens = _grown(self._tokens, rows, columns)
        self._output = _grown(self._output, rows, vocab)
        return self._tokens, self._output

    def _to(self, array: npt.NDArray[Any]) -> torch.Tensor:
        if array.dtype == np.int32:
            array = array.astype(np.int64)  # as indexes, all of them
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _grown(table: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    if table.shape == (rows, columns):
        return table
    larger = table.new_zeros(rows, columns)
    larger[: len(table), : table.shape[1]] = table
    return larger
