"""One decoder for all families: the token ids of a step in, hidden states out.

ids -> embedding -> [ norm -> qkv -> (q/k norm) -> rotary -> attention -> o -> +
                      norm -> gate_up -> silu * -> down, or experts -> + ] x layers -> hidden

Of several ranks, each holds its ids of the vocabulary, its heads and its part of every MLP, and
what embedding, o and down (or the experts) give on each is summed over all.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
import torch.nn.functional as F

from tridentlm.backends.base import Ops, StepAttention
from tridentlm.backends.torch import TorchOps
from tridentlm.models.config import ModelConfig
from tridentlm.models.fp8 import Fp8Linear, after_norm, after_silu, make_linear
from tridentlm.models.linear import Linear
from tridentlm.models.moe import ExpertBlock
from tridentlm.parallel.group import Group

Weights = MutableMapping[str, torch.Tensor]
"""Merged weights by the names of `weights.layout`. The decoder takes each out as it uses it."""


class Decoder:
    """Holds the weights; all state of a step is in the arguments of `forward`.

    Of several ranks, `config` (but for the vocabulary) and `weights` are this one's part.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops | None = None,
        group: Group | None = None,
    ) -> None:
        self.config = config
        self.group = group or Group()
        self._ops = ops or TorchOps()
        self._embedding = weights.pop("embedding")
        self._first_id = self.group.shard.interval(config.vocab_size)[0]
        self._layers = [
            _Layer(config, weights, index, self._ops, self.group)
            for index in range(config.num_layers)
        ]
        self._norm = weights.pop("norm")
        head = self._embedding if config.tied_head else weights.pop("head")
        self._head = Linear(head, None, self._ops.linear)

    def forward(
        self, token_ids: torch.Tensor, attention: StepAttention, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The last layer's output for `rows` [S] of the tokens (None: all), [S, hidden_size].

        token_ids: integers [T]. The last layer leaves out what the other tokens do not need.
        """
        x, qkv = self.begin(token_ids)
        for layer in range(self.config.num_layers - 1):
            x, qkv = self.go_on(layer, x, self.attend(layer, qkv, attention))
        return self.end(x, self.attend(self.config.num_layers - 1, qkv, attention), rows)

    # Its parts, between which attention lies: what they compute depends on their inputs alone.

    def begin(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The embeddings [T, hidden_size], and the first layer's q, k and v [T, all heads,
        head_dim]."""
        return self._layers[0].enter(self._embed(token_ids), None)

    def attend(self, layer: int, qkv: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        """[T, heads * head_dim]."""
        return attention.attend(layer, qkv, self._layers[layer].qk_norm)

    def go_on(
        self, layer: int, x: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From what `layer` has attended to, to the next one's input and q, k and v.

        x: the layer's own input.
        """
        return self._layers[layer + 1].enter(*self._layers[layer].leave(x, attended))

    def end(
        self, x: torch.Tensor, attended: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """The last layer's output for `rows`."""
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        x, delta = self._layers[-1].leave(x, attended)
        return x + delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head for the rows that sample: [S, hidden_size] -> [S, vocab_size]."""
        part = self._head(self._ops.rms_norm(hidden, self._norm, self.config.rms_norm_eps))
        return self.group.gather(part, self.config.vocab_size)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.group.shard.size == 1:
            return F.embedding(token_ids, self._embedding)
        ids = token_ids - self._first_id
        elsewhere = (ids < 0) | (ids >= len(self._embedding))
        x = F.embedding(ids.masked_fill(elsewhere, 0), self._embedding)
        return self.group.all_reduce(x.masked_fill_(elsewhere[:, None], 0))


class _Layer:
    """One layer. What it adds to its input is added by the next, which fuses that with its norm."""

    def __init__(
        self, config: ModelConfig, weights: Weights, index: int, ops: Ops, group: Group
    ) -> None:
        dtype = weights[f"layers.{index}.attention_norm"].dtype

        def linear(name: str) -> Linear | Fp8Linear:
            bias = weights.pop(f"layers.{index}.{name}.bias", None)
            if name == "output" and not group.is_leader:
                bias = None  # the sum over ranks holds it once
            return make_linear(weights, f"layers.{index}.{name}.", bias, dtype, ops)

        self._ops, self._group = ops, group
        self._eps = config.rms_norm_eps
        self._all_heads = config.num_heads + 2 * config.num_kv_heads
        self._head_dim = config.head_dim
        self._attention_norm = weights.pop(f"layers.{index}.attention_norm")
        self._mlp_norm = weights.pop(f"layers.{index}.mlp_norm")
        self.qk_norm: torch.Tensor | None = None
        if config.family.qk_norm:
            q, k = (weights.pop(f"layers.{index}.{name}_norm") for name in "qk")
            both = q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)
            self.qk_norm = torch.cat(both)
        self._qkv, self._output = linear("qkv"), linear("output")
        self._experts: ExpertBlock | None = None
        if config.experts is not None and index in config.experts.layers:
            stacks = (
                weights.pop(f"layers.{index}.experts_{n}.weight") for n in ("gate_up", "down")
            )
            gate_up, down = (x.view(config.experts.count, -1, x.shape[1]) for x in stacks)
            router = weights.pop(f"layers.{index}.router")
            self._experts = ExpertBlock(config.experts, router, gate_up, down, ops)
        else:
            self._gate_up, self._down = linear("gate_up"), linear("down")

    def enter(
        self, x: torch.Tensor, delta: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's input x + delta, and its q, k and v [T, all heads, head_dim]."""
        if delta is None:
            qkv = self._qkv(self._ops.rms_norm(x, self._attention_norm, self._eps))
        else:
            x, qkv = after_norm(self._qkv, self._ops, x, delta, self._attention_norm, self._eps)
        return x, qkv.view(len(x), self._all_heads, self._head_dim)

    def leave(self, x: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output is the sum of what is returned."""
        delta = self._group.all_reduce(self._output(attended))
        x, delta = self._mlp(x, delta)
        return x, self._group.all_reduce(delta)

    def _mlp(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._experts is not None:
            x, normed = self._ops.add_rms_norm(x, delta, self._mlp_norm, self._eps)
            return x, self._experts(normed)
        x, gate_up = after_norm(self._gate_up, self._ops, x, delta, self._mlp_norm, self._eps)
        return x, after_silu(self._down, self._ops, gate_up)
