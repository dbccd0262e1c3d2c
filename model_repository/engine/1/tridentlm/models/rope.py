"""How a model stretches its rotary embedding over a longer context than it was trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tridentlm.errors import InvalidRequest

ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
FIELDS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
KINDS = tuple(FIELDS)
GGUF_OTHERS = (
    "alpha",
    "attn_factor",
    "yarn_log_multiplier",
    "yarn_ext_factor",
    "yarn_attn_factor",
)
"""Fields below `rope.scaling` that change the rotation and are not known."""


@dataclass(frozen=True, slots=True)
class Rope:
    """`factors`: what each of the head_dim / 2 frequencies of base `theta` is divided by, or None.
    `magnitude`: what cos and sin are multiplied by. `max_positions`: the context that the scaling
    stretches to, 0 where it says none."""

    theta: float
    factors: tuple[float, ...] | None = None
    magnitude: float = 1.0
    max_positions: int = 0

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], head_dim: int) -> Rope:
        """From the fields of config.json, in the spelling of transformers 4 or 5.

        Raises InvalidRequest for a scaling, or a field of one, that is not known.
        """
        # transformers 5 keeps theta and scaling in `rope_parameters`; 4 had `rope_theta` and
        # `rope_scaling` (whose type was spelled `type` before `rope_type`).
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        theta = float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0)
        if any(float(v.get("partial_rotary_factor") or 1.0) != 1.0 for v in (values, rope)):
            raise unsupported("partial")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in KINDS:
            raise unsupported(kind)
        unknown = {k for k, v in rope.items() if v is not None} - FIELDS[kind] - ALWAYS
        if unknown:
            raise unsupported(f"{kind} with {', '.join(sorted(unknown))}")
        longest = values.get("max_position_embeddings")
        original = values.get("original_max_position_embeddings") or longest
        return cls.scaled(
            kind, {"original_max_position_embeddings": original} | dict(rope), theta, head_dim
        )

    @classmethod
    def from_gguf(
        cls, values: Mapping[str, Any], head_dim: int, factors: tuple[float, ...] | None
    ) -> Rope:
        """From GGUF metadata without its architecture's prefix, and the tensor `rope_freqs`.

        Raises InvalidRequest for a scaling that is not known.
        """
        theta = float(values.get("rope.freq_base", 10000.0))
        if values.get("rope.dimension_count", head_dim) != head_dim:
            raise unsupported("partial")
        kind = values.get("rope.scaling.type", "none")
        if kind not in ("none", "linear", "yarn"):
            raise unsupported(kind)
        if kind == "none":
            return cls(theta, factors)
        others = [name for name in GGUF_OTHERS if values.get(f"rope.scaling.{name}")]
        if factors is not None or others:
            raise unsupported(f"{kind} with {', '.join(others) or 'rope_freqs'}")
        rope = {
            "factor": values.get("rope.scaling.factor"),
            "original_max_position_embeddings": values.get(
                "rope.scaling.original_context_length", values.get("context_length")
            ),
            "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
        }
        return cls.scaled(kind, rope, theta, head_dim)

    @classmethod
    def scaled(cls, kind: str, rope: Mapping[str, Any], theta: float, head_dim: int) -> Rope:
        """`kind` of `KINDS` with the fields `rope` in the spelling of config.json."""
        if kind == "default":
            return cls(theta)
        factor = _number(rope, "factor")
        if kind == "linear":
            return cls(theta, (factor,) * (head_dim // 2))
        if kind == "llama3":
            return cls(theta, _llama3_factors(rope, theta, head_dim))
        return cls(
            theta,
            _yarn_factors(rope, theta, head_dim),
            _yarn_magnitude(rope, factor),
            int(factor * _number(rope, "original_max_position_embeddings")),
        )


def unsupported(kind: str) -> InvalidRequest:
    return InvalidRequest(
        f"Rotary embedding of type {kind!r} is not supported. Supported: {', '.join(KINDS)}.",
        param="model",
    )


def _llama3_factors(rope: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """Llama 3.1's scaling: frequencies that turn seldom over the original context are divided by
    `factor`, those that turn often are kept, and those between are blended."""
    factor, low, high, original = (
        _number(rope, name)
        for name in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
    )
    factors = []
    for index in range(head_dim // 2):
        turns = original * theta ** (-2 * index / head_dim) / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / (kept + (1 - kept) / factor))
    return tuple(factors)


def _yarn_factors(rope: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """YaRN (Peng et al., 2023): as `_llama3_factors`, but blended linearly in the frequency's
    index, from the one that turns `beta_fast` times to the one that turns `beta_slow` times."""
    factor = _number(rope, "factor")
    original = _number(rope, "original_max_position_embeddings")

    def index_of(turns: float) -> float:
        return head_dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    first = index_of(float(rope.get("beta_fast") or 32))
    last = index_of(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    factors = []
    for index in range(head_dim // 2):
        divided = min(max((index - first) / width, 0.0), 1.0)
        factors.append(1 / (1 - divided + divided / factor))
    return tuple(factors)


def _yarn_magnitude(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN sharpens attention as the context grows; by q and k it counts twice."""

    def sharpened(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return sharpened(float(rope["mscale"])) / sharpened(float(rope["mscale_all_dim"]))
    return sharpened(1.0)


def _number(rope: Mapping[str, Any], name: str) -> float:
    value = rope.get(name)
    if not isinstance(value, (int, float)) or value <= 0:
        raise InvalidRequest(
            f"The model's rotary scaling has no usable {name!r} ({value!r}).", param="model"
        )
    return float(value)
