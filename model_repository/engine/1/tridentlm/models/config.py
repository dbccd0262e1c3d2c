"""What a decoder looks like: `ModelConfig`, from a Hugging Face config.json or GGUF metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tridentlm.errors import InvalidRequest, ModelNotFound

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs from the plain decoder. A new family is a row of `FAMILIES`.

    `attention_bias` "config": what config.json's `attention_bias` says. `gguf_permuted`: GGUF files
    store the rows of q and k in the order of interleaved rotary pairs.
    """

    architecture: str
    gguf_architecture: str
    qk_norm: bool = False
    attention_bias: Literal["config", "qkv", "none"] = "none"
    gguf_permuted: bool = False


FAMILIES = (
    Family("LlamaForCausalLM", "llama", attention_bias="config", gguf_permuted=True),
    Family("Qwen3ForCausalLM", "qwen3", qk_norm=True, attention_bias="config"),
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one dense decoder.

    `rope_factors`: what each of the head_dim / 2 rotary frequencies is divided by, or None.
    `eos_token_ids` are the config's own.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_factors: tuple[float, ...] | None
    max_position_embeddings: int
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise InvalidRequest(
                f"{self.num_heads} heads over {self.num_kv_heads} KV heads of size {self.head_dim} "
                "make no attention layer.",
                param="model",
            )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads `folder`/config.json. Raises ModelNotFound without one, InvalidRequest for a model
        that is not supported."""
        path = folder / "config.json"
        if not path.is_file():
            raise ModelNotFound(f"{folder} holds no config.json.", param="model")
        try:
            values = json.loads(path.read_text())
        except ValueError as error:
            raise InvalidRequest(f"{path} is not valid JSON: {error}.", param="model") from None
        return cls.from_hf(values)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ModelConfig:
        """From the fields of config.json, in the spelling of transformers 4 or 5."""
        family = _family(values)
        heads = _integer(values, "num_attention_heads")
        hidden = _integer(values, "hidden_size")
        kv_heads = values.get("num_key_value_heads")
        _refuse_variants(values)
        head_dim = int(values.get("head_dim") or hidden // heads)
        theta, factors = _rope(values, head_dim)
        bias = family.attention_bias == "config" and bool(values.get("attention_bias"))
        return cls(
            family=family,
            vocab_size=_integer(values, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(values, "intermediate_size"),
            num_layers=_integer(values, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else int(kv_heads),
            head_dim=head_dim,
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_factors=factors,
            max_position_embeddings=_integer(values, "max_position_embeddings"),
            tied_head=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=bias or family.attention_bias == "qkv",
            output_bias=bias,
            eos_token_ids=token_ids(values.get("eos_token_id")),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, Shape],
        rope_factors: tuple[float, ...] | None,
    ) -> ModelConfig:
        """From a GGUF file's scalar metadata, its tensors' shapes (as in torch), rope_freqs."""
        name = str(metadata.get("general.architecture"))
        family = next((f for f in FAMILIES if f.gguf_architecture == name), None)
        if family is None:
            known = ", ".join(f.gguf_architecture for f in FAMILIES)
            raise InvalidRequest(
                f"GGUF architecture {name!r} is not supported. Supported: {known}.", param="model"
            )
        values = {k.removeprefix(name + "."): v for k, v in metadata.items()}
        heads = _integer(values, "attention.head_count")
        hidden = _integer(values, "embedding_length")
        head_dim = int(values.get("attention.key_length") or hidden // heads)
        if values.get("rope.scaling.type", "none") != "none":
            raise _unsupported_rope(values["rope.scaling.type"])
        if values.get("rope.dimension_count", head_dim) != head_dim:
            raise _unsupported_rope("partial")
        return cls(
            family=family,
            vocab_size=shapes["token_embd.weight"][0],
            hidden_size=hidden,
            intermediate_size=_integer(values, "feed_forward_length"),
            num_layers=_integer(values, "block_count"),
            num_heads=heads,
            num_kv_heads=int(values.get("attention.head_count_kv", heads)),
            head_dim=head_dim,
            rms_norm_eps=float(values.get("attention.layer_norm_rms_epsilon", 1e-6)),
            rope_theta=float(values.get("rope.freq_base", 10000.0)),
            rope_factors=rope_factors,
            max_position_embeddings=_integer(values, "context_length"),
            tied_head="output.weight" not in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            output_bias="blk.0.attn_output.bias" in shapes,
            eos_token_ids=token_ids(metadata.get("tokenizer.ggml.eos_token_id"))
            | token_ids(metadata.get("tokenizer.ggml.eot_token_id")),
        )


def token_ids(value: Any) -> frozenset[int]:
    """A config's `eos_token_id`, which is an id, a list of ids, or absent."""
    if value is None:
        return frozenset()
    return (
        frozenset(map(int, value)) if isinstance(value, (list, tuple)) else frozenset({int(value)})
    )


def _family(values: Mapping[str, Any]) -> Family:
    names = values.get("architectures") or [values.get("model_type")]
    for family in FAMILIES:
        if family.architecture in names:
            return family
    known = ", ".join(f.architecture for f in FAMILIES)
    raise InvalidRequest(
        f"Architecture {names[0]!r} is not supported. Supported: {known}.", param="model"
    )


def _refuse_variants(values: Mapping[str, Any]) -> None:
    if values.get("hidden_act", "silu") != "silu":
        raise InvalidRequest(
            f"Activation {values['hidden_act']!r} is not supported, only 'silu'.", param="model"
        )
    for switch in ("mlp_bias", "use_sliding_window", "quantization_config"):
        if values.get(switch):
            raise InvalidRequest(f"{switch} in config.json is not supported.", param="model")
    if set(values.get("layer_types") or ()) - {"full_attention"}:
        raise InvalidRequest("Only full attention is supported in layer_types.", param="model")


def _rope(values: Mapping[str, Any], head_dim: int) -> tuple[float, tuple[float, ...] | None]:
    # transformers 5 keeps theta and scaling in `rope_parameters`; 4 had `rope_theta` and
    # `rope_scaling` (whose type was spelled `type` before `rope_type`).
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0)
    if any(float(v.get("partial_rotary_factor") or 1.0) != 1.0 for v in (values, rope)):
        raise _unsupported_rope("partial")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "llama3":
        return theta, _llama3_factors(rope, theta, head_dim)
    raise _unsupported_rope(kind)


def _llama3_factors(rope: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """Llama 3.1's scaling: frequencies that turn seldom over the original context are divided by
    `factor`, those that turn often are kept, and those between are blended."""
    factor, low, high = (
        float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = int(rope["original_max_position_embeddings"])
    factors = []
    for index in range(head_dim // 2):
        turns = original * theta ** (-2 * index / head_dim) / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / (kept + (1 - kept) / factor))
    return tuple(factors)


def _unsupported_rope(kind: str) -> InvalidRequest:
    return InvalidRequest(
        f"Rotary embedding of type {kind!r} is not supported. Supported: default, llama3.",
        param="model",
    )


def _integer(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or value < 1:
        raise InvalidRequest(
            f"The model's configuration has no usable {name!r} ({value!r}).", param="model"
        )
    return value
