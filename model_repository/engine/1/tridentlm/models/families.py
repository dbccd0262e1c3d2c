"""The table of traits: how each architecture differs from the plain decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tridentlm.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. docs/families.md says how a row is added.

    `attention_bias`: on q, k and v ("qkv"), on those and the output where config.json's
    `attention_bias` asks for it ("config"), or never. `window`: which layers attend to the last
    `sliding_window` tokens alone: "all", those from `max_window_layers` on ("upper"), or none;
    with `window_switch` only where `use_sliding_window` asks for it. `default_window`: the window
    of a config.json that does not mention it. `gguf_permuted`: GGUF files store the rows of q and
    k in the order of interleaved rotary pairs.
    """

    architecture: str
    model_type: str
    gguf_architecture: str
    qk_norm: bool = False
    attention_bias: Literal["config", "qkv", "none"] = "none"
    window: Literal["all", "upper", "none"] = "none"
    window_switch: bool = False
    default_window: int = 0
    has_experts: bool = False
    gguf_permuted: bool = False


FAMILIES = (
    Family("LlamaForCausalLM", "llama", "llama", attention_bias="config", gguf_permuted=True),
    Family(
        "MistralForCausalLM",
        "mistral",
        "llama",
        window="all",
        default_window=4096,
        gguf_permuted=True,
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        "qwen2",
        attention_bias="qkv",
        window="upper",
        window_switch=True,
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        "qwen3",
        qk_norm=True,
        attention_bias="config",
        window="upper",
        window_switch=True,
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        "qwen3moe",
        qk_norm=True,
        attention_bias="config",
        window="all",
        window_switch=True,
        has_experts=True,
    ),
)


def family_of(architecture: str | None, model_type: str | None) -> Family:
    """The family of a config.json. Raises InvalidRequest, naming the known ones, for another."""
    for family in FAMILIES:
        if architecture == family.architecture or (
            architecture is None and model_type == family.model_type
        ):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise InvalidRequest(
        f"Architecture {architecture or model_type!r} is not supported. Supported: {known}.",
        param="model",
    )


def gguf_family(name: str) -> Family:
    """The family of a GGUF architecture. Raises InvalidRequest, naming the known ones."""
    for family in FAMILIES:
        if family.gguf_architecture == name:
            return family
    known = ", ".join(dict.fromkeys(family.gguf_architecture for family in FAMILIES))
    raise InvalidRequest(
        f"GGUF architecture {name!r} is not supported. Supported: {known}.", param="model"
    )
