"""What a decoder asks of its device, and the paged KV cache.

One layer's cache, for one of K and V. A token's `kv_slot` is its row in the flat view:

    page 0                page 1                 [num_pages, page_size, kv_heads, head_dim]
    | 0 | 1 | 2 | .. |15| |16 |17 | ..           kv_slot = page * page_size + offset

A row's block table lists its pages in the order of its tokens.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Protocol

import torch

from tridentlm.models.config import Experts, ModelConfig


class KVCache:
    """K and V of every layer: [layers, 2, num_pages, page_size, kv_heads, head_dim].

    With `heads_first`, a page is [kv_heads, page_size, head_dim]: a head's tokens lie together,
    which a GPU reads 1% faster. Zeroed, because attention multiplies what masked positions hold by
    0, and 0 * nan is nan.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        heads_first: bool = False,
    ) -> None:
        self.config = config
        self.num_pages, self.page_size = num_pages, page_size
        page = (page_size, config.num_kv_heads)
        shape = (config.num_layers, 2, num_pages, *(page[::-1] if heads_first else page))
        self.data = _zeros((*shape, config.head_dim), dtype, device)

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """Memory of one page over all layers, in bytes."""
        tokens = 2 * config.num_layers * page_size
        return tokens * config.num_kv_heads * config.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU their memory is taken as it is written to: to clear it takes seconds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    data = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=private)
    return torch.frombuffer(data, dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Rounded:
    """FP8 numbers that stand for values * scales: values e4m3 [T, n], scales float32 [T, 1]."""

    values: torch.Tensor
    scales: torch.Tensor


class Ops(Protocol):
    """The decoder's products and element-wise operations.

    Each may overwrite its inputs, weights excepted.
    """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root mean square norm of x [T, n] over the last dimension (Zhang and Sennrich, 2019)."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns x + delta and its norm, each [T, n]."""
        ...

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x @ weight.T + bias for x [T, in], weight [out, in]. Returns [T, out]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate_up [T, 2 * n], gate first. Returns [T, n]."""
        ...

    def round_rows(self, x: torch.Tensor, input_scale: torch.Tensor | None) -> Rounded:
        """x [T, n] in FP8: by input_scale, float32 [1], or by a scale of its own for each row."""
        ...

    def add_rms_norm_rounded(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        input_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Rounded]:
        """`add_rms_norm`, and `round_rows` of the norm."""
        ...

    def silu_mul_rounded(self, gate_up: torch.Tensor, input_scale: torch.Tensor | None) -> Rounded:
        """`round_rows` of `silu_mul`."""
        ...

    def scaled_linear(
        self, x: Rounded, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """x @ (weight * scale).T for weight e4m3 [out, in], scale float32 [out].

        On a device that multiplies e4m3 numbers of these sizes. Returns [T, out] in `dtype`.
        """
        ...

    def mix_experts(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        experts: Experts,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        """What the experts that each token likes best make of it, weighted. Returns [T, hidden].

        x [T, hidden], logits [T, experts], gate_up [experts, 2 * inner, hidden] with the gate
        first, down [experts, hidden, inner]. A token's result does not depend on its neighbours.
        """
        ...


class StepAttention(Protocol):
    """Attention of one step. It knows the step's rows, their positions and the KV cache."""

    def attend(self, layer: int, qkv: torch.Tensor, qk_norm: torch.Tensor | None) -> torch.Tensor:
        """Norms and rotates q and k, stores k and v, attends over each row's context.

        qkv [T, heads + 2 * kv_heads, head_dim], q first; qk_norm [heads + kv_heads, head_dim] holds
        the weights of the norm of each head, None: there is none. A row's context includes the
        step's own tokens. Returns [T, heads * head_dim].
        """
        ...
