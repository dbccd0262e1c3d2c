"""How the ranks of a tensor-parallel engine share a tensor.

`Split` says what a tensor is made of, `Shard` which of that one rank holds:

    Split(0, pieces=8)   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |      e.g. 8 query heads
    4 ranks              | rank 0| rank 1| rank 2| rank 3|
    Split(0, pieces=2)   |       0       |       1       |      2 KV heads: ranks hold the same one
    Split(0, pieces=7)   | 0 | 1 | 2 | 3 | 4 | 5 | 6 |zero|     a vocabulary: the last is padded
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Split:
    """Dimension `dim` consists of `pieces` equal pieces, none of which is ever divided."""

    dim: int
    pieces: int


class Sliceable(Protocol):
    """A tensor, or one still in its file (`safe_open().get_slice`), which is read as it is cut."""

    def __getitem__(self, index: Any, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of every tensor that rank `rank` of `size` holds; the default is all of it."""

    rank: int = 0
    size: int = 1

    def interval(self, pieces: int) -> tuple[int, int]:
        """The pieces start:stop of this rank. The last ranks may have fewer than the first."""
        if pieces < self.size:
            start = self.rank * pieces // self.size
            return start, start + 1
        count = self.count(pieces)
        return min(self.rank * count, pieces), min((self.rank + 1) * count, pieces)

    def count(self, pieces: int) -> int:
        """How many pieces every rank has room for; what its `interval` lacks of it is padding."""
        return -(-pieces // self.size)

    def take(self, source: Sliceable, shape: tuple[int, ...], split: Split | None) -> torch.Tensor:
        """Cuts this rank's part out of `source`, whose whole shape is `shape`.

        `split` None: every rank holds all of it. Where pieces run out, zeros follow.
        """
        if split is None or self.size == 1:
            return source[:]
        unit = shape[split.dim] // split.pieces
        start, stop = self.interval(split.pieces)
        part = source[(*[slice(None)] * split.dim, slice(start * unit, stop * unit))]
        missing = self.count(split.pieces) - (stop - start)
        if not missing:
            return part
        return F.pad(part, [0, 0] * (len(shape) - 1 - split.dim) + [0, missing * unit])
