from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tridentlm.errors import InvalidRequest, ModelNotFound
from tridentlm.models.config import ModelConfig
from tridentlm.models.families import FAMILIES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GGUF: dict[str, Any] = {
    "general.architecture": "qwen3",
    "qwen3.embedding_length": 32,
    "qwen3.feed_forward_length": 64,
    "qwen3.block_count": 2,
    "qwen3.context_length": 128,
    "qwen3.attention.head_count": 4,
    "qwen3.attention.head_count_kv": 2,
    "qwen3.attention.key_length": 16,
    "qwen3.rope.freq_base": 1e6,
}
SHAPES = {"token_embd.weight": (100, 32)}


def test_fields_that_config_json_leaves_out_have_the_architecture_s_defaults() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert (config.rope.theta, config.rope.factors) == (10000.0, None)
    assert not config.tied_head


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
    ],
)
def test_rope_is_read_in_the_spelling_of_transformers_4_and_5(spelling: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(LLAMA | spelling).rope.theta == 5e5


def test_llama3_scaling_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    rope = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    factors = ModelConfig.from_hf(LLAMA | {"rope_scaling": rope}).rope.factors
    assert factors is not None
    assert (factors[0], factors[-1]) == (1.0, 8.0)
    assert list(factors) == sorted(factors)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "5 heads"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        ModelConfig.from_hf(LLAMA | change)


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="MambaForCausalLM") as caught:
        ModelConfig.from_hf(LLAMA | {"architectures": ["MambaForCausalLM"]})
    assert all(family.architecture in caught.value.message for family in FAMILIES)


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidRequest, match="JSON"):
        ModelConfig.from_folder(tmp_path)


def test_gguf_metadata_and_tensor_names_make_the_same_config() -> None:
    config = ModelConfig.from_gguf(GGUF, SHAPES, None)
    assert config.family.architecture == "Qwen3ForCausalLM"
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (100, 16, 2)
    assert (config.tied_head, config.qkv_bias) == (True, False)
    untied = SHAPES | {"output.weight": (100, 32), "blk.0.attn_q.bias": (64,)}
    config = ModelConfig.from_gguf(GGUF, untied, (1.0,) * 8)
    assert (config.tied_head, config.qkv_bias, config.output_bias) == (False, True, False)
    assert config.rope.factors == (1.0,) * 8


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"qwen3.rope.scaling.type": "longrope"}, "longrope"),
        ({"qwen3.rope.dimension_count": 8}, "partial"),
        ({"qwen3.block_count": 0}, "block_count"),
        ({"qwen3.attention.sliding_window": 64}, "sliding_window"),
        ({"qwen3.expert_count": 8}, "Experts.*qwen3"),
        ({"qwen3.final_logit_softcapping": 30.0}, "final_logit_softcapping 30"),
        (
            {
                "qwen3.rope.scaling.type": "yarn",
                "qwen3.rope.scaling.factor": 4.0,
                "qwen3.rope.scaling.yarn_log_multiplier": 0.1,
            },
            "yarn_log_multiplier",
        ),
        ({"qwen3.rope.scaling.type": "yarn"}, "rotary scaling.*factor"),
    ],
)
def test_gguf_metadata_that_the_decoder_cannot_do_is_refused(
    change: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        ModelConfig.from_gguf(GGUF | change, SHAPES, None)
