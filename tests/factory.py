"""Tiny random models with everything a real model folder holds, for tests that run real parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = ("llama", "qwen3")

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
    """Writes a random model of `family` ("llama", "qwen3") to `folder` and returns the folder.

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
        "head_dim": 24,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
        "tie_word_embeddings": family == "qwen3",
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
    } | overrides
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
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
