"""A step's arrays on their way to the device: packed in pinned memory, sent in one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 32
"""Words that a field starts at a multiple of: kernels load 16 bytes at a time."""


@dataclass(frozen=True, slots=True)
class Field:
    """A place in the buffer: 32-bit words at a fixed offset. `shape` is its full size."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Layout = Mapping[str, Field]


def make_layout(fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Field]:
    """Places fields, given as (shape, 32-bit dtype), one after another."""
    layout: dict[str, Field] = {}
    offset = 0
    for name, (shape, dtype) in fields.items():
        layout[name] = Field(offset, shape, dtype)
        offset += -(-layout[name].size // ALIGNMENT) * ALIGNMENT
    return layout


class Staging:
    """One buffer on the device, and pinned ones that take turns.

    The copy of step k + 1 waits on the device for step k, so its pinned buffer must not be the one
    that the host fills for step k + 2: each is refilled only when its last copy is done.

        host    fill A | fill B | wait for A's copy, fill A | ...
        device  A -> buffer, step | B -> buffer, step | A -> ...
    """

    def __init__(self, words: int, device: torch.device, turns: int = 2) -> None:
        self._buffer = torch.zeros(words, dtype=torch.int32, device=device)
        self._pinned = [
            torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(turns)
        ]
        self._hosts = [pinned.numpy() for pinned in self._pinned]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(turns)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def view(self, field: Field) -> torch.Tensor:
        """The field on the device."""
        words = self._buffer[field.offset : field.offset + field.size]
        return words.view(field.dtype).view(field.shape)

    def send(self, layout: Layout, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copies each array to the start of its field; what lies between is undefined.

        A two-dimensional array fills the upper left corner of its field.
        """
        self._turn = (self._turn + 1) % len(self._pinned)
        self._copied[self._turn].synchronize()
        pinned, host = self._pinned[self._turn], self._hosts[self._turn]
        end = 0
        for name, array in arrays.items():
            field = layout[name]
            words = array.view(np.int32)
            if array.ndim == 2:
                stop = field.offset + len(array) * field.shape[1]
                rows = host[field.offset : stop].reshape(-1, field.shape[1])
                rows[:, : array.shape[1]] = words
            else:
                stop = field.offset + len(array)
                host[field.offset : stop] = words
            end = max(end, stop)
        self._buffer[:end].copy_(pinned[:end], non_blocking=True)
        self._copied[self._turn].record()
