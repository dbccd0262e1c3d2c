"""From the tensors of a file to the merged weights of a `Decoder`, checked one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from tridentlm.errors import InvalidRequest, ModelNotFound
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


def merge(
    config: ModelConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
) -> dict[str, torch.Tensor]:
    """Streams `shard`'s part of `tensors` to `device`, stacked into the weights of `layout`.

    Raises InvalidRequest naming the first missing, unknown or misshapen tensor.
    """
    wanted = layout(config)
    owners = {part.name: (key, part) for key, parts in wanted.items() for part in parts}
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    merged: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name not in owners:
            if _is_redundant(name):
                continue
            raise InvalidRequest(f"The model holds an unknown tensor {name!r}.", param="model")
        key, part = owners.pop(name)
        if tuple(tensor.shape) != part.shape:
            raise InvalidRequest(
                f"Tensor {name!r} has shape {tuple(tensor.shape)}; the model's configuration "
                f"makes it {part.shape}.",
                param="model",
            )
        parts = waiting.setdefault(key, {})
        parts[name] = shard.take(tensor, part.shape, part.split).to(device=device, dtype=dtype)
        if len(parts) == len(wanted[key]):
            del waiting[key]
            stack = [parts[part.name] for part in wanted[key]]
            merged[key] = stack[0] if len(stack) == 1 else torch.cat(stack)
    if owners:
        raise InvalidRequest(
            f"The model's files lack {len(owners)} tensors, first {next(iter(owners))!r}.",
            param="model",
        )
    return merged


def dummy(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields random weights in place of a file's, the same ones for one device and dtype.

    Norms are 1, biases 0 and matrices small, so that activations neither vanish nor overflow.
    """
    generator = torch.Generator(device).manual_seed(0)
    for parts in layout(config).values():
        for name, shape, _ in parts:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            if len(shape) == 2:
                yield name, tensor.normal_(0, 0.02, generator=generator)
            else:
                yield name, tensor.fill_(0 if name.endswith("bias") else 1)


def _is_redundant(name: str) -> bool:
    # Old checkpoints keep the rotary frequencies; tied ones may hold the head a second time.
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor of a Hugging Face folder by name; one is in memory at a time.

    Raises ModelNotFound without safetensors files, InvalidRequest for one that can't be read.
    """
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a mapping)
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InvalidRequest(f"{path} cannot be read: {error}.", param="model") from error


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelNotFound(f"{folder} lacks {missing[0]}, named by its index.", param="model")
        return [folder / name for name in names]
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ModelNotFound(
            f"{folder} holds no .safetensors files; other weight formats are not supported.",
            param="model",
        )
    return shards
