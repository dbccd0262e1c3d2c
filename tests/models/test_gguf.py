from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.factory import FAMILIES, make_tiny_model
from tests.models.conftest import Engine, Reference, reference
from tests.models.plans import Chunk
from tridentlm import hub
from tridentlm.errors import InvalidRequest, ModelNotFound
from tridentlm.models import loading
from tridentlm.models.decoder import Decoder
from tridentlm.models.gguf import GGUFModel

ARCHITECTURES = {"mistral": "llama", "qwen3_moe": "qwen3moe"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.": "ffn_",
    "_proj": "",
}


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Like the tiny models elsewhere, but without a window, for which GGUF has no field."""
    overrides = {"sliding_window": None} if request.param == "mistral" else {}
    return reference(make_tiny_model(request.param, tmp_path_factory.mktemp("gguf"), **overrides))


def write_gguf(tiny: Reference, path: Path, quantize: bool = False) -> Path:
    """Writes the folder's model as llama.cpp's converter does: names, shapes, Llama's q/k order."""
    config = tiny.model.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(config.model_type, config.model_type))
    write_metadata(writer, config)
    for name, values in stacked(load_file(tiny.folder / "model.safetensors")).items():
        if config.model_type in ("llama", "mistral") and ("q_proj" in name or "k_proj" in name):
            halves = values.reshape(-1, 2, config.head_dim // 2, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        kind = gguf.GGMLQuantizationType.Q8_0
        if quantize and values.ndim > 1 and values.shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_metadata(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_eos_token_id(config.eos_token_id)


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """A layer's experts as one tensor [experts, out, in]."""
    experts: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors):  # of fewer than ten experts
        experts.setdefault(re.sub(r"experts\.\d+\.(\w+)", r"\1_exps", name), []).append(
            tensors[name].numpy()
        )
    return {
        name: np.stack(parts) if "_exps" in name else parts[0] for name, parts in experts.items()
    }


def load(path: Path) -> Engine:
    model = GGUFModel(path)
    weights = loading.load(model.config, model, torch.float32, torch.device("cpu"))
    return Engine(Decoder(model.config, weights))


PROMPT = list(range(40, 60))


def test_a_gguf_file_gives_the_logits_of_the_folder_it_was_made_from(
    tiny: Reference, tmp_path: Path
) -> None:
    engine = load(write_gguf(tiny, tmp_path / "tiny.gguf"))
    assert torch.equal(engine.logits(Chunk(0, PROMPT)), tiny.engine().logits(Chunk(0, PROMPT)))


def test_quantized_tensors_are_dequantized(tiny: Reference, tmp_path: Path) -> None:
    logits = load(write_gguf(tiny, tmp_path / "q8.gguf", quantize=True)).logits(Chunk(0, PROMPT))
    expected = tiny.logits(PROMPT)[-1:]
    assert not torch.equal(logits, expected)
    assert torch.corrcoef(torch.cat((logits, expected)))[0, 1] > 0.999


def test_rope_factors_of_a_gguf_file_scale_as_config_json_does(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    scaled = reference(make_tiny_model("llama", tmp_path, rope_parameters=rope))
    path = write_gguf(scaled, tmp_path / "scaled.gguf")
    plain = load(path).logits(Chunk(0, PROMPT))
    factors = scaled.engine().decoder.config.rope.factors
    rewritten = tmp_path / "rope.gguf"
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(rewritten, "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    logits = load(rewritten).logits(Chunk(0, PROMPT))
    torch.testing.assert_close(logits[0], scaled.logits(PROMPT)[-1], atol=1e-4, rtol=0)
    assert (plain - logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=["linear", "yarn"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_rope_scalings_in_the_metadata_match_beyond_the_original_context(
    tmp_path: Path, family: str, rope: dict[str, Any]
) -> None:
    rope = rope | {"rope_theta": 500.0}
    scaled = reference(make_tiny_model(family, tmp_path, rope_parameters=rope))
    engine = load(write_gguf(scaled, tmp_path / "scaled.gguf"))
    prompt = np.random.default_rng(0).integers(3, 384, 100).tolist()
    torch.testing.assert_close(
        engine.logits(Chunk(0, prompt))[0], scaled.logits(prompt)[-1], atol=1e-4, rtol=0
    )


def test_files_that_are_no_gguf_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        GGUFModel(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("not a model, but long enough to hold a header")
    with pytest.raises(InvalidRequest, match="not a readable GGUF"):
        GGUFModel(tmp_path / "text.gguf")


def test_the_default_model_answers_as_transformers_does_with_the_same_file() -> None:
    """Greedy tokens are equal, and logits within 1e-3: they reach 30, ten times the tiny ones."""
    path = hub.default_model()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    expected, engine = Reference(path.parent, model.eval()), load(path)
    prompts = [np.random.default_rng(n).integers(0, 49152, n).tolist() for n in (3, 4, 17)]
    logits = engine.logits(*(Chunk(slot, prompt) for slot, prompt in enumerate(prompts)))
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(8):
        for slot, row in enumerate(logits):
            answers[slot].append(int(row.argmax()))
        logits = engine.logits(*(Chunk(slot, answer[-1:]) for slot, answer in enumerate(answers)))
    for prompt, answer, row in zip(prompts, answers, logits, strict=True):
        theirs = expected.logits(prompt + answer)
        assert theirs[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
        torch.testing.assert_close(row, theirs[-1], atol=1e-3, rtol=0)
