"""The extras of the running requests, one row or entry per slot, and those of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tridentlm.core.extras import (
    F32,
    I32,
    I64,
    Measured,
    Newcomer,
    Penalties,
    RequestExtras,
    StepExtras,
)

if TYPE_CHECKING:
    from tridentlm.core.table import SlotTable

NOT_ASKED = -1
NO_IDS: I32 = np.empty(0, np.int32)
NO_BIAS: F32 = np.empty(0, np.float32)


class SlotExtras:
    """Struct of arrays over slots; a row counts only while `SlotTable.has_extras` says so."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.presence = np.zeros(rows, np.float32)
        self.frequency = np.zeros(rows, np.float32)
        self.repetition = np.ones(rows, np.float32)
        self.penalized: npt.NDArray[np.bool_] = np.zeros(rows, np.bool_)
        self.counted: npt.NDArray[np.bool_] = np.zeros(rows, np.bool_)  # the runner has its tokens
        self.min_tokens: I64 = np.zeros(rows, np.int64)
        self.logprobs: I64 = np.full(rows, NOT_ASKED, np.int64)
        self.prompt_logprobs: I64 = np.full(rows, NOT_ASKED, np.int64)
        self.constrained: npt.NDArray[np.bool_] = np.zeros(rows, np.bool_)  # by a grammar
        self.bias: list[tuple[I32, F32]] = [(NO_IDS, NO_BIAS)] * rows

    def admit(self, slot: int, extras: RequestExtras, known_output: int) -> None:
        """`known_output`: tokens that the request has generated before a preemption."""
        self.presence[slot] = extras.presence_penalty
        self.frequency[slot] = extras.frequency_penalty
        self.repetition[slot] = extras.repetition_penalty
        self.penalized[slot] = extras.has_penalties
        self.counted[slot] = False
        self.min_tokens[slot] = extras.min_tokens
        self.logprobs[slot] = NOT_ASKED if extras.logprobs is None else extras.logprobs
        told = extras.prompt_logprobs is None or known_output > 0
        self.prompt_logprobs[slot] = NOT_ASKED if told else extras.prompt_logprobs
        self.constrained[slot] = bool(extras.grammar)
        ids, values = zip(*extras.logit_bias, strict=True) if extras.logit_bias else ((), ())
        self.bias[slot] = np.array(ids, np.int32), np.array(values, np.float32)


def plan_extras(
    table: SlotTable, slots: I64, starts: I64, context: I64, sampled: I64
) -> StepExtras:
    """The extras of a step whose row i computes up to token `context[i]` of `slots[i]`.

    `starts` [B] are the rows' first tokens in the plan, `sampled` [S] the rows that sample. Called
    before the step is noted in the table.
    """
    sampling = slots[sampled]
    asks = table.has_extras[sampling]
    rows, tokens, values = _biases(table, sampling, asks, context[sampled])
    return StepExtras(
        request_ids=table.ids[sampling],
        bias_rows=rows,
        bias_tokens=tokens,
        bias=values,
        penalties=_penalties(table, sampling, asks),
        measured=_measured(table, slots, starts, context, sampled),
        constrained=np.flatnonzero(asks & table.extras.constrained[sampling]).astype(np.int32),
    )


def _biases(
    table: SlotTable, sampling: I64, asks: npt.NDArray[np.bool_], positions: I64
) -> tuple[I32, I32, F32]:
    """logit_bias, and a ban of the stop tokens of rows that are short of min_tokens.

    A grammar may allow nothing but its end: its mask heeds min_tokens itself.
    """
    extras = table.extras
    asking = np.flatnonzero(asks)
    biases = [extras.bias[slot] for slot in sampling[asking].tolist()]
    counts = [len(ids) for ids, _ in biases]
    short = asks & (positions - table.prompt_len[sampling] < extras.min_tokens[sampling])
    short &= ~extras.constrained[sampling]
    banned = np.where(short[:, None], table.stop_ids[sampling], -1)
    ban_rows, columns = np.nonzero((banned >= 0) & (banned < extras.vocab_size))
    rows = np.concatenate([np.repeat(asking, counts), ban_rows]).astype(np.int32)
    tokens = np.concatenate([*(ids for ids, _ in biases), banned[ban_rows, columns]])
    bans = np.full(len(ban_rows), -np.inf, np.float32)
    return rows, tokens.astype(np.int32), np.concatenate([*(v for _, v in biases), bans])


def _penalties(table: SlotTable, sampling: I64, asks: npt.NDArray[np.bool_]) -> Penalties | None:
    extras = table.extras
    rows = np.flatnonzero(asks & extras.penalized[sampling])
    if not len(rows):
        return None
    slots = sampling[rows]
    newcomers = []
    for slot in slots[~extras.counted[slots]].tolist():
        prompt, known = int(table.prompt_len[slot]), int(table.known[slot])
        assert known == table.length[slot], "a slot's first sample follows tokens that are known"
        tokens = table.tokens[slot]
        newcomers.append(Newcomer(slot, tokens[:prompt].copy(), tokens[prompt:known].copy()))
    extras.counted[slots] = True
    return Penalties(
        rows=rows.astype(np.int32),
        slots=slots.astype(np.int32),
        presence=extras.presence[slots],
        frequency=extras.frequency[slots],
        repetition=extras.repetition[slots],
        newcomers=tuple(newcomers),
    )


def _measured(
    table: SlotTable, slots: I64, starts: I64, context: I64, sampled: I64
) -> Measured | None:
    extras = table.extras
    sampling = slots[sampled]
    rows = np.flatnonzero(table.has_extras[sampling] & (extras.logprobs[sampling] >= 0))
    first = table.computed[slots]
    in_prompt = table.has_extras[slots] & (extras.prompt_logprobs[slots] >= 0)
    counts = np.where(in_prompt, np.minimum(context, table.prompt_len[slots] - 1) - first, 0)
    counts = np.maximum(counts, 0)
    if not len(rows) and not counts.any():
        return None
    row = np.repeat(np.arange(len(slots)), counts)
    offset = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    target = first[row] + offset + 1
    tops = (extras.logprobs[sampling[rows]], extras.prompt_logprobs[slots[counts > 0]])
    return Measured(
        places=(starts[row] + offset).astype(np.int32),
        targets=table.tokens[slots[row], target],
        rows=rows.astype(np.int32),
        ids=np.concatenate([table.ids[slots[row]], table.ids[sampling[rows]]]),
        positions=np.concatenate([target, context[sampled[rows]]]),
        top=int(np.concatenate(tops).max()),
    )
