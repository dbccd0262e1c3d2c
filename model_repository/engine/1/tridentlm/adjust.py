"""What requests ask of the logits before a token is drawn from them.

    logits [S, vocab] -> + logit_bias, - inf for banned tokens -> repetition -> frequency, presence
                      -> - inf for what the row's grammar does not allow

The order is vLLM's. Penalties need counts of each row's tokens. Steps in flight sample tokens that
the host has not seen, so the counts live on the device, one row of the vocabulary per slot, and are
brought forward by each step's own tokens:

    step k     newcomers: counts[slot] = their tokens | adjust | sample | counts[slot, token] += 1
    step k+1   adjust (reads them) | sample | ...
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tridentlm.core.extras import I32, U32, Newcomer, Penalties, StepExtras
from tridentlm.core.plan import StepPlan


class LogitAdjuster:
    """Holds the tokens' counts of the slots that have penalties; nothing until one has."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._output: torch.Tensor | None = None  # int32 [slots, vocab]: times generated
        self._in_prompt: torch.Tensor | None = None  # bool [slots, vocab]

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
            self._penalize(logits, extras.penalties)
        if extras.allowed is not None:
            self._constrain(logits, extras.constrained, extras.allowed)
        return logits

    def count(self, tokens: torch.Tensor, plan: StepPlan) -> None:
        """Takes note of the tokens [S] that the plan's rows have sampled."""
        penalties = None if plan.extras is None else plan.extras.penalties
        if penalties is None:
            return
        assert self._output is not None, "adjust() goes before count()"
        slots, rows = self._to(penalties.slots), self._to(penalties.rows)
        self._output[slots, tokens[rows].long()] += 1  # a slot is in a plan once

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

    def _penalize(self, logits: torch.Tensor, penalties: Penalties) -> None:
        output, in_prompt = self._counts(int(penalties.slots.max()) + 1, logits.shape[-1])
        for newcomer in penalties.newcomers:
            self._enter(newcomer, output, in_prompt)
        slots, rows = self._to(penalties.slots), self._to(penalties.rows)
        counts = output[slots]
        values = logits[rows]
        repetition = self._to(penalties.repetition)[:, None]
        seen = in_prompt[slots] | (counts > 0)
        values = torch.where(
            seen, torch.where(values > 0, values / repetition, values * repetition), values
        )
        values -= self._to(penalties.frequency)[:, None] * counts
        values -= self._to(penalties.presence)[:, None] * (counts > 0)
        logits[rows] = values

    def _enter(self, newcomer: Newcomer, output: torch.Tensor, in_prompt: torch.Tensor) -> None:
        slot, generated = newcomer.slot, self._to(newcomer.output)
        ones = output.new_ones(len(generated))
        output[slot] = 0
        output[slot].index_put_((generated,), ones, accumulate=True)
        in_prompt[slot] = False
        in_prompt[slot, self._to(newcomer.prompt)] = True

    def _counts(self, slots: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The state with room for `slots` slots; slots are given out from 0 on."""
        if self._output is None or self._in_prompt is None:
            self._output = torch.zeros(0, vocab, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(0, vocab, dtype=torch.bool, device=self._device)
        if slots > len(self._output):
            more = (1 << (slots - 1).bit_length()) - len(self._output)
            self._output = torch.cat([self._output, self._output.new_zeros(more, vocab)])
            self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(more, vocab)])
        return self._output, self._in_prompt

    def _to(self, array: npt.NDArray[Any]) -> torch.Tensor:
        if array.dtype == np.int32:
            array = array.astype(np.int64)  # as indexes, all of them
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
