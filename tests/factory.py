"""Tiny random models with everything a real model folder holds, for tests that run real parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}
FAMILIES = tuple(CLASSES)

OWN_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 24},
    "mistral": {"head_dim": 24, "sliding_window": 20},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 24,
        "num_hidden_layers": 4,
        "mlp_only_layers": [0, 1],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
}
"""Where a family's tiny model leaves the common fields, so that what sets it apart is in use."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog. A long journey begins with one step.",
    "Pages hold tokens, rows hold pages, a batch holds rows; every step adds one token to each.",
    "user and assistant talk: what is the weather like today? It is sunny, with a little wind.",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ 한국어 문장도 있습니다. Ein Satz über Flüsse. 🙂🚀",
)


def make_tiny_model(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes a random model of `family` (of FAMILIES) to `folder` and returns the folder.

    It holds config, safetensors, generation_config and a byte-level BPE tokenizer with a ChatML
    template, and loads with transformers' Auto classes. `overrides` change fields of the config.
    The weights depend on `seed` alone, and are large enough that greedy text does not loop at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _make_tokenizer()
    tokenizer.save_pretrained(folder)
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
    }
    fields |= OWN_FIELDS[family] | overrides
    config_class, model_class = CLASSES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**fields)).float()
        for name, parameter in model.named_parameters():
            if "norm" in name:  # else all ones, which would hide a norm that is left out
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model.generation_config = transformers.GenerationConfig(eos_token_id=[eos, end_of_text])
    model.save_pretrained(folder)
    return folder


def _make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
