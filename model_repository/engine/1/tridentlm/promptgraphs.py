"""CUDA Graphs for steps with few tokens of prompts, which the host would launch for longer than the
device computes them.

Attention is planned by the step's rows, so no graph can hold it. What lies between one layer's
attention and the next's depends on the number of tokens alone: a graph of each part serves all
steps of up to so many tokens.

    | embedding .. qkv | attention | output .. MLP .. qkv | attention | ... | attention | the rest
      graph 0            launched    graph 1                launched           launched

Tokens beyond the step's own are computed and read by nobody.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from tridentlm.backends.base import StepAttention
from tridentlm.models.decoder import Decoder

BETWEEN_SIZES = 64
"""A kernel of 64 tokens takes hardly longer than one of fewer."""


class Graph(Protocol):
    """What `torch.cuda.CUDAGraph` is here."""

    def replay(self) -> None: ...


def token_sizes(largest: int) -> list[int]:
    """The numbers of tokens that get graphs."""
    return [*range(BETWEEN_SIZES, largest, BETWEEN_SIZES), largest] if largest else []


class PromptGraphs:
    """`Decoder.forward` for steps of up to `sizes[-1]` tokens.

    sizes: ascending. The buffers are of the decoder's device and `dtype`, and serve steps in turn.
    """

    def __init__(
        self, decoder: Decoder, sizes: list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        config, self._decoder, self._sizes = decoder.config, decoder, sizes
        self.largest = max([0, *sizes])

        def buffer(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(self.largest, *size, dtype=dtype, device=device)

        heads = config.num_heads + 2 * config.num_kv_heads
        self._ids = buffer(dtype=torch.int32)
        self._x, self._qkv = buffer(config.hidden_size), buffer(heads, config.head_dim)
        self.attended = buffer(config.num_heads * config.head_dim)
        self._graphs: dict[int, list[Graph]] = {}

    def capture(self, new_graph: Callable[[Callable[[], None]], Graph]) -> None:
        """Captures all of them by `new_graph`, which is given what a graph is to hold."""
        for size in reversed(self._sizes):
            parts = [partial(self._begin, size)]
            for layer in range(self._decoder.config.num_layers - 1):
                parts.append(partial(self._go_on, size, layer))
            self._graphs[size] = [new_graph(part) for part in parts]

    def forward(
        self, token_ids: torch.Tensor, attention: StepAttention, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """See `Decoder.forward`. `attention` leaves its results in the first of `attended`."""
        count, decoder = len(token_ids), self._decoder
        graphs = self._graphs[self._sizes[bisect.bisect_left(self._sizes, count)]]
        x, qkv = self._x[:count], self._qkv[:count]
        self._ids[:count].copy_(token_ids)
        graphs[0].replay()
        for layer, graph in enumerate(graphs[1:]):
            decoder.attend(layer, qkv, attention)
            graph.replay()
        return decoder.end(x, decoder.attend(len(graphs) - 1, qkv, attention), rows)

    def _begin(self, size: int) -> None:
        self._keep(*self._decoder.begin(self._ids[:size]))

    def _go_on(self, size: int, layer: int) -> None:
        self._keep(*self._decoder.go_on(layer, self._x[:size], self.attended[:size]))

    def _keep(self, x: torch.Tensor, qkv: torch.Tensor) -> None:
        if x.data_ptr() != self._x.data_ptr():  # most operations have changed it in place
            self._x[: len(x)].copy_(x)
        self._qkv[: len(qkv)].copy_(qkv)
