"""FP8 (e4m3) on a GPU, in the language Triton: rounding, with what comes before it, in one pass."""
# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tridentlm.backends.base import Rounded
from tridentlm.backends.kernels import starts_early
from tridentlm.backends.norm_silu import gated, normed_sum
from tridentlm.models.fp8 import E4M3, LARGEST, SMALLEST_SCALE

NUMBERS_PER_WARP = 512
INPUT_BLOCK = 2048


def round_rows(x: torch.Tensor, input_scale: torch.Tensor | None) -> Rounded:
    """`models.fp8.round_rows`, bit for bit, for x contiguous."""
    rounded, options = _prepare(x, x.shape[1], input_scale)
    _round_rows[(len(x),)](x, *options.arguments, **options.launch)
    return rounded


def add_rms_norm_rounded(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    input_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, Rounded]:
    """`Ops.add_rms_norm_rounded` for contiguous tensors of one dtype. Overwrites x."""
    rounded, options = _prepare(x, x.shape[1], input_scale)
    _add_norm_round[(len(x),)](x, delta, weight, eps, *options.arguments, **options.launch)
    return x, rounded


def silu_mul_rounded(gate_up: torch.Tensor, input_scale: torch.Tensor | None) -> Rounded:
    """`Ops.silu_mul_rounded` for gate_up contiguous."""
    rounded, options = _prepare(gate_up, gate_up.shape[1] // 2, input_scale)
    _silu_mul_round[(len(gate_up),)](gate_up, *options.arguments, **options.launch)
    return rounded


@dataclass(frozen=True, slots=True)
class _Options:
    """What the kernels that round have in common; a program has a row."""

    arguments: tuple[torch.Tensor | int | float | bool, ...]
    launch: dict[str, int | bool]


def _prepare(
    x: torch.Tensor, columns: int, input_scale: torch.Tensor | None
) -> tuple[Rounded, _Options]:
    values = torch.empty(len(x), columns, dtype=E4M3, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    given = scales if input_scale is None else input_scale
    sizes = (columns, block, input_scale is not None, LARGEST, SMALLEST_SCALE, starts_early())
    launch = {"num_warps": min(max(block // NUMBERS_PER_WARP, 1), 16), "launch_pdl": starts_early()}
    return Rounded(values, scales), _Options((given, values, scales, *sizes), launch)


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
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    place, live = row * COLUMNS + lane, lane < COLUMNS
    numbers = tl.load(x + place, live, 0.0).to(tl.float32)
    scale = _scale(numbers, input_scale, STATIC, LARGEST, SMALLEST_SCALE)
    tl.store(scales + row, scale)
    tl.store(values + place, _round(numbers, scale, LARGEST), live)


@triton.jit
def _add_norm_round(
    x,
    delta,
    weight,
    eps,
    input_scale,
    values,
    scales,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STATIC: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    place, live = row * COLUMNS + lane, lane < COLUMNS
    factor = tl.load(weight + lane, live, 0.0)
    numbers = normed_sum(x, delta, factor, eps, place, live, COLUMNS)
    scale = _scale(numbers, input_scale, STATIC, LARGEST, SMALLEST_SCALE)
    tl.store(scales + row, scale)
    tl.store(values + place, _round(numbers, scale, LARGEST), live)


@triton.jit
def _silu_mul_round(
    gate_up,
    input_scale,
    values,
    scales,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STATIC: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    live = lane < COLUMNS
    source = gate_up + row * 2 * COLUMNS + lane
    gate = tl.load(source, live, 0.0).to(tl.float32)
    up = tl.load(source + COLUMNS, live, 0.0)
    numbers = gated(gate, up).to(up.dtype).to(tl.float32)
    scale = _scale(numbers, input_scale, STATIC, LARGEST, SMALLEST_SCALE)
    tl.store(scales + row, scale)
    tl.store(values + row * COLUMNS + lane, _round(numbers, scale, LARGEST), live)


@triton.jit
def _scale(
    numbers,
    input_scale,
    STATIC: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
):
    if STATIC:
        scale = tl.load(input_scale)
    else:
        scale = tl.maximum(tl.max(tl.abs(numbers), 0) * (1 / LARGEST), SMALLEST_SCALE)
    return scale


@triton.jit
def _round(numbers, scale, LARGEST: tl.constexpr):
    # The language's own / is not rounded exactly, and its plain clamp makes a number of nan.
    ratio = tl.div_rn(numbers, scale)
    ratio = tl.clamp(ratio, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return ratio.to(tl.float8e4nv)


def scaled_vector_product(
    x: Rounded, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`Ops.scaled_linear` for one row and weights whose inputs are a multiple of INPUT_BLOCK."""
    out = torch.empty(1, len(weight), dtype=dtype, device=weight.device)
    rows = 1 if weight.shape[1] >= 4 * INPUT_BLOCK else 2
    early = starts_early()
    tensors = (x.values, x.scales, weight, scale, out)
    _scaled_vector_product[(triton.cdiv(len(weight), rows),)](
        *tensors, *weight.shape, rows, INPUT_BLOCK, early, num_warps=4, launch_pdl=early
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
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < OUTPUTS
    lane = tl.arange(0, BLOCK)
    source = weight + row.to(tl.int64)[:, None] * INPUTS + lane
    numbers = tl.load(source, live[:, None], 0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    total = numbers * tl.load(x + lane).to(tl.float32)
    for start in range(BLOCK, INPUTS, BLOCK):
        numbers = tl.load(source + start, live[:, None], 0.0).to(tl.float32)
        total += numbers * tl.load(x + start + lane).to(tl.float32)
    sums = tl.sum(total, 1) * tl.load(x_scale) * tl.load(scale + row, live, 0.0)
    tl.store(out + row, sums.to(out.dtype.element_ty), live)
