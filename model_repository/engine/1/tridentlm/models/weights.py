"""From the tensors of a file to the merged weights of a `Decoder`, checked one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tridentlm.errors import InvalidRequest, ModelNotFound
from tridentlm.models.config import ModelConfig, Shape

Part = tuple[str, Shape]
"""A tensor's name in the Hugging Face layout and the shape it must have."""


def layout(config: ModelConfig) -> dict[str, list[Part]]:
    """Each weight of the decoder and the tensors that it is stacked from, along dimension 0."""
    hidden, vocab = config.hidden_size, config.vocab_size
    weights: dict[str, list[Part]] = {
        "embedding": [("model.embed_tokens.weight", (vocab, hidden))],
        "norm": [("model.norm.weight", (hidden,))],
    }
    if not config.tied_head:
        weights["head"] = [("lm_head.weight", (vocab, hidden))]
    for index in range(config.num_layers):
        for name, parts in _layer_layout(config).items():
            prefixed = [(f"model.layers.{index}.{part}", shape) for part, shape in parts]
            weights[f"layers.{index}.{name}"] = prefixed
    return weights


def _layer_layout(config: ModelConfig) -> dict[str, list[Part]]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    qkv = (("q", queries), ("k", keys), ("v", keys))
    layer: dict[str, list[Part]] = {
        "attention_norm": [("input_layernorm.weight", (hidden,))],
        "mlp_norm": [("post_attention_layernorm.weight", (hidden,))],
        "qkv.weight": [(f"self_attn.{n}_proj.weight", (rows, hidden)) for n, rows in qkv],
        "output.weight": [("self_attn.o_proj.weight", (hidden, queries))],
        "gate_up.weight": [(f"mlp.{n}_proj.weight", (inner, hidden)) for n in ("gate", "up")],
        "down.weight": [("mlp.down_proj.weight", (hidden, inner))],
    }
    if config.family.qk_norm:
        layer |= {f"{n}_norm": [(f"self_attn.{n}_norm.weight", (head_dim,))] for n in "qk"}
    if config.qkv_bias:
        layer["qkv.bias"] = [(f"self_attn.{n}_proj.bias", (rows,)) for n, rows in qkv]
    if config.output_bias:
        layer["output.bias"] = [("self_attn.o_proj.bias", (hidden,))]
    return layer


def merge(
    config: ModelConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Streams `tensors` to `device` and stacks them into the weights of `layout`.

    Raises InvalidRequest naming the first missing, unknown or misshapen tensor.
    """
    wanted = layout(config)
    owners = {name: (key, shape) for key, parts in wanted.items() for name, shape in parts}
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    merged: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name not in owners:
            if _is_redundant(name):
                continue
            raise InvalidRequest(f"The model holds an unknown tensor {name!r}.", param="model")
        key, shape = owners.pop(name)
        if tuple(tensor.shape) != shape:
            raise InvalidRequest(
                f"Tensor {name!r} has shape {tuple(tensor.shape)}; the model's configuration "
                f"makes it {shape}.",
                param="model",
            )
        parts = waiting.setdefault(key, {})
        parts[name] = tensor.to(device=device, dtype=dtype)
        if len(parts) == len(wanted[key]):
            del waiting[key]
            stack = [parts[part] for part, _ in wanted[key]]
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
        for name, shape in parts:
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
