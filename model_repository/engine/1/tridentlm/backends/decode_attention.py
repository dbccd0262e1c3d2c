"""Attention of decode rows, whose work is cut into equal shares however unlike the rows are.

A tile is 64 tokens of one row. The tiles of all rows lie end to end, each row's after a gap as long
as what a row takes besides, and each of W workers takes an equal share of the line, for one KV
head. A row within one share is finished by its worker; of a row that crosses borders each worker
leaves a part, and the last one to come adds the parts up.

    rows      ....0000000000....1111....2222222222222222....333333     tile_starts = 0, 5, 7, 15, 18
    workers   |     0     |      1      |     2     |      3      |    parts: of rows 0 and 2

The worker of a row's last tile also norms, rotates and stores the token that the step computes, and
adds it to what it has read of the others.

The split is stream-K's (Osama et al., 2023) and LeanAttention's (Sanovar et al., 2024), the softmax
FlashAttention's (Dao et al., 2022). The tensor cores' first operand has 64 rows at least: keys and
values take that side, the few queries of a KV head the other, so that all is transposed.
"""
# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tridentlm.backends.kernels import starts_early
from tridentlm.steparrays import LONGEST_TILE

PROGRAMS_PER_PROCESSOR = 2
"""As many as shared memory has room for, at heads of 128."""
STAGES = 5
"""Of loading: page numbers take two, keys and values the rest."""
ROW_COST = 192
"""What a row takes besides, in tokens: its queries are made ready, its result is stored."""
FEWEST_QUERIES = 16
"""Of a tensor core's product."""
LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)
"""Of a score, where none has been seen: what differs from it by nothing is a number."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of a step by their `steparrays.tiles_of`, int32 on the device.

    Each may be longer than needed. A row's token is the last of its `context_lens` [rows].
    """

    tile_slots: torch.Tensor
    tile_starts: torch.Tensor
    context_lens: torch.Tensor


class DecodeWorkers:
    """How many there are, and what they leave for one another; for decodes that run in turn."""

    def __init__(
        self, rows: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.count = max(1, PROGRAMS_PER_PROCESSOR * processors // kv_heads)
        self.rows = triton.next_power_of_2(rows)
        self.queries = max(FEWEST_QUERIES, triton.next_power_of_2(heads // kv_heads))
        parts = 2 * self.count * kv_heads * self.queries
        self.values = torch.empty(parts * head_dim, dtype=torch.float32, device=device)
        self.sums = torch.empty(2 * parts, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)


def decode_attention(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    eps: float,
    rotary: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: DecodeRows,
    out: torch.Tensor,
    workers: DecodeWorkers,
    window: int,
) -> None:
    """Stores the rows' keys and values and attends: `kernels.rope_store`, then attention.

    qkv [rows, heads + 2 * kv_heads, head_dim] contiguous, out [rows, heads, head_dim]; qk_norm
    [heads + kv_heads, head_dim] or None; rotary: `rotary_table`; caches of one layer [pages,
    kv_heads, page_size, head_dim]. Rows are no more than `workers` was made for.
    """
    count, heads, head_dim = out.shape
    kv_heads, page_size = k_cache.shape[1:3]
    early = starts_early()
    _decode[(workers.count, kv_heads)](
        qkv,
        rotary if qk_norm is None else qk_norm,
        rotary,
        k_cache,
        v_cache,
        rows.tile_slots,
        rows.tile_starts,
        rows.context_lens,
        out,
        workers.values,
        workers.sums,
        workers.arrived,
        head_dim**-0.5 * LOG2_E,
        eps,
        count,
        workers.rows,
        triton.next_power_of_2(workers.count),
        kv_heads,
        heads // kv_heads,
        workers.queries,
        head_dim,
        page_size,
        min(page_size, LONGEST_TILE),
        window,
        qk_norm is not None,
        STAGES,
        ROW_COST // min(page_size, LONGEST_TILE),
        early,
        num_warps=4,
        launch_pdl=early,
    )


@triton.jit(do_not_specialize=["rows"])
def _decode(
    qkv,
    qk_norm,
    rotary,
    k_cache,
    v_cache,
    tile_slots,
    tile_starts,
    context_lens,
    out,
    part_values,
    part_sums,
    arrived,
    scale,
    eps,
    rows,
    ROWS: tl.constexpr,
    WORKERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    NORM: tl.constexpr,
    STAGES: tl.constexpr,
    GAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    worker, head = tl.program_id(0), tl.program_id(1)
    total = (tl.load(tile_starts + rows) + rows * GAP).to(tl.int64)
    workers = tl.minimum(tl.num_programs(0), total)  # those with a share
    begin = (worker * total // workers).to(tl.int32)
    end = tl.minimum((worker + 1) * total // workers, total).to(tl.int32)
    index = tl.arange(0, ROWS)
    starts = tl.load(tile_starts + index, index < rows, 0) + index * GAP
    row = tl.sum(((starts <= begin) & (index < rows)).to(tl.int32), 0) - 1
    lane, column, query = tl.arange(0, TILE), tl.arange(0, HEAD_DIM), tl.arange(0, QUERIES)
    live = query < GROUP
    part = query[:, None] * HEAD_DIM + column
    heads: tl.constexpr = GROUP * KV_HEADS
    width: tl.constexpr = (heads + 2 * KV_HEADS) * HEAD_DIM
    head_of = head * GROUP + tl.where(live, query, 0)
    key_head = heads + head + tl.zeros((1,), tl.int32)
    if EARLY:
        gdc_wait()
    row_start, row_end = tl.load(tile_starts + row), tl.load(tile_starts + row + 1)
    context = tl.load(context_lens + row)
    gaps = (row + 1) * GAP  # up to the row's first tile
    tile = tl.maximum(begin - gaps, row_start)
    while tile < end - gaps:
        # Loads that are needed late start here, beside those of the tiles.
        following = tl.minimum(row + 1, rows - 1)
        next_end = tl.load(tile_starts + following + 1)
        next_context = tl.load(context_lens + following)
        raw, turn = qkv + row.to(tl.int64) * width, rotary + (context - 1) * HEAD_DIM
        queries = _rotated(raw, qk_norm, turn, head_of, eps, HEAD_DIM, NORM)
        queries = queries.to(qkv.dtype.element_ty)
        key = _rotated(raw, qk_norm, turn, key_head, eps, HEAD_DIM, NORM)
        value = tl.load(raw + (heads + KV_HEADS + head) * HEAD_DIM + column)[None]
        # As later steps will read them: rounded once.
        key, value = key.to(k_cache.dtype.element_ty), value.to(v_cache.dtype.element_ty)
        last_slot = tl.load(tile_slots + row_end - 1).to(tl.int64) + (context - 1) % TILE
        stop = tl.minimum(row_end, end - gaps)
        turned = tl.trans(queries)
        highest = tl.full((QUERIES,), LOWEST, tl.float32)
        # Added up only in the end, since tokens lie in different warps.
        weights_by_lane = tl.zeros((TILE, QUERIES), tl.float32)
        values = tl.zeros((HEAD_DIM, QUERIES), tl.float32)
        for number in tl.range(tile, stop, num_stages=STAGES):
            slot = tl.load(tile_slots + number).to(tl.int64)
            line = (slot // PAGE * KV_HEADS + head) * PAGE + slot % PAGE + lane
            cell = line[:, None] * HEAD_DIM + column
            k = tl.load(k_cache + cell).to(queries.dtype)
            v = tl.load(v_cache + cell).to(queries.dtype)
            # Counted from the row's last tile, since a window's first one is not the row's.
            token = (context - 1) // TILE * TILE - (row_end - 1 - number) * TILE + lane
            seen = token < context - 1
            if WINDOW > 0:
                seen = seen & (token >= context - WINDOW)
            scores = tl.where(seen[:, None], tl.dot(k, turned) * scale, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 0))
            weights = tl.exp2(scores - higher[None])
            fading = tl.exp2(highest - higher)
            weights_by_lane = weights_by_lane * fading[None] + weights
            values = tl.dot(tl.trans(v), weights.to(v.dtype), values * fading[None])
            highest = higher
        values, weight = tl.trans(values), tl.sum(weights_by_lane, 0)
        if stop == row_end:
            place = (last_slot // PAGE * KV_HEADS + head) * PAGE + last_slot % PAGE
            place = place * HEAD_DIM + column[None]
            tl.store(k_cache + place, key)
            tl.store(v_cache + place, value)
            score = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1) * scale
            higher = tl.maximum(highest, score)
            fading, growing = tl.exp2(highest - higher), tl.exp2(score - higher)
            weight = weight * fading + growing
            values = values * fading[:, None] + value.to(tl.float32) * growing[:, None]
            highest = higher
        is_done = True
        if (tile != row_start) | (stop != row_end):
            # A worker has at most two parts: of the row that it finds begun, and of one it begins.
            first = _worker_of(row_start + gaps, workers, total)
            last = _worker_of(row_end - 1 + gaps, workers, total)
            slot = (2 * worker + (worker == first).to(tl.int32)) * KV_HEADS + head
            sums = part_sums + 2 * slot * QUERIES + query
            tl.store(sums, highest)
            tl.store(sums + QUERIES, weight)
            tl.store(part_values + slot * QUERIES * HEAD_DIM + part, values, live[:, None])
            tl.debug_barrier()  # all threads' stores come before the one thread's count
            counter = arrived + row * KV_HEADS + head
            is_done = tl.atomic_add(counter, 1, sem="acq_rel") == last - first
            if is_done:
                tl.store(counter, 0)
                others = tl.arange(0, WORKERS)[:, None]
                slots = (2 * (first + others) + (others == 0).to(tl.int32)) * KV_HEADS + head
                theirs = part_sums + 2 * slots * QUERIES + query
                there = (others <= last - first) & (query >= 0)
                # Past the processor's own cache: others have written since it was filled.
                tops = tl.load(theirs, there, LOWEST, volatile=True)
                masses = tl.load(theirs + QUERIES, there, 0.0, volatile=True)
                shares = tl.exp2(tops - tl.max(tops, 0)[None])
                weight = tl.sum(masses * shares, 0)
                values = tl.zeros((QUERIES, HEAD_DIM), tl.float32)
                for other in tl.range(first, last + 1, num_stages=STAGES):
                    slot = (2 * other + (other == first).to(tl.int32)) * KV_HEADS + head
                    source = part_values + slot * QUERIES * HEAD_DIM + part
                    more = tl.load(source, live[:, None], 0.0, cache_modifier=".cg")
                    of_it = tl.sum(tl.where(first + others == other, shares, 0.0), 0)
                    values += more * of_it[:, None]
        if is_done:
            place = out + ((row * KV_HEADS + head) * GROUP + query)[:, None] * HEAD_DIM + column
            tl.store(place, (values / weight[:, None]).to(out.dtype.element_ty), live[:, None])
        tile, row = stop, following
        row_start, row_end, context = row_end, next_end, next_context
        gaps += GAP


@triton.jit
def _worker_of(place, workers, total):
    """Whose share a place of the line is in: of the last w with w * total // workers <= place."""
    return (((place.to(tl.int64) + 1) * workers - 1) // total).to(tl.int32)


@triton.jit
def _rotated(raw, qk_norm, turn, head, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Some heads of one token, normed and rotated as by `kernels.rope_store`: float32 [heads,
    HEAD_DIM]."""
    HALF: tl.constexpr = HEAD_DIM // 2
    lane = tl.arange(0, HALF)
    place = head[:, None] * HEAD_DIM + lane
    raw_low, raw_high = tl.load(raw + place), tl.load(raw + place + HALF)
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)[:, None]
        low = (low * scale).to(raw_low.dtype) * tl.load(qk_norm + place).to(tl.float32)
        high = (high * scale).to(raw_low.dtype) * tl.load(qk_norm + place + HALF).to(tl.float32)
    cos, sin = tl.load(turn + lane)[None], tl.load(turn + HALF + lane)[None]
    both = tl.join(low * cos - high * sin, high * cos + low * sin)
    return both.permute(0, 2, 1).reshape(head.shape[0], HEAD_DIM)
