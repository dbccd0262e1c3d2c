"""The weights of a `Decoder` and the tensors that each is made from."""

from __future__ import annotations

from typing import NamedTuple

from tridentlm.models.config import Experts, ModelConfig, Shape
from tridentlm.models.shard import Shard, Split

WHOLE = Shard()


class Part(NamedTuple):
    """A tensor's name in the Hugging Face layout, the whole shape that it must have there, and how
    ranks share it (None: each holds all of it)."""

    name: str
    shape: Shape
    split: Split | None = None


def layout(config: ModelConfig) -> dict[str, list[Part]]:
    """Each weight of the decoder and the tensors that it is stacked from, along dimension 0.

    `config` is the whole model's. A rank stacks its shares of the parts.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    rows = Split(0, vocab)
    weights: dict[str, list[Part]] = {
        "embedding": [Part("model.embed_tokens.weight", (vocab, hidden), rows)],
        "norm": [Part("model.norm.weight", (hidden,))],
    }
    if not config.tied_head:
        weights["head"] = [Part("lm_head.weight", (vocab, hidden), rows)]
    for index in range(config.num_layers):
        for name, parts in _layer_layout(config, index).items():
            prefixed = [part._replace(name=f"model.layers.{index}.{part.name}") for part in parts]
            weights[f"layers.{index}.{name}"] = prefixed
    return weights


def is_linear(name: str) -> bool:
    """Whether `name` is the weight of a linear layer, which may be quantized."""
    return name.endswith(".weight") and ".experts" not in name


def _layer_layout(config: ModelConfig, index: int) -> dict[str, list[Part]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    heads, kv_heads = Split(0, config.num_heads), Split(0, config.num_kv_heads)
    qkv = (("q", queries, heads), ("k", keys, kv_heads), ("v", keys, kv_heads))
    layer: dict[str, list[Part]] = {
        "attention_norm": [Part("input_layernorm.weight", (hidden,))],
        "mlp_norm": [Part("post_attention_layernorm.weight", (hidden,))],
        "qkv.weight": [Part(f"self_attn.{n}_proj.weight", (r, hidden), s) for n, r, s in qkv],
        "output.weight": [
            Part("self_attn.o_proj.weight", (hidden, queries), Split(1, config.num_heads))
        ],
    }
    if config.family.qk_norm:
        layer |= {f"{n}_norm": [Part(f"self_attn.{n}_norm.weight", (head_dim,))] for n in "qk"}
    if config.qkv_bias:
        layer["qkv.bias"] = [Part(f"self_attn.{n}_proj.bias", (r,), s) for n, r, s in qkv]
    if config.output_bias:
        # Added to a sum over ranks, by the first alone.
        layer["output.bias"] = [Part("self_attn.o_proj.bias", (hidden,))]
    if config.experts is not None and index in config.experts.layers:
        return layer | _expert_layout(config.experts, hidden)
    return layer | _mlp_layout("mlp", config.intermediate_size, hidden)


def _mlp_layout(prefix: str, inner: int, hidden: int) -> dict[str, list[Part]]:
    sides = [f"{prefix}.{name}_proj.weight" for name in ("gate", "up")]
    return {
        "gate_up.weight": [Part(name, (inner, hidden), Split(0, inner)) for name in sides],
        "down.weight": [Part(f"{prefix}.down_proj.weight", (hidden, inner), Split(1, inner))],
    }


def _expert_layout(experts: Experts, hidden: int) -> dict[str, list[Part]]:
    """All experts' rows lie one expert after another, each expert's as those of a plain MLP."""
    layer = {"router": [Part("mlp.gate.weight", (experts.count, hidden))]}
    for expert in range(experts.count):
        parts = _mlp_layout(f"mlp.experts.{expert}", experts.size, hidden)
        for name, added in parts.items():
            layer.setdefault(f"experts_{name}", []).extend(added)
    return layer
