"""FP8 (e4m3) on a GPU, in the language Triton: rounding in one pass, products of one row."""
# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tridentlm.backends.base import Rounded
from tridentlm.models.fp8 import E4M3, LARGEST, SMALLEST_SCALE

NUMBERS_PER_WARP = 512
INPUT_BLOCK = 2048


def round_rows(x: torch.Tensor, input_scale: torch.Tensor | None) -> Rounded:
    """`models.fp8.round_rows`, bit for bit, for x contiguous."""
    rows, columns = x.shape
    values = torch.empty(rows, columns, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    _round_rows[(rows,)](
        x,
        scales if input_scale is None else input_scale,
        values,
        scales,
        columns,
        block,
        input_scale is not None,
        LARGEST,
        SMALLEST_SCALE,
        num_warps=min(max(block // NUMBERS_PER_WARP, 1), 16),
    )
    return Rounded(values, scales)


@triton.jit
def _round_rows(
    x,
    input_scale,
    values,
    scales,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STATIC: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    live = lane < COLUMNS
    numbers = tl.load(x + row * COLUMNS + lane, live, 0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(input_scale)
    else:
        scale = tl.maximum(tl.max(tl.abs(numbers), 0) * (1 / LARGEST), SMALLEST_SCALE)
    tl.store(scales + row, scale)
    # The language's own / is not rounded exactly, and its plain clamp makes a number of nan.
    ratio = tl.div_rn(numbers, scale)
    ratio = tl.clamp(ratio, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values + row * COLUMNS + lane, ratio.to(values.dtype.element_ty), live)


def scaled_vector_product(
    x: Rounded, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`Ops.scaled_linear` for one row and weights whose inputs are a multiple of INPUT_BLOCK."""
    out = torch.empty(1, len(weight), dtype=dtype, device=weight.device)
    rows = 1 if weight.shape[1] >= 4 * INPUT_BLOCK else 2
    _scaled_vector_product[(triton.cdiv(len(weight), rows),)](
        x.values, x.scales, weight, scale, out, *weight.shape, rows, INPUT_BLOCK, num_warps=4
    )
    return out


@triton.jit
def _scaled_vector_product(
    x,
    x_scale,
    weight,
    scale,
    out,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < OUTPUTS
    lane = tl.arange(0, BLOCK)
    source = weight + row.to(tl.int64)[:, None] * INPUTS + lane
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, INPUTS, BLOCK):
        numbers = tl.load(source + start, live[:, None], 0.0).to(tl.float32)
        total += numbers * tl.load(x + start + lane).to(tl.float32)
    sums = tl.sum(total, 1) * tl.load(x_scale) * tl.load(scale + row, live, 0.0)
    tl.store(out + row, sums.to(out.dtype.element_ty), live)
