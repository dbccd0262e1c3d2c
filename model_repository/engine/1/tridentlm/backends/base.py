"""What a decoder needs from an attention backend, and the paged KV cache they share.

One layer's cache, for one of K and V. A token's `kv_slot` is its row in the flat view:

    page 0                page 1                 [num_pages, page_size, kv_heads, head_dim]
    | 0 | 1 | 2 | .. |15| |16 |17 | ..           kv_slot = page * page_size + offset

A row's block table lists its pages in the order of its tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tridentlm.core.plan import StepPlan
from tridentlm.models.config import ModelConfig


class KVCache:
    """K and V of every layer: [layers, 2, num_pages, page_size, kv_heads, head_dim].

    Zeroed, because attention multiplies what masked positions hold by 0, and 0 * nan is nan.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.data = torch.zeros(
            (config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim),
            dtype=dtype,
            device=device,
        )

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """Memory of one page over all layers, in bytes."""
        tokens = 2 * config.num_layers * page_size
        return tokens * config.num_kv_heads * config.head_dim * dtype.itemsize


class StepAttention(Protocol):
    """Attention of one step. It knows the step's rows and the KV cache."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores k, v [T, kv_heads, head_dim] and attends q [T, heads, head_dim] over each row's
        context, the stored tokens included. Returns [T, heads * head_dim]."""
        ...


class AttentionBackend(Protocol):
    def begin_step(self, plan: StepPlan) -> StepAttention:
        """Prepares what all layers of the step share."""
        ...
