"""FP8 products of few rows, as decode steps have them: all of a GPU reads the weights, once.

    x [rows, in]   weight [out, in]        tile of a program: out.T [block_out, rows]
                                           = weight [block_out, in / splits] @ x.T

The outputs are the tensor cores' long side, so that few rows fill them. Where there are fewer tiles
than multiprocessors, several programs share a tile: each sums a part of the inputs, and the one
that finishes last adds up the parts, always in the same order.
"""
# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tridentlm.backends.base import Rounded
from tridentlm.backends.kernels import MOST_STAGES, capacity, starts_early

BLOCK_IN = 128
ROW_BLOCKS = ((16, 0), (32, 0), (64, 0), (64, 32), (128, 0), (128, 32), (128, 64))
"""Rows of a tile, as the tensor cores take them: a power of two, or two of them. Few, as each is a
kernel to compile."""
LEAST_INPUTS = 768
"""Of a program that shares a tile."""
MOST_SPLITS = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is divided; tiles have block_rows + more_rows rows."""

    block_out: int
    block_rows: int
    more_rows: int
    row_tiles: int
    splits: int
    stages: int


def cut(rows: int, outputs: int, inputs: int, processors: int, shared_bytes: int) -> Cut | None:
    """The division that was the fastest on an H200, or None where the library was faster."""
    block_out, tiles, row_tiles = 64, triton.cdiv(outputs, 64), 1
    if 64 < rows <= 128 and tiles > 2 * processors:
        block_out, tiles = 128, triton.cdiv(outputs, 128)
    if rows > 192:
        tiles, row_tiles = 2 * tiles, 2
        if rows > 256 or tiles > processors:
            return None
    block_rows, more_rows = next(b for b in ROW_BLOCKS if row_tiles * sum(b) >= rows)
    splits = max(1, min(processors // tiles, inputs // LEAST_INPUTS, MOST_SPLITS))
    resident = min(triton.cdiv(tiles, processors), 3 if rows <= 64 else 2 if rows <= 128 else 1)
    stage_bytes = (block_out + block_rows + more_rows) * BLOCK_IN
    stages = min(shared_bytes // resident // stage_bytes, MOST_STAGES)
    return Cut(block_out, block_rows, more_rows, row_tiles, splits, stages)


def few_rows_product(
    x: Rounded, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """`Ops.scaled_linear` for contiguous tensors, or None: to be computed by other means.

    Products of a device run one after another: they share counters, which the first call makes, so
    it may not be in the capture of a CUDA Graph.
    """
    rows, (outputs, inputs), device = len(x.values), weight.shape, weight.device
    if inputs % 16 or x.values.data_ptr() % 16 or weight.data_ptr() % 16 or not starts_early():
        return None  # the tensor memory accelerator takes no such sizes, and came with early starts
    *sizes, counters = _resources(device)
    c = cut(rows, outputs, inputs, *sizes)
    if c is None:
        return None
    out = torch.empty(rows, outputs, dtype=dtype, device=device)
    grid = (c.splits, triton.cdiv(outputs, c.block_out), c.row_tiles)
    parts = math.prod(grid) * c.block_out * (c.block_rows + c.more_rows) if c.splits > 1 else 1
    partials = torch.empty(parts, dtype=torch.float32, device=device)
    blocks = (x.values, c.block_rows), (x.values, c.more_rows or 16), (weight, c.block_out)
    _few_rows_product[grid](
        *(TensorDescriptor.from_tensor(source, [height, BLOCK_IN]) for source, height in blocks),
        *(weight, x.scales, scale, out, partials, counters, rows, outputs, inputs),
        *(c.block_out, c.block_rows, c.more_rows, BLOCK_IN, c.splits),
        FETCHED=1 << c.stages.bit_length() - 1,
        AT_ONCE=2**14 // triton.next_power_of_2(c.splits),
        num_stages=c.stages,
        num_warps=4,
        launch_pdl=True,
    )
    return out


@functools.cache
def _resources(device: torch.device) -> tuple[int, int, torch.Tensor]:
    """`capacity`, and a counter for each tile that programs share: how many of them have stored
    their part."""
    count, shared_bytes = capacity(device)
    return count, shared_bytes, torch.zeros(count, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows"])
def _few_rows_product(
    x,
    x_more,
    weight,
    weight_start,
    x_scale,
    scale,
    out,
    partials,
    counters,
    rows,
    outputs,
    inputs,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MORE_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLITS: tl.constexpr,
    FETCHED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    gdc_launch_dependents()
    split, tile = tl.program_id(0), tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    first_out, since = tl.program_id(1) * BLOCK_OUT, tl.program_id(2) * BLOCK_ROWS
    blocks = tl.cdiv(inputs, BLOCK_IN)
    start, stop = blocks * split // SPLITS, blocks * (split + 1) // SPLITS
    output = tl.minimum(first_out + tl.arange(0, BLOCK_OUT), outputs - 1).to(tl.int64)
    line = tl.minimum((start + tl.arange(0, FETCHED)) * BLOCK_IN, inputs - 1)
    places = weight_start + output[:, None] * inputs + line
    fetch: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(fetch, "=r,l", [places], tl.int32, is_pure=False, pack=1)
    gdc_wait()
    # Tiles end with the last row and may overlap: 224 rows in two tiles of 128 took up to a third
    # longer than 256 where the second went beyond the last.
    first_row, more_row = tl.minimum(since, tl.maximum(rows - BLOCK_ROWS, 0)), rows - MORE_ROWS
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    if MORE_ROWS > 0:
        total_more = tl.zeros((BLOCK_OUT, MORE_ROWS), tl.float32)
    for block in range(start, stop):
        weights = weight.load([first_out, block * BLOCK_IN])
        total = tl.dot(weights, x.load([first_row, block * BLOCK_IN]).T, total)
        if MORE_ROWS > 0:
            numbers = x_more.load([more_row, block * BLOCK_IN])
            total_more = tl.dot(weights, numbers.T, total_more)
    to = (out, x_scale, scale, rows, outputs)
    if SPLITS == 1:
        _store(total, to, first_out, first_row, since)
        if MORE_ROWS > 0:
            _store(total_more, to, first_out, more_row, BLOCK_ROWS)
        return
    part: tl.constexpr = BLOCK_OUT * (BLOCK_ROWS + MORE_ROWS)
    more: tl.constexpr = BLOCK_OUT * BLOCK_ROWS
    partials += tile.to(tl.int64) * (SPLITS * part)
    tl.store(partials + split * part + _places(0, BLOCK_OUT, BLOCK_ROWS), total)
    if MORE_ROWS > 0:
        tl.store(partials + split * part + more + _places(0, BLOCK_OUT, MORE_ROWS), total_more)
    tl.debug_barrier()  # all threads' stores come before the one thread's count
    if tl.atomic_add(counters + tile, 1, sem="acq_rel") < SPLITS - 1:
        return
    tl.store(counters + tile, 0)
    height: tl.constexpr = min(AT_ONCE // BLOCK_ROWS, BLOCK_OUT)
    for first in tl.range(0, BLOCK_OUT, height, num_stages=1):
        summed = _sum(partials, first, part, SPLITS, height, BLOCK_ROWS)
        _store(summed, to, first_out + first, first_row, since)
        if MORE_ROWS > 0:
            summed_more = _sum(partials + more, first, part, SPLITS, height, MORE_ROWS)
            _store(summed_more, to, first_out + first, more_row, BLOCK_ROWS)


@triton.jit
def _places(first, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    return (first + tl.arange(0, HEIGHT))[:, None] * WIDTH + tl.arange(0, WIDTH)


@triton.jit
def _sum(
    parts,
    first,
    PART: tl.constexpr,
    SPLITS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of the parts of HEIGHT outputs of a tile, which other programs stored."""
    places = parts + _places(first, HEIGHT, WIDTH)
    total = tl.load(places, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(places + split * PART, cache_modifier=".cg")
    return total


@triton.jit
def _store(total, to, first_out, first_row, since):
    """Scales and stores the rows from `since` on."""
    out, x_scale, scale, rows, outputs = to
    output = first_out + tl.arange(0, total.shape[0])
    row = first_row + tl.arange(0, total.shape[1])
    total *= tl.load(scale + output, output < outputs, 0.0)[:, None]
    total *= tl.load(x_scale + row, row < rows, 0.0)
    live = (output < outputs)[:, None] & (row >= since) & (row < rows)
    place = row.to(tl.int64) * outputs + output[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), live)
