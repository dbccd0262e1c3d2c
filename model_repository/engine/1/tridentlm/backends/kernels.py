"""Kernels of our own, in the language Triton: what no library fuses the way a step needs it.

Those of a decode step may start while the kernel before them ends (programmatic dependent launch).
Until `gdc_wait` returns such a kernel touches only what no kernel writes, the weights:

    before   ... | last programs, stores |
    this           | start, load weights . . wait | use what was stored ...
"""
# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HEADS_PER_PROGRAM = 4
VOCAB_BLOCK = 4096
INPUT_BLOCK = 512
MOST_STAGES = 8
"""Of loading, in a product's kernel."""
RESERVED_BYTES = 3072
"""Of a multiprocessor's shared memory: for what is not a stage."""


@functools.cache
def starts_early() -> bool:
    """Whether the device has programmatic dependent launch."""
    return torch.cuda.get_device_capability()[0] >= 9


@functools.cache
def capacity(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory for the stages of one."""
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_multiprocessor - RESERVED_BYTES


def vector_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T for x [1, in], weight [out, in], `in` a multiple of INPUT_BLOCK.

    A matrix product of one row is all reading of weights, and cuBLAS has no kernel for just that.
    """
    out = x.new_empty(1, len(weight))
    block = 2 * INPUT_BLOCK if weight.shape[1] % (2 * INPUT_BLOCK) == 0 else INPUT_BLOCK
    # A program needs some work to be worth its start, and 1024 numbers to read 16 bytes a thread.
    rows = 1 if weight.shape[1] >= 4096 and block > INPUT_BLOCK else 2
    grid = (triton.cdiv(len(weight), rows),)
    early = starts_early()
    sizes = (*weight.shape, rows, block)
    _vector_product[grid](x, weight, out, *sizes, early, num_warps=4, launch_pdl=early)
    return out


@triton.jit
def _vector_product(
    x,
    weight,
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
    values = tl.load(source, live[:, None], 0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    total = values * tl.load(x + lane).to(tl.float32)
    for start in range(BLOCK, INPUTS, BLOCK):
        values = tl.load(source + start, live[:, None], 0.0).to(tl.float32)
        total += values * tl.load(x + start + lane).to(tl.float32)
    tl.store(out + row, tl.sum(total, 1).to(out.dtype.element_ty), live)


def rope_store(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    eps: float,
    rotary: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Norms and rotates q and k, stores k and v at `kv_slots`; returns q [T, heads, head_dim].

    qkv [T, heads + 2 * kv_heads, head_dim] contiguous; qk_norm [heads + kv_heads, head_dim] or
    None; rotary: `rotary_table`; positions, kv_slots int32 [T]; caches of one layer
    [pages, kv_heads, page_size, head_dim].
    """
    tokens, all_heads, head_dim = qkv.shape
    kv_heads, page_size = k_cache.shape[1:3]
    heads = all_heads - 2 * kv_heads
    q = qkv.new_empty(tokens, heads, head_dim)
    grid = (tokens, triton.cdiv(all_heads, HEADS_PER_PROGRAM))
    _rope_store[grid](
        qkv,
        q,
        k_cache,
        v_cache,
        rotary if qk_norm is None else qk_norm,
        rotary,
        positions,
        kv_slots,
        eps,
        heads,
        kv_heads,
        head_dim // 2,
        page_size,
        qk_norm is not None,
        HEADS_PER_PROGRAM,
        starts_early(),
        num_warps=1,
        launch_pdl=starts_early(),
    )
    return q


@triton.jit
def _rope_store(
    qkv,
    q_out,
    k_cache,
    v_cache,
    norm,
    rotary,
    positions,
    kv_slots,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_wait()
    token = tl.program_id(0)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    lane = tl.arange(0, HALF)
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    live = (head < HEADS + 2 * KV_HEADS)[:, None]
    rotated = (head < HEADS + KV_HEADS)[:, None]
    source = qkv + (token.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head)[:, None] * 2 * HALF + lane
    raw_low = tl.load(source, live, 0.0)
    raw_high = tl.load(source + HALF, live, 0.0)
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)
        weight = norm + head[:, None] * 2 * HALF + lane
        low = (low * scale[:, None]).to(raw_low.dtype).to(tl.float32)
        high = (high * scale[:, None]).to(raw_low.dtype).to(tl.float32)
        low *= tl.load(weight, rotated, 0.0).to(tl.float32)
        high *= tl.load(weight + HALF, rotated, 0.0).to(tl.float32)
    angle = rotary + tl.load(positions + token) * 2 * HALF + lane
    cos, sin = tl.load(angle)[None], tl.load(angle + HALF)[None]
    turned_low, turned_high = low * cos - high * sin, high * cos + low * sin
    query = q_out + (token.to(tl.int64) * HEADS + head)[:, None] * 2 * HALF + lane
    tl.store(query, turned_low.to(raw_low.dtype), is_q[:, None])
    tl.store(query + HALF, turned_high.to(raw_low.dtype), is_q[:, None])
    slot = tl.load(kv_slots + token).to(tl.int64)
    place = (slot // PAGE * KV_HEADS * PAGE + slot % PAGE) * 2 * HALF + lane
    key = k_cache + place + (head - HEADS)[:, None] * PAGE * 2 * HALF
    is_k = rotated & (~is_q)[:, None]
    kv_type = k_cache.dtype.element_ty
    tl.store(key, turned_low.to(kv_type), is_k)
    tl.store(key + HALF, turned_high.to(kv_type), is_k)
    value = v_cache + place + (head - HEADS - KV_HEADS)[:, None] * PAGE * 2 * HALF
    tl.store(value, raw_low.to(tl.float32).to(kv_type), live & is_v[:, None])
    tl.store(value + HALF, raw_high.to(tl.float32).to(kv_type), live & is_v[:, None])


def choose_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
) -> torch.Tensor:
    """Samples each row as `sampling.sample` does without filters; returns int32 [S].

    logits [S, vocab] contiguous, temperature, uniform float32 [S], slots int32 [S]. The tokens are
    also written to `last_token` [slots]. One pass over the logits:

        blocks of the vocabulary    | max, where, sum exp | max, where, sum exp | ...
        temperature 0:              the first block that holds the highest logit
        else:                       the block where the running sum passes uniform * total, and
                                    in it the first token where the sum passes
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, VOCAB_BLOCK)
    top, mass = (logits.new_empty(rows, blocks, dtype=torch.float32) for _ in range(2))
    where, tokens = slots.new_empty(rows, blocks), slots.new_empty(rows)
    _summarize[(rows, blocks)](
        logits, temperature, top, where, mass, vocab, blocks, VOCAB_BLOCK, num_warps=8
    )
    _choose[(rows,)](
        logits,
        temperature,
        uniform,
        slots,
        top,
        where,
        mass,
        tokens,
        last_token,
        vocab,
        blocks,
        triton.next_power_of_2(blocks),
        VOCAB_BLOCK,
        num_warps=8,
    )
    return tokens


@triton.jit
def _summarize(
    logits,
    temperature,
    top,
    where,
    mass,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * VOCAB + ids, ids < VOCAB, float("-inf")).to(tl.float32)
    highest = tl.max(x, 0)
    t = tl.load(temperature + row)
    weights = tl.where(x > float("-inf"), tl.exp((x - highest) / tl.where(t > 0, t, 1.0)), 0.0)
    out = row * BLOCKS + block
    tl.store(top + out, highest)
    tl.store(where + out, tl.min(tl.where(x == highest, ids, VOCAB), 0))
    tl.store(mass + out, tl.sum(weights, 0))


@triton.jit
def _choose(
    logits,
    temperature,
    uniform,
    slots,
    top,
    where,
    mass,
    tokens,
    last_token,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS_POW2)
    real = block < BLOCKS
    tops = tl.load(top + row * BLOCKS + block, real, float("-inf"))
    highest = tl.max(tops, 0)
    t = tl.load(temperature + row)
    if t > 0:
        masses = tl.load(mass + row * BLOCKS + block, real, 0.0)
        masses = tl.where(masses > 0, masses * tl.exp((tops - highest) / t), 0.0)
        target = tl.load(uniform + row) * tl.sum(masses, 0)
        chosen = tl.sum((tl.cumsum(masses, 0) <= target).to(tl.int32), 0)
        chosen = tl.minimum(chosen, tl.max(tl.where(masses > 0, block, 0), 0))
        before = tl.sum(tl.where(block < chosen, masses, 0.0), 0)
        lane = tl.arange(0, BLOCK)
        ids = chosen * BLOCK + lane
        start = logits + row.to(tl.int64) * VOCAB
        x = tl.load(start + ids, ids < VOCAB, float("-inf")).to(tl.float32)
        weights = tl.where(x > float("-inf"), tl.exp((x - highest) / t), 0.0)
        passed = tl.sum((before + tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
        # Rounding may leave the target beyond the block's last possible token.
        token = chosen * BLOCK + tl.minimum(passed, tl.max(tl.where(weights > 0, lane, 0), 0))
    else:
        firsts = tl.load(where + row * BLOCKS + block, real, VOCAB)
        token = tl.min(tl.where(tops == highest, firsts, VOCAB), 0)
    tl.store(tokens + row, token)
    tl.store(last_token + tl.load(slots + row), token)
