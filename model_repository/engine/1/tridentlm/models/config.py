"""What a decoder looks like: `ModelConfig`, from a Hugging Face config.json or GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tridentlm.errors import InvalidRequest, ModelNotFound
from tridentlm.models.families import Family, family_of, gguf_family
from tridentlm.models.quant import Quantization
from tridentlm.models.refusals import GGUF_NEUTRAL, HF_NEUTRAL, refuse_unknown
from tridentlm.models.rope import Rope

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts in `layers`: `per_token` of `count` experts of inner size `size`.

    `normalized`: the chosen experts' weights add up to 1.
    """

    count: int
    per_token: int
    size: int
    normalized: bool
    layers: frozenset[int]

    def __post_init__(self) -> None:
        if self.per_token > self.count:
            raise InvalidRequest(
                f"{self.per_token} of {self.count} experts cannot be chosen.", param="model"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder.

    `window`: tokens that the layers `windowed_layers` attend to, the token itself included.
    `is_wrapped`: the decoder is one part of a larger model.
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
    rope: Rope
    max_position_embeddings: int
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    window: int
    windowed_layers: frozenset[int]
    experts: Experts | None
    is_wrapped: bool
    quantization: Quantization | None = None

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
        """From the fields of config.json, in the spelling of transformers 4 or 5.

        Of a model that wraps a language model (`text_config`), this is the language model.
        """
        is_wrapped = isinstance(values.get("text_config"), Mapping)
        if is_wrapped:
            # Either level may have these: what older wrappers left to the language model.
            both, values = (values, values["text_config"]), values["text_config"]
            names = ("tie_word_embeddings", "quantization_config")
            values = {**values, **{name: _any(both, name) for name in names}}
        family = family_of((values.get("architectures") or [None])[0], values.get("model_type"))
        refuse_unknown(values, HF_NEUTRAL)
        heads, hidden = (_integer(values, n) for n in ("num_attention_heads", "hidden_size"))
        kv_heads, layers = values.get("num_key_value_heads"), _integer(values, "num_hidden_layers")
        head_dim = int(values.get("head_dim") or hidden // heads)
        bias = family.attention_bias == "config" and bool(values.get("attention_bias"))
        window, windowed_layers = _window(family, values, layers)
        rope = Rope.from_hf(values, head_dim)
        return cls(
            family=family,
            vocab_size=_integer(values, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(values, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else int(kv_heads),
            head_dim=head_dim,
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope=rope,
            max_position_embeddings=max(
                _integer(values, "max_position_embeddings"), rope.max_positions
            ),
            tied_head=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=bias or family.attention_bias == "qkv",
            output_bias=bias,
            window=window,
            windowed_layers=windowed_layers,
            experts=_experts(values, layers) if family.has_experts else None,
            is_wrapped=is_wrapped,
            quantization=Quantization.from_hf(values.get("quantization_config")),
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
        if "token_embd.weight" not in shapes:
            raise InvalidRequest("The GGUF file holds no token embedding.", param="model")
        family = gguf_family(name)
        values = {k.removeprefix(name + "."): v for k, v in metadata.items()}
        heads, hidden = (_integer(values, n) for n in ("attention.head_count", "embedding_length"))
        layers, longest = (_integer(values, n) for n in ("block_count", "context_length"))
        head_dim = int(values.get("attention.key_length") or hidden // heads)
        _refuse_gguf_variants(values, longest, family)
        rope = Rope.from_gguf(values, head_dim, rope_factors)
        return cls(
            family=family,
            vocab_size=shapes["token_embd.weight"][0],
            hidden_size=hidden,
            intermediate_size=_integer(values, "feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(values.get("attention.head_count_kv", heads)),
            head_dim=head_dim,
            rms_norm_eps=float(values.get("attention.layer_norm_rms_epsilon", 1e-6)),
            rope=rope,
            max_position_embeddings=max(longest, rope.max_positions),
            tied_head="output.weight" not in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            output_bias="blk.0.attn_output.bias" in shapes,
            window=0,
            windowed_layers=frozenset(),
            experts=_gguf_experts(values, shapes, layers) if family.has_experts else None,
            is_wrapped=False,
        )


def _any(places: Iterable[Mapping[str, Any]], name: str) -> Any:
    return next(filter(None, (values.get(name) for values in places)), None)


def _window(family: Family, values: Mapping[str, Any], layers: int) -> tuple[int, frozenset[int]]:
    """The window and the layers that have it: by `layer_types`, else by the family's rule."""
    switched_off = family.window_switch and not values.get("use_sliding_window")
    size = values.get("sliding_window", family.default_window) or 0
    window = 0 if switched_off else int(size)
    if family.window == "none" and (window or values.get("use_sliding_window")):
        raise InvalidRequest(
            f"sliding_window in config.json is not supported for {family.architecture}.",
            param="model",
        )
    first = int(values.get("max_window_layers", 28)) if family.window == "upper" else 0
    windowed = frozenset(range(first, layers)) if window else frozenset()
    types = values.get("layer_types")
    if types:
        sliding = frozenset(i for i, kind in enumerate(types) if kind == "sliding_attention")
        can_choose = family.window == "upper" and window
        if (
            set(types) - {"full_attention", "sliding_attention"}
            or len(types) != layers
            or not (can_choose or sliding == windowed)
        ):
            raise InvalidRequest("layer_types in config.json is not supported.", param="model")
        windowed = sliding
    return (window, windowed) if windowed else (0, windowed)


def _experts(values: Mapping[str, Any], layers: int) -> Experts | None:
    count = int(values.get("num_experts") or values.get("num_local_experts") or 0)
    step = int(values.get("decoder_sparse_step", 1))
    dense = set(values.get("mlp_only_layers") or ())
    sparse = frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if not count or not sparse:
        return None
    return Experts(
        count=count,
        per_token=_integer(values, "num_experts_per_tok"),
        size=_integer(values, "moe_intermediate_size"),
        normalized=bool(values.get("norm_topk_prob", False)),
        layers=sparse,
    )


def _refuse_gguf_variants(values: Mapping[str, Any], longest: int, family: Family) -> None:
    refuse_unknown(values, GGUF_NEUTRAL)
    window = int(values.get("attention.sliding_window", 0))
    if 0 < window < longest:
        raise InvalidRequest("attention.sliding_window in GGUF is not supported.", param="model")
    if values.get("expert_count") and not family.has_experts:
        raise InvalidRequest(
            f"Experts in a GGUF file of architecture {family.gguf_architecture!r} are not "
            "supported.",
            param="model",
        )


def _gguf_experts(values: Mapping[str, Any], shapes: Mapping[str, Shape], layers: int) -> Experts:
    sparse = frozenset(i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" in shapes)
    # llama.cpp computes its architecture qwen3moe so, whatever the metadata say.
    return Experts(
        count=_integer(values, "expert_count"),
        per_token=_integer(values, "expert_used_count"),
        size=_integer(values, "expert_feed_forward_length"),
        normalized=True,
        layers=sparse,
    )


def _integer(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or value < 1:
        raise InvalidRequest(
            f"The model's configuration has no usable {name!r} ({value!r}).", param="model"
        )
    return value
