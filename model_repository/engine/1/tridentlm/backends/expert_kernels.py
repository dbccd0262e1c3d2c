"""What lies around the products of a mixture of experts, in the language Triton.

    chosen [T, 2]     places [T, 2]     tokens by place          ends
    t0: 2 0           4 0               t0 t1 | t1 t2 | t0 t2    2 4 6
    t1: 0 1           1 2
    t2: 2 1           5 3

A choice's place is its position once the choices are sorted by expert: there its token goes into
the products, and there the token finds what came of it.
"""
# mypy: disable-error-code="misc,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tridentlm.backends.kernels import starts_early

FEW_CHOICES, MANY_CHOICES = 2048, 8192
"""That a program of the sort looks at together; each is a kernel to compile."""
SUM_BLOCK = 1024


def route(
    logits: torch.Tensor, per_token: int, normalized: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, in `dtype`, and numbers, int32, of each token's experts: [T, per_token] both.

    logits [T, experts] contiguous. A token's experts come in the order of their scores, equal ones
    in that of their numbers. `normalized`: a token's weights add up to 1.
    """
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, per_token, dtype=dtype)
    chosen = logits.new_empty(tokens, per_token, dtype=torch.int32)
    blocks = triton.next_power_of_2(experts), triton.next_power_of_2(per_token)
    sizes = (experts, per_token, *blocks, normalized)
    early = starts_early()
    _route[(tokens,)](logits, weights, chosen, *sizes, early, num_warps=1, launch_pdl=early)
    return weights, chosen


def sort_choices(
    chosen: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts choices by expert, those of one expert in the order of their tokens.

    chosen int32 [T, per_token] contiguous. Returns, in int32, the token of each place
    [T * per_token], the place of each choice [T, per_token], and where each expert's places end
    [experts].
    """
    tokens, places = chosen.new_empty(chosen.numel()), torch.empty_like(chosen)
    ends, early = chosen.new_empty(experts), starts_early()
    few = chosen.numel() <= FEW_CHOICES
    _sort_choices[(experts,)](
        *(chosen, tokens, places, ends, *chosen.shape),
        FEW_CHOICES if few else MANY_CHOICES,
        early,
        num_warps=4 if few else 16,
        launch_pdl=early,
    )
    return tokens, places, ends


def combine(out: torch.Tensor, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Each token's weighted sum of the rows at its places: returns [T, hidden].

    out [T * per_token, hidden], weights and places, int32, [T, per_token], all contiguous. Summed
    in float32 in the order of the token's choices, so that its neighbours make no difference.
    """
    (tokens, per_token), hidden = places.shape, out.shape[1]
    total, early = out.new_empty(tokens, hidden), starts_early()
    grid = (tokens, triton.cdiv(hidden, SUM_BLOCK))
    sizes = (hidden, per_token, SUM_BLOCK)
    _combine[grid](out, weights, places, total, *sizes, early, num_warps=4, launch_pdl=early)
    return total


@triton.jit
def _route(
    logits,
    weights,
    chosen,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    NORMALIZED: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, EXPERT_BLOCK), tl.arange(0, CHOICE_BLOCK)
    real = expert < EXPERTS
    x = tl.load(logits + token * EXPERTS + expert, real, float("-inf")).to(tl.float32)
    shares = tl.exp(x - tl.max(x, 0))
    scores = shares / tl.sum(shares, 0)
    best = tl.zeros((CHOICE_BLOCK,), tl.float32)
    numbers = tl.zeros((CHOICE_BLOCK,), tl.int32)
    for index in tl.static_range(PER_TOKEN):
        highest = tl.max(scores, 0)
        # No score equals the highest where all are nan: the number has to be an expert's even so.
        number = tl.min(tl.where(scores == highest, expert, EXPERTS - 1), 0)
        best = tl.where(choice == index, highest, best)
        numbers = tl.where(choice == index, number, numbers)
        scores = tl.where(expert == number, -1.0, scores)
    if NORMALIZED:
        best /= tl.sum(best, 0)
    place = token * PER_TOKEN + choice
    tl.store(weights + place, best.to(weights.dtype.element_ty), choice < PER_TOKEN)
    tl.store(chosen + place, numbers, choice < PER_TOKEN)


@triton.jit(do_not_specialize=["rows"])
def _sort_choices(
    chosen,
    tokens,
    places,
    ends,
    rows,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert, lane, choices = tl.program_id(0), tl.arange(0, BLOCK), rows * PER_TOKEN
    lower = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, choices, BLOCK):
        # What is beyond the choices counts as of an expert above all.
        numbers = tl.load(chosen + start + lane, start + lane < choices, 2**30)
        lower += (numbers < expert).to(tl.int32)
    next_place = tl.sum(lower, 0)
    for start in range(0, choices, BLOCK):
        index = start + lane
        mine = tl.load(chosen + index, index < choices, 2**30) == expert
        place = next_place + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(places + index, place, mine)
        tl.store(tokens + place, index // PER_TOKEN, mine)
        next_place += tl.sum(mine.to(tl.int32), 0)
    tl.store(ends + expert, next_place)


@triton.jit
def _combine(
    out,
    weights,
    places,
    total,
    HIDDEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = lane < HIDDEN
    result = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        place = tl.load(places + token * PER_TOKEN + choice).to(tl.int64)
        weight = tl.load(weights + token * PER_TOKEN + choice).to(tl.float32)
        result += weight * tl.load(out + place * HIDDEN + lane, live, 0.0).to(tl.float32)
    tl.store(total + token * HIDDEN + lane, result.to(total.dtype.element_ty), live)
