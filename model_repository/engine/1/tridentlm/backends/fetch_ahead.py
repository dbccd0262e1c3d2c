"""Norm and SiLU of few rows, beside which the weights of the product that follows are fetched.

A decode step is all reading of weights and cache, and memory is idle from one product's last load
to the first of the next. Programs without a row use that time: they ask for weights and are done.

    memory    | weights |            | weights |        | fetched   weights |
    kernels   | product | norm |       product | ->     | norm |  product   |

A library's products go through the inputs from the first to the last, for all outputs at once: so
the first inputs of every output are what is fetched.
"""
# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tridentlm.backends.kernels import starts_early

MOST_ROWS = 256
"""Of a product that waits for its weights more than for its arithmetic."""
MOST_BYTES = 24 * 2**20
"""Fetched at a time: about half of an H200's cache."""
PIECE = tl.constexpr(1024)
"""Bytes of one fetch."""
SILU_BLOCK = 2048
NORM_NUMBERS_PER_WARP = 512


@dataclass(frozen=True, slots=True)
class Fetch:
    """Which pieces of weights [out, in] are fetched: the first ones of each output."""

    weight: torch.Tensor
    outputs: int
    row_bytes: int
    pieces: int

    @classmethod
    def of(cls, weight: torch.Tensor | None, instead: torch.Tensor) -> Fetch:
        """No pieces where there is no weight or nothing that fetches; any tensor is `instead`."""
        if weight is None or not starts_early() or weight.data_ptr() % 16:
            return cls(instead, 1, 0, 0)
        outputs, row_bytes = len(weight), weight.shape[1] * weight.itemsize
        pieces = min(row_bytes, MOST_BYTES // outputs) // PIECE.value
        return cls(weight, outputs, row_bytes, pieces if row_bytes % 16 == 0 else 0)

    def programs(self, warps: int) -> int:
        return -(-self.outputs * self.pieces // (32 * warps))

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.outputs, self.row_bytes, self.pieces


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    upcoming: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ops.add_rms_norm` for contiguous tensors of one dtype. Overwrites both inputs."""
    rows, columns = x.shape
    fetch, early = Fetch.of(upcoming, weight), starts_early()
    block = triton.next_power_of_2(columns)
    warps = min(max(block // NORM_NUMBERS_PER_WARP, 1), 16)
    _add_norm[(rows + fetch.programs(warps),)](
        *(x, delta, weight, eps, fetch.weight, rows, columns, block),
        *(*fetch.sizes, 32 * warps, early),
        num_warps=warps,
        launch_pdl=early,
    )
    return x, delta


def silu_mul(gate_up: torch.Tensor, upcoming: torch.Tensor | None) -> torch.Tensor:
    """`Ops.silu_mul` for gate_up contiguous."""
    rows, columns = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    fetch, early, warps = Fetch.of(upcoming, out), starts_early(), 4
    blocks = triton.cdiv(columns, SILU_BLOCK)
    _silu_mul[(rows * blocks + fetch.programs(warps),)](
        *(gate_up, out, fetch.weight, rows, columns, blocks, SILU_BLOCK),
        *(*fetch.sizes, 32 * warps, early),
        num_warps=warps,
        launch_pdl=early,
    )
    return out


@triton.jit
def fetch_pieces(
    weight,
    program,
    programs,
    OUTPUTS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PIECES: tl.constexpr,
    THREADS: tl.constexpr,
):
    """A thread asks for a piece. All outputs' first pieces come before their second ones."""
    number = tl.arange(0, THREADS) * programs + program
    output, piece = number % OUTPUTS, number // OUTPUTS
    bytes_of = weight.to(tl.pointer_type(tl.uint8), bitcast=True)
    place = bytes_of + output.to(tl.int64) * ROW_BYTES + piece * PIECE
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], 1024; mov.u32 $0, 0; }",
        "=r,l,r",
        [place, (piece < PIECES).to(tl.int32)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    x,
    delta,
    weight,
    eps,
    upcoming,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PIECES: tl.constexpr,
    THREADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program >= rows:
        fetchers = tl.num_programs(0) - rows
        fetch_pieces(upcoming, program - rows, fetchers, OUTPUTS, ROW_BYTES, PIECES, THREADS)
        return
    lane = tl.arange(0, BLOCK)
    live = lane < COLUMNS
    factor = tl.load(weight + lane, live, 0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    place = program.to(tl.int64) * COLUMNS + lane
    total = tl.load(x + place, live, 0.0).to(tl.float32) + tl.load(delta + place, live, 0.0)
    total = total.to(x.dtype.element_ty)
    tl.store(x + place, total, live)
    wide = total.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + eps)
    # As `TorchOps` rounds: before the weight and after it.
    normed = normed.to(total.dtype).to(tl.float32) * factor
    tl.store(delta + place, normed.to(total.dtype), live)


@triton.jit(do_not_specialize=["rows"])
def _silu_mul(
    gate_up,
    out,
    upcoming,
    rows,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PIECES: tl.constexpr,
    THREADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    program = tl.program_id(0)
    work = rows * BLOCKS
    if program >= work:
        fetchers = tl.num_programs(0) - work
        fetch_pieces(upcoming, program - work, fetchers, OUTPUTS, ROW_BYTES, PIECES, THREADS)
        return
    if EARLY:
        gdc_wait()
    row = (program // BLOCKS).to(tl.int64)
    lane = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    live = lane < COLUMNS
    source = gate_up + row * 2 * COLUMNS + lane
    gate = tl.load(source, live, 0.0).to(tl.float32)
    up = tl.load(source + COLUMNS, live, 0.0).to(tl.float32)
    product = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * COLUMNS + lane, product.to(out.dtype.element_ty), live)
