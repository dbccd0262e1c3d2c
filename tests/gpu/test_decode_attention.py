"""The decode kernel of our own against float64. Run with `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.gpu.test_products import error
from tridentlm.steparrays import tiles_of

pytestmark = pytest.mark.gpu

EPS = 1e-6


@dataclass
class Rows:
    """Rows of `contexts` tokens whose pages lie anywhere in a cache of random numbers."""

    contexts: list[int]
    heads: int
    kv_heads: int
    head_dim: int = 128
    page_size: int = 64
    window: int = 0
    normed: bool = True
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        self.lens = np.array(self.contexts, np.int32)
        counts = -(-self.lens // self.page_size)
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.pages = np.random.default_rng(0).permutation(self.starts[-1]).astype(np.int32)

    @functools.cached_property
    def cache(self) -> list[torch.Tensor]:
        size = (len(self.pages), self.kv_heads, self.page_size, self.head_dim)
        return [torch.randn(size, device="cuda").to(self.dtype) for _ in "kv"]

    @functools.cached_property
    def step(self) -> tuple[torch.Tensor, torch.Tensor | None, float, torch.Tensor]:
        """What is computed before a layer's attention."""
        heads = self.heads + 2 * self.kv_heads
        qkv = torch.randn(len(self.lens), heads, self.head_dim, device="cuda").bfloat16()
        norm = torch.randn(self.heads + self.kv_heads, self.head_dim, device="cuda").bfloat16()
        rotary = torch.randn(max(self.contexts), self.head_dim, device="cuda")
        return qkv, norm if self.normed else None, EPS, rotary

    def stored(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """By the kernel that prefills take: q, and the cache with the step's tokens."""
        from tridentlm.backends.kernels import rope_store

        last = self.lens - 1
        pages = self.pages[self.starts[:-1] + last // self.page_size]
        slots = pages * self.page_size + last % self.page_size
        cache = [x.clone() for x in self.cache]
        places = (torch.from_numpy(x).cuda() for x in (last, slots))
        return rope_store(*self.step, *places, *cache), cache

    def exact(self, row: int, q: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        pages = self.pages[self.starts[row] : self.starts[row + 1]]
        first = max(0, self.contexts[row] - self.window) if self.window else 0
        k, v = (
            x.float()[pages].transpose(0, 1).reshape(self.kv_heads, -1, self.head_dim).double()
            for x in cache
        )
        k, v = (x[:, first : self.contexts[row]] for x in (k, v))
        q = q[row].view(self.kv_heads, -1, self.head_dim).double()
        weights = (q @ k.transpose(1, 2) * self.head_dim**-0.5).softmax(-1)
        return (weights @ v).reshape(self.heads, self.head_dim)

    def attended(self, times: int = 1) -> list[torch.Tensor]:
        """The answers of `times` runs that follow one another."""
        from tridentlm.backends.decode_attention import (
            DecodeRows,
            DecodeWorkers,
            decode_attention,
        )

        sizes = self.heads, self.kv_heads, self.head_dim
        workers = DecodeWorkers(len(self.lens), *sizes, self.cache[0].device)
        tables = np.zeros((len(self.lens), np.diff(self.starts).max()), np.int32)
        for row, (start, end) in enumerate(pairwise(self.starts)):
            tables[row, : end - start] = self.pages[start:end]
        tiles = tiles_of(tables, self.lens, self.page_size, self.window)
        rows = DecodeRows(*(torch.from_numpy(x).cuda() for x in (*tiles, self.lens)))
        size = (len(self.lens), self.heads, self.head_dim)
        outs = [
            torch.full(size, torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(times)
        ]
        for out in outs:
            decode_attention(*self.step, *self.cache, rows, out, workers, self.window)
        assert not workers.arrived.any()  # ready for the next step
        return outs


UNLIKE = [1, 64, 65, 700, 3, 1023, 128, 16]


@pytest.mark.parametrize(
    "rows",
    [
        Rows([1], 16, 8),
        Rows([8000], 16, 8),
        Rows([640] * 66, 16, 8),
        Rows(UNLIKE, 16, 8),
        Rows(UNLIKE, 32, 4, normed=False),
        Rows(UNLIKE, 9, 3, head_dim=64),
        Rows(UNLIKE, 20, 1, head_dim=256),
        Rows(UNLIKE, 8, 4, page_size=16),
        Rows(UNLIKE, 8, 4, page_size=32),
        Rows(UNLIKE, 8, 4, page_size=128),
        Rows(UNLIKE, 8, 4, window=100),
        Rows(UNLIKE, 8, 4, dtype=torch.float8_e4m3fn),
        Rows([n % 300 + 1 for n in range(1024)], 32, 8),
    ],
    ids=lambda rows: f"{rows.heads}-{rows.kv_heads}-{rows.head_dim}-{rows.page_size}",
)
def test_each_row_attends_to_its_own_context_and_stores_its_token(rows: Rows) -> None:
    q, cache = rows.stored()
    [out] = rows.attended()
    for row in range(0, len(rows.lens), max(1, len(rows.lens) // 32)):
        assert error(out[row], rows.exact(row, q, cache)) < 8e-3
    for ours, theirs in zip(rows.cache, cache, strict=True):
        assert error(ours.float(), theirs.double()) < 1e-4  # a rounding may fall to the other side


def test_parts_are_added_in_one_order_whoever_comes_last() -> None:
    outs = Rows([2000, 30, 4000, 1, 900, 900, 900], 32, 8).attended(times=200)
    assert all(torch.equal(out, outs[0]) for out in outs)
