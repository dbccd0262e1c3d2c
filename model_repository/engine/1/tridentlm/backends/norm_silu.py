"""Norm and SiLU of few rows, in the language Triton. They start while the product before them ends,
and several programs share a row of SiLU: a layer of Qwen3-8B's products with what lies between them
takes 2 to 5 us less than with FlashInfer's (an H200, 1 to 256 rows: of 102 to 170).

Many rows are FlashInfer's: there the time is that of reading and writing them.
"""
# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tridentlm.backends.kernels import starts_early

MOST_ROWS = 256
SILU_BLOCK = 2048
NUMBERS_PER_WARP = 512


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ops.add_rms_norm` for contiguous tensors of one dtype. Overwrites both inputs."""
    rows, columns = x.shape
    block, early = triton.next_power_of_2(columns), starts_early()
    warps = min(max(block // NUMBERS_PER_WARP, 1), 16)
    sizes = (columns, block, early)
    _add_norm[(rows,)](x, delta, weight, eps, *sizes, num_warps=warps, launch_pdl=early)
    return x, delta


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`Ops.silu_mul` for gate_up contiguous."""
    rows, columns = len(gate_up), gate_up.shape[1] // 2
    out, early = gate_up.new_empty(rows, columns), starts_early()
    grid = (triton.cdiv(columns, SILU_BLOCK), rows)
    sizes = (columns, SILU_BLOCK, early)
    _silu_mul[grid](gate_up, out, *sizes, num_warps=4, launch_pdl=early)
    return out


@triton.jit
def normed_sum(x, delta, factor, eps, place, live, COLUMNS: tl.constexpr):
    """Stores a row of x + delta in x and returns its norm, in float32, as `TorchOps` rounds it:
    before the weight, which is `factor`, and after it."""
    total = tl.load(x + place, live, 0.0).to(tl.float32) + tl.load(delta + place, live, 0.0)
    total = total.to(x.dtype.element_ty)
    tl.store(x + place, total, live)
    wide = total.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + eps)
    return (normed.to(total.dtype).to(tl.float32) * factor).to(total.dtype).to(tl.float32)


@triton.jit
def gated(gate, up):
    """silu(gate) * up, in float32."""
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def _add_norm(
    x, delta, weight, eps, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    lane = tl.arange(0, BLOCK)
    place, live = tl.program_id(0).to(tl.int64) * COLUMNS + lane, lane < COLUMNS
    if EARLY:
        gdc_launch_dependents()
    factor = tl.load(weight + lane, live, 0.0)
    if EARLY:
        gdc_wait()
    normed = normed_sum(x, delta, factor, eps, place, live, COLUMNS)
    tl.store(delta + place, normed.to(x.dtype.element_ty), live)


@triton.jit
def _silu_mul(gate_up, out, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < COLUMNS
    source = gate_up + row * 2 * COLUMNS + lane
    gate = tl.load(source, live, 0.0).to(tl.float32)
    up = tl.load(source + COLUMNS, live, 0.0).to(tl.float32)
    tl.store(out + row * COLUMNS + lane, gated(gate, up).to(out.dtype.element_ty), live)
