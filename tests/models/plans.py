"""Step plans made by hand: rows that grow chunk by chunk on shuffled pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tridentlm.core.plan import StepPlan


@dataclass(frozen=True)
class Chunk:
    """The next tokens of the sequence in `slot`, and whether the row samples after them."""

    slot: int
    tokens: Sequence[int]
    samples: bool = True


class PlanMaker:
    def __init__(self, num_pages: int, page_size: int, slots: int = 64) -> None:
        self._page_size = page_size
        self._free = np.random.default_rng(0).permutation(num_pages).tolist()
        self._pages: list[list[int]] = [[] for _ in range(slots)]
        self._lengths = [0] * slots

    def step(self, chunks: Sequence[Chunk], **sampling: Sequence[float]) -> StepPlan:
        """Plans one step of `chunks` in order. `sampling` sets arrays of the plan by name."""
        positions = []
        for chunk in chunks:
            start = self._lengths[chunk.slot]
            self._lengths[chunk.slot] += len(chunk.tokens)
            positions.append(np.arange(start, self._lengths[chunk.slot]))
            pages = self._pages[chunk.slot]
            while len(pages) * self._page_size < self._lengths[chunk.slot]:
                pages.append(self._free.pop())
        slots = [chunk.slot for chunk in chunks]
        tables = np.zeros((len(chunks), max(len(self._pages[s]) for s in slots)), np.int32)
        for row, slot in enumerate(slots):
            tables[row, : len(self._pages[slot])] = self._pages[slot]
        places = [
            tables[row, p // self._page_size] * self._page_size + p % self._page_size
            for row, p in enumerate(positions)
        ]
        contexts = np.array([self._lengths[slot] for slot in slots], np.int32)
        sampled = np.flatnonzero([chunk.samples for chunk in chunks])
        return StepPlan(
            step=0,
            slots=np.array(slots, np.int32),
            query_starts=np.cumsum([0, *map(len, positions)]).astype(np.int32),
            context_lens=contexts,
            block_tables=tables,
            token_ids=np.concatenate([chunk.tokens for chunk in chunks]).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            kv_slots=np.concatenate(places).astype(np.int64),
            sampled=sampled.astype(np.int32),
            sample_positions=contexts[sampled].astype(np.int64),
            **sampling_arrays(len(sampled), **sampling),
        )


def sampling_arrays(rows: int, **given: Sequence[float]) -> dict[str, np.ndarray]:
    """The plan's sampling arrays for `rows` rows: greedy and unfiltered, unless `given`."""
    fields = {
        "temperature": (0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1, np.float32),
        "min_p": (0, np.float32),
        "seeds": (0, np.uint64),
    }
    return {
        name: np.broadcast_to(np.array(given.get(name, default), dtype), rows).copy()
        for name, (default, dtype) in fields.items()
    }
