"""One decoder for all dense families: the token ids of a step in, hidden states out.

ids -> embedding -> [ norm -> qkv -> (q/k norm) -> rotary -> attention -> o -> +
                      norm -> gate_up -> silu * -> down -> + ] x layers -> hidden
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
import torch.nn.functional as F

from tridentlm.backends.base import StepAttention
from tridentlm.models.config import ModelConfig
from tridentlm.models.linear import Linear

Weights = MutableMapping[str, torch.Tensor]
"""Merged weights by the names of `weights.layout`. The decoder takes each out as it uses it."""


class Decoder:
    """Holds the weights; all state of a step is in the arguments of `forward`."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._embedding = weights.pop("embedding")
        self._layers = [_Layer(config, weights, index) for index in range(config.num_layers)]
        self._norm = weights.pop("norm")
        self._head = Linear(self._embedding if config.tied_head else weights.pop("head"))
        self._frequencies = rotary_frequencies(config).to(self._embedding.device)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """token_ids, positions: integers [T]. Returns the last layer's output [T, hidden_size]."""
        x = F.embedding(token_ids, self._embedding)
        rotation = self._rotation(positions, x.dtype)
        for layer in self._layers:
            x = layer.forward(x, rotation, attention)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head for the rows that sample: [S, hidden_size] -> [S, vocab_size]."""
        return self._head(_rms_norm(hidden, self._norm, self.config.rms_norm_eps))

    def _rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> _Rotation:
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        # The first half of a head is rotated by -sin, the second by +sin.
        both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return both[0].to(dtype)[:, None], both[1].to(dtype)[:, None]


_Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and signed sin of a step's positions, [T, 1, head_dim] each."""


class _Layer:
    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        def linear(name: str) -> Linear:
            bias = weights.pop(f"layers.{index}.{name}.bias", None)
            return Linear(weights.pop(f"layers.{index}.{name}.weight"), bias)

        self._index = index
        self._eps = config.rms_norm_eps
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._attention_norm = weights.pop(f"layers.{index}.attention_norm")
        self._mlp_norm = weights.pop(f"layers.{index}.mlp_norm")
        self._qk_norm: torch.Tensor | None = None
        if config.family.qk_norm:
            q, k = (weights.pop(f"layers.{index}.{name}_norm") for name in "qk")
            self._qk_norm = torch.cat((q.expand(self._heads, -1), k.expand(self._kv_heads, -1)))
        self._qkv, self._output = linear("qkv"), linear("output")
        self._gate_up, self._down = linear("gate_up"), linear("down")

    def forward(
        self, x: torch.Tensor, rotation: _Rotation, attention: StepAttention
    ) -> torch.Tensor:
        x = x + self._attend(_rms_norm(x, self._attention_norm, self._eps), rotation, attention)
        gate, up = self._gate_up(_rms_norm(x, self._mlp_norm, self._eps)).chunk(2, -1)
        return x + self._down(F.silu(gate).mul_(up))

    def _attend(
        self, x: torch.Tensor, rotation: _Rotation, attention: StepAttention
    ) -> torch.Tensor:
        # q and k heads lie side by side, so norm and rotation treat them as one tensor.
        qkv = self._qkv(x).view(len(x), self._heads + 2 * self._kv_heads, self._head_dim)
        rotated = self._heads + self._kv_heads
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if self._qk_norm is not None:
            qk = _rms_norm(qk, self._qk_norm, self._eps)
        qk = _rotate(qk, rotation)
        q, k = qk[:, : self._heads], qk[:, self._heads :]
        return self._output(attention.attend(self._index, q, k, v))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm over the last dimension, in float32 (Zhang and Sennrich, 2019)."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def _rotate(x: torch.Tensor, rotation: _Rotation) -> torch.Tensor:
    """Rotary embedding of x [T, heads, head_dim], pairs (i, i + head_dim / 2) (Su et al., 2021)."""
    cos, signed_sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def rotary_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_factors is None:
        return frequencies
    return frequencies / torch.tensor(config.rope_factors, dtype=torch.float32)
