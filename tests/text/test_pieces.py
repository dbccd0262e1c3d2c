"""Single tokens: what a list of tokens shows of each."""

from __future__ import annotations

import pytest

from tests.text.families import FAMILIES
from tridentlm.text.tokenizer import Tokenizer

TEXT = "Naïve 你好 😀 fox"


def joined(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    pieces = [tokenizer.texts[i] for i in ids]
    return b"".join(bytes(raw) if raw is not None else text.encode() for text, raw in pieces)


@pytest.mark.parametrize("name", ["byte-level", "qwen", "llama-2", "gemma", "smollm"])
def test_the_bytes_of_tokens_join_to_the_text(families: dict[str, Tokenizer], name: str) -> None:
    tokenizer = families[name]
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert joined(tokenizer, ids).decode().removeprefix(" ") == TEXT


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_token_has_a_text_and_bytes_only_where_the_text_is_not_exact(
    families: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = families[name]
    for token in range(tokenizer.vocab_size):
        text, raw = tokenizer.texts[token]
        assert text or name == "wordpiece" or tokenizer.decode([token]) == ""
        if raw is not None:
            assert "�" in text
            assert bytes(raw).decode("utf-8", "replace") == text
    assert tokenizer.texts[tokenizer.vocab_size + 9] == ("", None)


def test_special_tokens_have_their_names(families: dict[str, Tokenizer]) -> None:
    for tokenizer in families.values():
        [end] = tokenizer.encode("<|im_end|>", add_special_tokens=False)[-1:]
        assert tokenizer.texts[end][0].strip() == "<|im_end|>"
