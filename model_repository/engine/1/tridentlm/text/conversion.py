"""A model's tokenizer as transformers reads it, converted once and kept in the cache.

transformers takes seconds (and loads torch) to read a tokenizer, and every Triton instance needs
one. So the first process stores what it read, in a folder of the cache named after the source's
content; the others load that folder with `tokenizers` in a tenth of a second.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers

from tridentlm.errors import InvalidRequest
from tridentlm.hub import cache_dir, file_lock

FORMAT = "1"
SOURCES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "config.json",
)

GGUF_EOS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))

logger = logging.getLogger(__name__)


def converted(source: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer of a Hugging Face folder or a .gguf file, and what belongs to it.

    The second part holds `special_tokens` (name -> text, for chat templates), `chat_template` (str
    or None) and `eos_token_ids`. Raises InvalidRequest when transformers cannot read it.
    """
    folder = cache_dir() / "tokenizers" / _fingerprint(source)
    if not folder.is_dir():
        with file_lock("tokenizers"):
            if not folder.is_dir():
                _store(source, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    extras: dict[str, Any] = json.loads((folder / "extras.json").read_bytes())
    return backend, extras


def _fingerprint(source: Path) -> str:
    digest = hashlib.sha256(f"{FORMAT} {version('transformers')}".encode())
    if source.is_file():
        stat = source.stat()
        digest.update(f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    else:
        for name in SOURCES:
            file = source / name
            if file.is_file():
                digest.update(f"{name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def _store(source: Path, folder: Path) -> None:
    logger.info("Reading the tokenizer in %s for the first time", source)
    try:
        backend, extras = _read_gguf(source) if source.is_file() else _read_folder(source)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidRequest(
            f"The tokenizer in {source} cannot be loaded ({reason}).", param="tokenizer"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    folder.parent.mkdir(exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix="part-"))
    backend.save(str(part / "tokenizer.json"), pretty=False)
    (part / "extras.json").write_text(json.dumps(extras))
    os.replace(part, folder)


def _read_folder(source: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    from transformers import AutoTokenizer

    return _parts(AutoTokenizer.from_pretrained(source))


def _read_gguf(source: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    from transformers import AutoTokenizer

    from tridentlm.models.gguf_header import read_header

    backend, extras = _parts(AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name))
    values = read_header(source).metadata
    extras["eos_token_ids"] += [int(values[name]) for name in GGUF_EOS if name in values]
    if values.get("tokenizer.ggml.pre") == "smollm":
        # transformers forgets that this vocabulary was learned on single digits: "\n\n1" differs.
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return backend, extras


def _parts(tokenizer: Any) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    eos = tokenizer.eos_token_id
    extras = {
        "special_tokens": {k: v for k, v in tokenizer.special_tokens_map.items() if type(v) is str},
        "chat_template": template,
        "eos_token_ids": [] if eos is None else [eos],
    }
    return tokenizer.backend_tokenizer, extras
