"""A group whose ranks are threads of one process: what they compute, without what carries it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tests.waiting import PATIENCE
from tridentlm.models.shard import Shard
from tridentlm.parallel.group import Group

T = TypeVar("T")


class ThreadGroup(Group):
    def __init__(
        self, rank: int, values: list[torch.Tensor | None], barrier: threading.Barrier
    ) -> None:
        self.shard = Shard(rank, len(values))
        self._values, self._barrier = values, barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        return torch.cat(self._exchange(x), -1)[:, :width]

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._values[self.shard.rank] = x
        self._barrier.wait(PATIENCE)
        values = [value for value in self._values if value is not None]
        self._barrier.wait(PATIENCE)
        return values


def on_every_rank(size: int, work: Callable[[Group], T]) -> list[T]:
    """What `work` returns on each of `size` ranks."""
    values: list[torch.Tensor | None] = [None] * size
    barrier = threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        groups = [ThreadGroup(rank, values, barrier) for rank in range(size)]
        return list(pool.map(work, groups))
