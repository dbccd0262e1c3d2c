"""Products of few rows with each expert's weights, as decode steps have them.

All of a GPU reads the weights of the experts that were chosen, once. A program has a tile of one
expert's outputs and goes through that expert's places, mostly in one turn:

    places          x or inner [place, in]    tile of a program: out.T [128, block_rows]
    expert 0: 0 1   ---------------------                        = weight [128, in] @ x.T
    expert 1: 2     ---------------------
    expert 3: 3 4   ---------------------     nobody chose expert 2: its programs end at once

The outputs are the tensor cores' long side, so that few rows fill them. The first product takes
its rows from the tokens, and a program has 64 outputs of the gate and the same of up, so that it
ends with SiLU.
"""
# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tridentlm.backends.kernels import MOST_STAGES, capacity, starts_early
from tridentlm.backends.norm_silu import gated

BLOCK_OUT, BLOCK_IN = 128, 64
MOST_ROWS = 16
"""Of an expert in the mean."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is divided. `by_place`: its programs are for places, not for experts."""

    block_rows: int
    by_place: bool
    groups: int
    stages: int


def cut(tokens: int, choices: int, experts: int, tiles: int, sizes: tuple[int, int]) -> Cut:
    """The division for `tiles` of each expert.

    sizes: `capacity` of the device. How many rows an expert has is known there alone, at most
    `tokens`. More than block_rows make its weights be read again, so there is room for several
    times the mean.
    """
    processors, shared_bytes = sizes
    block_rows = 16 if tokens <= 16 else 32 if choices <= 8 * experts else 64
    groups = min(choices, experts)
    # Of two and three, that which leaves more loads in flight, also while one program starts.
    resident = min(triton.cdiv(groups * tiles, processors), 2 if block_rows == 32 else 3)
    stage_bytes = 2 * (BLOCK_OUT + block_rows) * BLOCK_IN
    stages = min(shared_bytes // resident // stage_bytes, MOST_STAGES)
    return Cut(block_rows, choices < experts, groups, stages)


def few_rows_experts(
    x: torch.Tensor,
    tokens: torch.Tensor,
    ends: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor | None:
    """down @ (silu(gate @ x) * (up @ x)) of each place, or None: to be computed by other means.

    x [T, hidden], gate_up [experts, 2 * inner, hidden] with the gate first, down [experts, hidden,
    inner], all contiguous, in bfloat16; tokens and ends as `sort_choices` returns them. Returns
    [places, hidden].
    """
    (experts, hidden, inner_size), choices = down.shape, len(tokens)
    # The tensor memory accelerator takes no other sizes.
    fits = not (hidden % 16 or inner_size % 16 or gate_up.data_ptr() % 16 or down.data_ptr() % 16)
    if not fits or choices > MOST_ROWS * experts:
        return None
    inner, out = x.new_empty(choices, inner_size), x.new_empty(choices, hidden)
    for source, weight, to in ((x, gate_up, inner), (inner, down, out)):
        inputs, outputs, is_first = source.shape[1], to.shape[1], source is x
        block_out = BLOCK_OUT // 2 if is_first else BLOCK_OUT
        tiles = triton.cdiv(outputs, block_out)
        c = cut(len(x), choices, experts, tiles, capacity(weight.device))
        _few_rows_experts[(tiles, c.groups)](
            TensorDescriptor.from_tensor(weight.flatten(0, 1), [block_out, BLOCK_IN]),
            *(source, tokens, ends, to, outputs, inputs, is_first, c.by_place),
            *(experts, triton.next_power_of_2(experts)),
            *(block_out, c.block_rows, BLOCK_IN, starts_early()),
            num_stages=c.stages,
            num_warps=4,
            launch_pdl=starts_early(),
        )
    return out


@triton.jit
def _few_rows_experts(
    weight,
    x,
    tokens,
    ends,
    out,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    FIRST: tl.constexpr,
    BY_PLACE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(1)
    if BY_PLACE:
        other = tl.arange(0, EXPERT_BLOCK)
        other_end = tl.load(ends + other, other < EXPERTS, 2**30)
        expert = tl.sum((other_end <= tl.program_id(1)).to(tl.int32), 0)
    start = tl.load(ends + expert - 1, expert > 0, 0)
    end = tl.load(ends + expert)
    if BY_PLACE:
        # The first of an expert's places stands for them all.
        end = tl.where(start == tl.program_id(1), end, start)
    first_out = tl.program_id(0) * BLOCK_OUT
    first_line = expert * (2 * OUTPUTS if FIRST else OUTPUTS) + first_out
    line = tl.arange(0, BLOCK_IN)
    output = first_out + tl.arange(0, BLOCK_OUT)
    for first in range(start, end, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        live = row < end
        source_row = tl.load(tokens + row, live, 0) if FIRST else row
        source = x + source_row.to(tl.int64)[:, None] * INPUTS + line
        total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
        if FIRST:
            total_up = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
        for block in range(0, INPUTS, BLOCK_IN):
            there = live[:, None]
            if INPUTS % BLOCK_IN > 0:
                there = there & (line < INPUTS - block)
            weights = weight.load([first_line, block])
            if FIRST:
                weights_up = weight.load([first_line + OUTPUTS, block])
            numbers = tl.load(source + block, there, 0.0).T
            total = tl.dot(weights, numbers, total)
            if FIRST:
                total_up = tl.dot(weights_up, numbers, total_up)
        if FIRST:
            total = gated(total, total_up)
        place = row.to(tl.int64) * OUTPUTS + output[:, None]
        stored = live & (output < OUTPUTS)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), stored)
