"""What sets families apart matches transformers: biases, windows, experts, rotary scalings."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.factory import CLASSES, make_tiny_model
from tests.models.conftest import Engine, Reference, load, reference
from tests.models.plans import Chunk
from tests.models.test_config import LLAMA
from tests.models.test_decoder import close, tokens
from tridentlm.config import EngineSettings
from tridentlm.errors import InvalidRequest
from tridentlm.hub import ModelFiles
from tridentlm.models import moe
from tridentlm.models.config import ModelConfig
from tridentlm.runner import ModelRunner

ORIGINAL = 32
SCALED = {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
WINDOW = {"use_sliding_window": True, "sliding_window": 9}


def matches(variant: Reference, length: int = 3 * ORIGINAL) -> None:
    """Two rows side by side, one whole and one in chunks, then some decode steps of both."""
    engine, sequences = variant.engine(), [tokens(length + 4, seed=n) for n in range(2)]
    expected = [variant.logits(sequence) for sequence in sequences]
    engine.logits(Chunk(1, sequences[1][:10], samples=False))
    rest = Chunk(1, sequences[1][10:length])
    logits = engine.logits(Chunk(0, sequences[0][:length]), rest)
    for position in range(length - 1, length + 4):
        for row in range(2):
            close(logits[row], expected[row][position])
        if position < length + 3:
            logits = engine.logits(*(Chunk(n, [sequences[n][position + 1]]) for n in range(2)))


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param({"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}, id="linear"),
        pytest.param({"rope_type": "yarn", **SCALED}, id="yarn"),
        pytest.param({"rope_type": "yarn", **SCALED, "truncate": False}, id="yarn-not-truncated"),
        pytest.param(
            {"rope_type": "yarn", **SCALED, "beta_fast": 8.0, "beta_slow": 2.0}, id="yarn-betas"
        ),
        pytest.param({"rope_type": "yarn", **SCALED, "attention_factor": 1.5}, id="yarn-factor"),
        pytest.param(
            {"rope_type": "yarn", **SCALED, "mscale": 0.7, "mscale_all_dim": 0.4}, id="yarn-mscale"
        ),
        pytest.param(
            {"rope_type": "llama3", **SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            id="llama3",
        ),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_rope_scalings_match_beyond_the_original_context(
    tmp_path: Path, family: str, rope: dict[str, Any]
) -> None:
    matches(reference(make_tiny_model(family, tmp_path, rope_parameters=rope)))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param("llama", {"attention_bias": True}, id="attention-bias"),
        pytest.param("llama", {"tie_word_embeddings": True}, id="tied-head"),
        pytest.param("llama", {"num_key_value_heads": 4}, id="multi-head"),
        pytest.param("qwen3", {"num_key_value_heads": 1, "attention_bias": True}, id="multi-query"),
        pytest.param("qwen3", {"tie_word_embeddings": False}, id="untied-head"),
        pytest.param("qwen2", {"tie_word_embeddings": False}, id="qwen2-untied-head"),
        pytest.param("mistral", {"sliding_window": None}, id="mistral-no-window"),
        pytest.param("mistral", {"sliding_window": 1}, id="mistral-window-of-one"),
        pytest.param("mistral", {"sliding_window": 500}, id="mistral-window-past-the-text"),
        pytest.param("mistral", {"head_dim": None}, id="mistral-head-dim-by-hidden-size"),
        pytest.param("qwen2", {**WINDOW, "max_window_layers": 1}, id="qwen2-upper-layers-window"),
        pytest.param("qwen3", {**WINDOW, "max_window_layers": 0}, id="qwen3-all-layers-window"),
        pytest.param(
            "qwen3",
            {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
            id="qwen3-layer-types",
        ),
        pytest.param("qwen3_moe", WINDOW, id="experts-window"),
        pytest.param("qwen3_moe", {"norm_topk_prob": False}, id="experts-not-normalized"),
        pytest.param("qwen3_moe", {"num_experts_per_tok": 1}, id="one-expert"),
        pytest.param("qwen3_moe", {"num_experts_per_tok": 8}, id="all-experts"),
        pytest.param(
            "qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}, id="every-other-layer"
        ),
        pytest.param("qwen3_moe", {"attention_bias": True}, id="experts-attention-bias"),
        pytest.param("qwen3_moe", {"tie_word_embeddings": True}, id="experts-tied-head"),
    ],
)
def test_variants_of_a_family_match(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    matches(reference(make_tiny_model(family, tmp_path, **overrides)))


def test_a_window_hides_what_lies_before_it(tmp_path: Path) -> None:
    windowed = load(make_tiny_model("mistral", tmp_path, num_hidden_layers=1))
    sequence, other = tokens(60), tokens(39, seed=1)
    expected = Engine(windowed).logits(Chunk(0, sequence))
    close(Engine(windowed).logits(Chunk(0, other[:39] + sequence[39:])), expected)
    seen = Engine(windowed).logits(Chunk(0, sequence[:40] + other[:1] + sequence[41:]))
    assert (seen - expected).abs().max() > 0.01


def test_yarn_stretches_the_longest_context() -> None:
    config = {**LLAMA, "rope_scaling": {"type": "yarn", **SCALED}}
    assert ModelConfig.from_hf(config).max_position_embeddings == 4 * ORIGINAL
    longer = {**config, "max_position_embeddings": 1000}
    assert ModelConfig.from_hf(longer).max_position_embeddings == 1000


def test_experts_do_not_care_who_else_is_in_the_batch(tmp_path: Path) -> None:
    engine = Engine(load(make_tiny_model("qwen3_moe", tmp_path)))
    prompts = [tokens(17, seed=n) for n in range(12)]
    together = engine.logits(*(Chunk(n, prompt) for n, prompt in enumerate(prompts)))
    alone = [engine.logits(Chunk(20 + n, prompt)) for n, prompt in enumerate(prompts)]
    close(together, torch.cat(alone))


def test_experts_need_a_torch_that_groups_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model("qwen3_moe", tmp_path)
    (folder / "model.safetensors").unlink()  # refused before anything is read
    monkeypatch.delattr(moe.F, "grouped_mm")
    settings = EngineSettings(device="cpu", load_format="dummy")
    with pytest.raises(InvalidRequest, match=r"torch 2\.10"):
        ModelRunner(settings, ModelFiles("hf", folder, "tiny", folder))


@pytest.mark.parametrize(
    ("capability", "dtype", "works"),
    [((9, 0), "bfloat16", True), ((9, 0), "float16", False), ((8, 0), "bfloat16", False)],
)
def test_experts_on_cuda_are_refused_where_torch_would_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str, works: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    expectation = nullcontext() if works else pytest.raises(InvalidRequest, match="capability 9")
    with expectation:
        moe.check_experts(torch.device("cuda"), getattr(torch, dtype))


def in_front(name: str) -> str:
    return f"language_model.{name}"


def inside(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize(
    ("rename", "is_tied"), [(in_front, False), (inside, False), (inside, True)]
)
def test_the_language_model_of_a_wrapper_is_served(
    tmp_path: Path, rename: Callable[[str], str], is_tied: bool
) -> None:
    inner = make_tiny_model("mistral", tmp_path / "inner")
    text = json.loads((inner / "config.json").read_text())
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**text),
        vision_config=transformers.PixtralVisionConfig(**vision),
    )
    config.tie_word_embeddings = is_tied
    wrapper = transformers.Mistral3ForConditionalGeneration(config).float().eval()
    folder = tmp_path / "wrapper"
    wrapper.save_pretrained(folder)
    path = folder / "model.safetensors"
    saved = load_file(path)
    renamed = {
        rename(name.removeprefix("language_model.")) if "language_model" in name else name: tensor
        for name, tensor in saved.items()
    }
    save_file(renamed, path)
    decoder = load(folder)
    assert decoder.config.is_wrapped
    assert (decoder.config.window, decoder.config.tied_head) == (20, is_tied)
    prompt = tokens(50)
    with torch.inference_mode():
        expected = wrapper(torch.tensor([prompt])).logits[0, -1]
    close(Engine(decoder).logits(Chunk(0, prompt))[0], expected)


def named(architecture: str, **fields: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [architecture]} | fields


MOE = named("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (named("LlamaForCausalLM", sliding_window=16), "sliding_window"),
        (named("LlamaForCausalLM", use_sliding_window=True), "sliding_window"),
        (named("LlamaForCausalLM", attn_logit_softcapping=50.0), "attn_logit_softcapping 50.0"),
        (named("LlamaForCausalLM", logit_scale=0.1), "logit_scale 0.1"),
        (named("Qwen2ForCausalLM", layer_types=["full_attention"] * 3), "layer_types"),
        (
            named("Qwen2ForCausalLM", layer_types=["full_attention", "sliding_attention"]),
            "layer_types",
        ),
        (
            named("MistralForCausalLM", layer_types=["full_attention", "sliding_attention"]),
            "layer_types",
        ),
        (named("LlamaForCausalLM", layer_types=["full_attention", "linear"]), "layer_types"),
        (
            named("LlamaForCausalLM", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "'dynamic'.*linear, llama3, yarn",
        ),
        (
            named("LlamaForCausalLM", rope_scaling={"rope_type": "linear", "factor": 0}),
            "rotary scaling.*factor",
        ),
        (
            named(
                "LlamaForCausalLM",
                rope_parameters={"rope_type": "default", "llama_4_scaling_beta": 0.1},
            ),
            "default with llama_4_scaling_beta",
        ),
        (MOE | {"num_experts_per_tok": 5}, "5 of 4 experts"),
        (MOE | {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (MOE | {"num_shared_experts": 1}, "num_shared_experts 1"),
        ({"text_config": {"model_type": "mamba"}}, "'mamba'.*LlamaForCausalLM"),
    ],
)
def test_what_would_change_the_output_and_is_not_computed_is_refused(
    config: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        ModelConfig.from_hf(config)
    assert caught.value.param == "model"


def test_every_family_of_the_table_has_a_tiny_model_in_the_tests() -> None:
    from tridentlm.models.families import FAMILIES

    tested = {model_class.__name__ for _, model_class in CLASSES.values()}
    assert {family.architecture for family in FAMILIES} == tested
