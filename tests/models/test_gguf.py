from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tridentlm import hub
from tridentlm.errors import InvalidRequest, ModelNotFound
from tridentlm.models import loading
from tridentlm.models.decoder import Decoder
from tridentlm.models.gguf import GGUFModel

from tests.factory import make_tiny_model
from tests.models.conftest import Engine, Reference, reference
from tests.models.plans import Chunk

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
    "mlp.": "ffn_",
    "_proj": "",
}


def write_gguf(tiny: Reference, path: Path, quantize: bool = False) -> Path:
    """Writes the folder's model as llama.cpp's converter does: names, shapes, Llama's q/k order."""
    config = tiny.model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(config.eos_token_id)
    for name, tensor in load_file(tiny.folder / "model.safetensors").items():
        values = tensor.numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            halves = values.reshape(-1, 2, config.head_dim // 2, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        kind = gguf.GGMLQuantizationType.Q8_0
        if quantize and values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> Engine:
    model = GGUFModel(path)
    weights = loading.load(model.config, model, torch.float32, torch.device("cpu"))
    return Engine(Decoder(model.config, weights))


PROMPT = list(range(40, 60))


def test_a_gguf_file_gives_the_logits_of_the_folder_it_was_made_from(
    tiny: Reference, tmp_path: Path
) -> None:
    engine = load(write_gguf(tiny, tmp_path / "tiny.gguf"))
    assert engine.decoder.config.eos_token_ids == {2}
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


def test_files_that_are_no_gguf_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        GGUFModel(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("not a model, but long enough to hold a header")
    with pytest.raises(InvalidRequest, match="not a readable GGUF"):
        GGUFModel(tmp_path / "text.gguf")


@pytest.mark.timeout(600)
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
