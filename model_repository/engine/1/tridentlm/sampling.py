"""How a token is chosen from its logits: one definition on every device.

    logits / temperature -> min-p -> top-k -> top-p -> inverse CDF in vocabulary order

The random number of a token depends on nothing but the request's seed and the token's absolute
position, so a request's tokens do not change with its batch, its preemptions or its device.
Temperature 0 takes the highest logit, the lowest id among equals. Each filter sees what the filter
before it left: top-p sums the probabilities renormalised after top-k.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from tridentlm.core.plan import F32, I64, StepPlan

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

HEAD = 512
"""How many of the likeliest tokens a CPU ranks before it sorts the vocabulary: a sort of 8 x 49,152
takes 33 ms of one core, as long as half a decode step, and few distributions need it."""

CutTail = Callable[[torch.Tensor, npt.NDArray[np.int32], F32], torch.Tensor]
"""top-k and top-p: weights [n, vocab], top_k and top_p [n] -> the weights, 0 outside of the cut."""

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)[:, None]
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDS = np.arange(10, dtype=np.uint64)[:, None, None]
_WEYL = _ROUNDS * np.array([0x9E3779B9, 0xBB67AE85], np.uint64)[:, None] & _LOW
"""What each round adds to the key."""


def philox(seeds: U64, counters: U64) -> U32:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    seeds [n] are the 64-bit keys, counters [n] the low 64 bits of the 128-bit counters. Returns the
    four output words, uint32 [4, n].
    """
    keys = np.stack((seeds & _LOW, seeds >> _32)) + _WEYL & _LOW
    even, odd = (np.zeros((2, len(counters)), np.uint64) for _ in range(2))
    even[0], odd[0] = counters & _LOW, counters >> _32  # words 0 and 2, words 1 and 3
    for key in keys:
        product = even * _MULTIPLIERS
        even = (product >> _32)[::-1] ^ odd ^ key
        odd = (product & _LOW)[::-1]
    words: U32 = np.stack((even[0], odd[0], even[1], odd[1])).astype(np.uint32)
    return words


def uniforms(seeds: U64, positions: I64) -> F32:
    """The random number in [0, 1) of each token, float32 with 24 random bits."""
    words = philox(seeds, positions.astype(np.uint64))[0]
    scaled: F32 = (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
    return scaled


def draws(plan: StepPlan) -> F32:
    """The random number of each row that samples; greedy batches, which use none, get zeros."""
    if not plan.temperature.any():
        return np.zeros(len(plan.temperature), np.float32)
    return uniforms(plan.seeds, plan.sample_positions)


def sample(logits: torch.Tensor, plan: StepPlan, cut_tail: CutTail | None = None) -> torch.Tensor:
    """Chooses a token for each row of logits [S, vocab]; the plan holds how. Returns int64 [S].

    Does only what the batch asks for: greedy batches take one argmax, unfiltered rows no sort.
    """
    random = np.flatnonzero(plan.temperature > 0)
    if len(random) == 0:
        return logits.argmax(-1)
    if len(random) == len(logits):
        return _sample_random(logits, plan, random, cut_tail or _cut_tail)
    tokens = logits.argmax(-1)
    rows = _to(logits.device, random)
    tokens[rows] = _sample_random(logits[rows], plan, random, cut_tail or _cut_tail)
    return tokens


def has_filters(plan: StepPlan) -> bool:
    """Whether a row of the plan restricts what may be drawn; greedy rows do not."""
    filtered = (plan.min_p > 0) | (plan.top_k > 0) | (plan.top_p < 1)
    return bool((filtered & (plan.temperature > 0)).any())


def _sample_random(
    logits: torch.Tensor, plan: StepPlan, rows: npt.NDArray[np.intp], cut_tail: CutTail
) -> torch.Tensor:
    device = logits.device
    temperature = _to(device, plan.temperature[rows])
    probabilities = torch.softmax(logits.float() / temperature[:, None], -1)
    min_p, top_k, top_p = plan.min_p[rows], plan.top_k[rows], plan.top_p[rows]
    if (min_p > 0).any():
        floor = _to(device, min_p)[:, None] * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill_(probabilities < floor, 0)
    cut = np.flatnonzero((top_k > 0) | (top_p < 1))
    if len(cut) == len(rows):
        probabilities = cut_tail(probabilities, top_k, top_p)
    elif len(cut):
        part = _to(device, cut)
        probabilities[part] = cut_tail(probabilities[part], top_k[cut], top_p[cut])
    uniform = uniforms(plan.seeds[rows], plan.sample_positions[rows])
    return _invert(probabilities, _to(device, uniform))


def _cut_tail(
    probabilities: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: F32
) -> torch.Tensor:
    """Zeroes all but the `top_k` most likely tokens, then all but the fewest that reach `top_p`.

    Among equal probabilities the lower id ranks first.
    """
    device, vocab = probabilities.device, probabilities.shape[-1]
    ranked_by_head = ((top_k <= HEAD) | (top_k >= vocab)).all()  # else top-p lacks its total
    if device.type == "cpu" and vocab > HEAD and ranked_by_head:
        # Ordered by id first, so that the stable sort in _rank puts the lower id first.
        head = probabilities.topk(HEAD, sorted=False).indices.sort(-1).values
        ranked, order = _rank(probabilities.gather(-1, head))
        kept = _keep(ranked, probabilities, top_k, top_p)
        # A tie across the head's edge could belong to either side, so it must lie beyond the cut.
        if (kept.masked_fill(kept == 0, torch.inf).amin(-1) > ranked[:, -1]).all():
            return torch.zeros_like(probabilities).scatter_(-1, head.gather(-1, order), kept)
    ranked, order = _rank(probabilities)
    kept = _keep(ranked, probabilities, top_k, top_p)
    return torch.zeros_like(probabilities).scatter_(-1, order, kept)


def _rank(probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, order = probabilities.sort(dim=-1, descending=True, stable=True)
    return values, order


def _keep(
    ranked: torch.Tensor,
    probabilities: torch.Tensor,
    top_k: npt.NDArray[np.int32],
    top_p: F32,
) -> torch.Tensor:
    """The `ranked` probabilities, or the most likely of them, with those outside the cut zeroed."""
    device, vocab = ranked.device, probabilities.shape[-1]
    limit = _to(device, np.where((top_k > 0) & (top_k < vocab), top_k, vocab))[:, None]
    kept = ranked.masked_fill(torch.arange(ranked.shape[-1], device=device) >= limit, 0)
    if (top_p >= 1).all():
        return kept
    mass = kept.cumsum(-1)
    total = torch.where(limit < vocab, mass[:, -1:], probabilities.sum(-1, keepdim=True))
    # A row without top-p keeps what it has, whatever its neighbours ask for.
    share = _to(device, np.where(top_p < 1, top_p, np.float32(np.inf)))[:, None]
    # A token stays while the mass before it is short of the share; the first always does.
    return kept.masked_fill(mass - kept >= share * total, 0)


def _invert(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first id whose cumulative weight exceeds `uniform` of the total."""
    mass = probabilities.cumsum(-1)
    target = uniform[:, None] * mass[:, -1:]
    tokens = torch.searchsorted(mass, target, right=True)[:, 0]
    return tokens.clamp_(max=probabilities.shape[-1] - 1)


def _to(device: torch.device, array: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
