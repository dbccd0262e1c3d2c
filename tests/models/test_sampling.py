from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.models.plans import sampling_arrays
from tridentlm import sampling
from tridentlm.core.plan import StepPlan
from tridentlm.sampling import philox, sample, uniforms

Words = tuple[int, int, int, int]


def scalar_philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 as the paper writes it, one number at a time."""
    c, k = counter, key
    for _ in range(10):
        high_0, low_0 = divmod(c[0] * 0xD2511F53, 2**32)
        high_1, low_1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = (high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0)
        k = ((k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32)
    return c


def plan(rows: int, positions: npt.ArrayLike = 0, **given: Any) -> StepPlan:
    """A plan of which only the sampling arrays matter."""
    none = np.zeros(0, np.int32)
    return StepPlan(
        step=0,
        slots=none,
        query_starts=none,
        context_lens=none,
        block_tables=none,
        token_ids=none,
        positions=none,
        kv_slots=none.astype(np.int64),
        sampled=np.arange(rows, dtype=np.int32),
        sample_positions=np.broadcast_to(np.array(positions, np.int64), rows).copy(),
        **sampling_arrays(rows, **given),
    )


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_scalar_philox_gives_the_published_answers(
    counter: Words, key: tuple[int, int], expected: Words
) -> None:
    assert scalar_philox(counter, key) == expected


def test_philox_equals_the_scalar_one() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 50, np.uint64)
    counters = np.concatenate((np.arange(25), rng.integers(0, 2**64, 25, np.uint64)))
    words = philox(seeds, counters.astype(np.uint64))
    for column, seed, counter in zip(words.T, seeds.tolist(), counters.tolist(), strict=True):
        low_high = (int(counter) % 2**32, int(counter) >> 32, 0, 0)
        assert tuple(column) == scalar_philox(low_high, (seed % 2**32, seed >> 32))


def test_uniforms_are_in_range_and_uniform() -> None:
    count = 100_000
    numbers = uniforms(np.full(count, 7, np.uint64), np.arange(count))
    assert numbers.dtype == np.float32
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    observed, _ = np.histogram(numbers, bins=64, range=(0, 1))
    assert chi_square(observed, np.full(64, count / 64)) < 120  # 63 degrees: 1 in 20,000


def test_greedy_takes_the_lowest_of_the_highest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -3.0, -2.0, -0.5]])
    assert sample(logits, plan(3)).tolist() == [1, 0, 3]


def chi_square(observed: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


LOGITS = [1.0, 3.0, 0.5, 2.5, 2.5, -1.0, 2.0, -40.0, 0.0, 1.5]


def filtered(
    temperature: float, min_p: float, top_k: int, top_p: float, logits: Sequence[float] = LOGITS
) -> npt.NDArray[Any]:
    """The distribution that a request asks for, written down plainly in float64."""
    weights = np.exp(np.array(logits) / temperature)
    weights[weights < min_p * weights.max()] = 0
    ranking = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    weights[ranking[top_k or len(ranking) :]] = 0
    total, before = weights.sum(), 0.0
    for token in ranking:
        mass = weights[token]
        if before >= top_p * total:
            weights[token] = 0
        before += mass
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("temperature", "min_p", "top_k", "top_p"),
    [
        (1.0, 0.0, 0, 1.0),
        (0.6, 0.0, 0, 1.0),
        (2.5, 0.0, 0, 1.0),
        (1.0, 0.0, 4, 1.0),
        (1.0, 0.0, 2, 1.0),  # the second place is shared by tokens 3 and 4
        (1.0, 0.0, 100, 1.0),
        (1.0, 0.0, 0, 0.7),
        (1.0, 0.0, 0, 1e-6),
        (1.0, 0.2, 0, 1.0),
        (1.3, 0.1, 5, 0.8),
    ],
)
def test_tokens_are_distributed_as_asked(
    temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    count = 40_000
    given = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    asked = plan(count, np.arange(count) % 7, seeds=np.arange(count), **given)
    tokens = sample(torch.tensor([LOGITS]).expand(count, -1), asked)
    observed = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    expected = filtered(temperature, min_p, top_k, top_p) * count
    likely = expected > 1
    assert observed[~likely].sum() == 0
    # At most 8 degrees of freedom: exceeded by chance once in 20,000.
    assert chi_square(observed[likely], expected[likely]) < 34


def test_a_row_s_token_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(1)
    rows = 64
    logits = torch.from_numpy(rng.normal(size=(rows, 500)).astype(np.float32)) * 3
    fields: dict[str, Any] = {
        "temperature": rng.choice([0, 0.5, 1.0], rows),
        "top_k": rng.choice([0, 10, 400], rows),
        "top_p": rng.choice([1, 0.9, 0.3], rows),
        "min_p": rng.choice([0, 0.05], rows),
        "seeds": rng.integers(0, 2**64, rows, np.uint64),
    }
    positions = rng.integers(0, 9000, rows)
    together = sample(logits, plan(rows, positions, **fields)).tolist()
    for row in range(rows):
        own = {name: values[row] for name, values in fields.items()}
        assert sample(logits[row : row + 1], plan(1, positions[row], **own)).item() == together[row]


@pytest.mark.parametrize("head", [1, 4, 16, 64, 299])
def test_ranking_the_likeliest_first_changes_no_token(
    head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    rows = 200
    logits = torch.from_numpy(rng.integers(-6, 7, (rows, 300)).astype(np.float32))  # many ties
    asked = plan(
        rows,
        temperature=rng.choice([0.3, 1.0], rows),
        top_k=rng.choice([0, 1, 3, 16, 250], rows),
        top_p=rng.choice([1, 0.99, 0.6, 0.05], rows),
        seeds=np.arange(rows),
    )
    expected = sample(logits, asked)  # the head is larger than the vocabulary: a full sort
    monkeypatch.setattr(sampling, "HEAD", head)
    assert torch.equal(sample(logits, asked), expected)
    for row in range(rows):  # alone, more rows get by with the head
        own = {name: getattr(asked, name)[row] for name in ("temperature", "top_k", "top_p")}
        one = plan(1, seeds=row, **own)
        assert sample(logits[row : row + 1], one).item() == expected[row]


def test_seed_and_position_alone_choose_the_random_number() -> None:
    logits = torch.zeros(1, 1000)
    first = sample(logits, plan(1, 5, seeds=1, temperature=1)).item()
    assert sample(logits, plan(1, 5, seeds=1, temperature=1)).item() == first
    assert sample(logits, plan(1, 6, seeds=1, temperature=1)).item() != first
    assert sample(logits, plan(1, 5, seeds=2, temperature=1)).item() != first


def test_a_vanishing_temperature_is_greedy() -> None:
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    cold = plan(20, seeds=np.arange(20), temperature=1e-4)
    assert torch.equal(sample(logits, cold), logits.argmax(-1))
