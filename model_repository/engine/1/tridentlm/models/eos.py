"""Which tokens end a text: the union of what the model's files say, which often differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tridentlm.models.config import token_ids


def eos_token_ids(folder: Path) -> frozenset[int]:
    """EOS ids of a Hugging Face folder: generation_config.json's and the tokenizer's own."""
    generation = _read(folder / "generation_config.json")
    return token_ids(generation.get("eos_token_id")) | _tokenizer_eos(folder)


def _tokenizer_eos(folder: Path) -> frozenset[int]:
    eos = _read(folder / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    tokenizer = _read(folder / "tokenizer.json")
    special = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    found = special.get(text, tokenizer.get("model", {}).get("vocab", {}).get(text))
    return token_ids(found)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    values: dict[str, Any] = json.loads(path.read_text())
    return values
