"""Matrix products by the algorithms that were the fastest when they were timed at the start.

The sizes of a decode step are few and known: those of the CUDA Graphs. So before a graph is
captured, each of its products tries the algorithms that the library has for it, on the layer's own
weight, read from memory and not from the cache; the capture then takes the winner.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection

import torch

from tridentlm.backends.cublaslt import Algorithm, LtProduct, Scales

ALIGNED = 256
"""Bytes: the library names algorithms for matrices that are laid out like this."""

CANDIDATES = 8
REPEATS = 7
FLUSHED_BYTES = 256 * 2**20
"""Written between two runs: several times an H200's cache of 60 MB."""

Choice = tuple[LtProduct, Algorithm]


class TunedProducts:
    """Products of so many rows as are in `rows`; of other sizes it has none."""

    def __init__(self, rows: Collection[int]) -> None:
        self._rows = frozenset(rows)
        self._chosen: dict[tuple[int, torch.Size, torch.dtype], Choice] = {}

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, scales: Scales | None = None
    ) -> torch.Tensor | None:
        """x @ weight.T, or None: to be computed by other means.

        The first call for a size times the candidates, unless a graph is being captured.
        """
        if len(x) not in self._rows or x.data_ptr() % ALIGNED or weight.data_ptr() % ALIGNED:
            return None
        key = (len(x), weight.shape, weight.dtype)
        if key not in self._chosen:
            if torch.cuda.is_current_stream_capturing():
                return None
            self._chosen[key] = _fastest(x, weight, scales)
        product, algorithm = self._chosen[key]
        return product.run(algorithm, x, weight, scales)


def _fastest(x: torch.Tensor, weight: torch.Tensor, scales: Scales | None) -> Choice:
    outputs, inputs = weight.shape
    product = LtProduct(len(x), outputs, inputs, weight.dtype, x.device)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=x.device)
    spent: list[float] = []
    algorithms = product.algorithms(CANDIDATES)
    for algorithm in algorithms:
        events = []
        for _ in range(REPEATS):
            start, stop = _event(), _event()
            flushed.zero_()  # long enough, too, for the host to get ahead of the device
            start.record()
            product.run(algorithm, x, weight, scales)
            stop.record()
            events.append((start, stop))
        torch.cuda.synchronize(x.device)
        spent.append(statistics.median(start.elapsed_time(stop) for start, stop in events))
    return product, algorithms[spent.index(min(spent))]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
