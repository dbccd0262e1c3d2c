from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.families import BYTES, CORPUS, FAMILIES, SPECIALS, not_streamable
from tridentlm.errors import InvalidRequest
from tridentlm.text.detokenizer import BYTE_OF, detokenizer_factory
from tridentlm.text.tokenizer import Tokenizer

NAMES = [*FAMILIES, "smollm"]
TEXTS = [
    *CORPUS,
    "A 世世😀a😀b",
    " leading space",
    "   three leading, two trailing  ",
    "\n\n\nmany\n\n\n\nlines 한글 <think>",
    "한국어 조사는 어렵다",
    "ก็ได้ น้ำ เก้า",
    "❤️‍🔥👩🏽‍🚀🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "\ufffd genuine replacement \ufffd\ufffd",
    "don't , . ! ? can't n't",
]


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    detokenizer = tokenizer.detokenizer(skip)
    return "".join([detokenizer.push(i) for i in ids]) + detokenizer.flush()


@cache
def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    return tokenizer._backend.get_vocab()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_stream_of_real_text_equals_its_decode(
    families: dict[str, Tokenizer], name: str, text: str
) -> None:
    tokenizer = families[name]
    ids = tokenizer.encode(text)
    for skip in (True, False):
        assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_stream_gives_the_text_back(smollm: Tokenizer, text: str) -> None:
    assert streamed(smollm, smollm.encode(text), True) == text


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stream_of_any_ids_equals_their_decode(
    families: dict[str, Tokenizer], name: str, data: st.DataObject
) -> None:
    tokenizer = families[name]
    vocab = vocabulary(tokenizer)
    special = [vocab[token] for token in SPECIALS if token in vocab]
    fallback = [vocab[token] for token in BYTES if token in vocab]
    alphabet = [vocab[char] for char in BYTE_OF if char in vocab]
    spaces = [vocab[token] for token in ("▁", "▁▁", "Ġ", "ĠĠ", "ï¿½") if token in vocab]
    pools = [p for p in (special, fallback, alphabet, spaces) if p]
    token_id = st.one_of(
        st.integers(0, tokenizer.vocab_size + 3), *(st.sampled_from(pool) for pool in pools)
    )
    ids = data.draw(st.lists(token_id, max_size=30))
    for skip in (True, False):
        assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize(
    "name", ["byte-level", "qwen", "llama-3", "llama-2", "gemma", "late-replace"]
)
@settings(max_examples=300, deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=12),
        st.text(max_size=6).map(lambda text: text.encode("utf-8", "ignore")),
        st.text(max_size=4).map(lambda text: text.encode("utf-8", "ignore")[:-1]),
    ),
    marks=st.lists(st.integers(0, 12), max_size=3),
)
def test_stream_of_any_bytes_equals_their_decode(
    families: dict[str, Tokenizer], name: str, data: bytes, marks: list[int]
) -> None:
    """Byte tokens, one by one, with special tokens between them."""
    tokenizer = families[name]
    vocab = vocabulary(tokenizer)
    spelling = {byte: char for char, byte in BYTE_OF.items()}
    bytewise = name in ("byte-level", "qwen", "llama-3")
    ids = [vocab[spelling[b] if bytewise else BYTES[b]] for b in data]
    for mark in marks:
        ids.insert(mark, vocab[SPECIALS[1]])
    for skip in (True, False):
        assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


def test_a_character_comes_whole_with_its_last_byte(families: dict[str, Tokenizer]) -> None:
    tokenizer = families["byte-level"]
    vocab = vocabulary(tokenizer)
    spelling = {byte: char for char, byte in BYTE_OF.items()}
    detokenizer = tokenizer.detokenizer()
    pushed = [detokenizer.push(vocab[spelling[b]]) for b in "a😀b".encode()]
    assert pushed == ["a", "", "", "", "😀", "b"]
    assert detokenizer.flush() == ""


def test_text_that_cannot_change_is_not_held_back(smollm: Tokenizer) -> None:
    ids = smollm.encode("Plain words come out at once, each with its token.")
    detokenizer = smollm.detokenizer()
    assert all(detokenizer.push(i) for i in ids)
    assert detokenizer.flush() == ""


def test_an_unfinished_character_at_the_end_is_not_lost(families: dict[str, Tokenizer]) -> None:
    """The seed's detokenizer lost " world" here."""
    tokenizer = families["byte-level"]
    spelling = {byte: char for char, byte in BYTE_OF.items()}
    unfinished = vocabulary(tokenizer)[spelling[0xF0]]
    ids = [*tokenizer.encode("Hello world"), unfinished]
    assert streamed(tokenizer, ids, True) == "Hello world\ufffd"


def test_a_byte_run_waits_for_its_end(families: dict[str, Tokenizer]) -> None:
    tokenizer = families["llama-2"]
    vocab = vocabulary(tokenizer)
    detokenizer = tokenizer.detokenizer()
    pushed = [detokenizer.push(vocab[BYTES[b]]) for b in "你".encode()]
    assert pushed == ["", "", ""]
    assert detokenizer.push(vocab["a"]) == "你a"


def test_two_detokenizers_do_not_share_state(smollm: Tokenizer) -> None:
    ids = smollm.encode("👩🏽‍🚀")
    one, two = smollm.detokenizer(), smollm.detokenizer()
    texts = [
        "".join(parts) for parts in zip(*((one.push(i), two.push(i)) for i in ids), strict=True)
    ]
    assert texts == ["👩🏽‍🚀", "👩🏽‍🚀"]


def test_decoders_that_rewrite_text_are_refused() -> None:
    for backend in not_streamable():
        with pytest.raises(InvalidRequest, match="decoder"):
            detokenizer_factory(backend, True)
