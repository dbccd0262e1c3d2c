"""Token ids to text, one at a time, without ever changing what was already given out.

Promise: for every sequence of ids, `"".join(map(push, ids)) + flush()` equals the `tokenizers`
library's decode of all of them. Decoding a growing window and taking the difference cannot keep it:
text at the window's edge may change or be lost. So text is built from units whose decoding does not
depend on their neighbours:

    byte-level BPE       token -> bytes -> a UTF-8 decoder that holds back an unfinished character
    SentencePiece etc.   token -> its own text; a run of byte tokens (<0xE4><0xBD><0xA0>) is a unit

The first unit differs from the others where a decoder strips the text's leading space. What each
token decodes to is looked up once and kept, so a push costs one dictionary access.
"""

from __future__ import annotations

import contextlib
import json
import re
from codecs import utf_8_decode
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import tokenizers

from tridentlm.errors import InvalidRequest

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
ANCHOR = "a"


class IncrementalDetokenizer(Protocol):
    """The text of one request's output."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; often its own, "" inside a character."""

    def flush(self) -> str:
        """What is still held back, when no token follows: U+FFFD for an unfinished character."""


def detokenizer_factory(
    backend: tokenizers.Tokenizer, skip_special_tokens: bool
) -> Callable[[], IncrementalDetokenizer]:
    """Makes detokenizers that share one table. `backend` must not be changed afterwards.

    Raises InvalidRequest for a decoder whose text cannot be given out piece by piece.
    """
    added = backend.get_added_tokens_decoder()
    special = frozenset(t.content for t in added.values() if t.special)
    skipped = special if skip_special_tokens else frozenset()
    pieces = token_pieces(backend, skipped)
    if isinstance(pieces, BytePieces):
        return partial(ByteLevelDetokenizer, pieces)
    steps = _decoder_steps(backend)
    if not _is_local(steps):
        names = "+".join(step["type"] for step in steps)
        raise InvalidRequest(f"Tokenizers with the decoder {names} are not supported.")
    return partial(PieceDetokenizer, pieces)


def token_pieces(backend: tokenizers.Tokenizer, skipped: frozenset[str]) -> BytePieces | TextPieces:
    """What each token is by itself; those named in `skipped` are nothing."""
    kinds = [step["type"] for step in _decoder_steps(backend)]
    if kinds == ["ByteLevel"]:
        return BytePieces(backend, skipped)
    return TextPieces(backend, skipped, "ByteFallback" in kinds)


class BytePieces(dict[int, "str | bytes"]):
    """Token id -> its text, or its bytes where they are no text by themselves; filled on demand."""

    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[str]) -> None:
        super().__init__()
        self._backend = backend
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | bytes:
        token = self._backend.id_to_token(int(token_id))
        piece: str | bytes = ""
        if token is not None and token not in self._skipped:
            values = [BYTE_OF.get(char) for char in token]
            piece = token.encode() if None in values else bytes(v for v in values if v is not None)
            with contextlib.suppress(UnicodeDecodeError):
                piece = piece.decode()
        self[token_id] = piece
        return piece


class ByteLevelDetokenizer:
    """Concatenates the tokens' bytes; decodes them as UTF-8."""

    __slots__ = ("_pieces", "_tail")

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._tail = b""

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._tail:
                return piece
            piece = piece.encode()
        data = self._tail + piece
        text, used = utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        return text

    def flush(self) -> str:
        text = self._tail.decode("utf-8", "replace")
        self._tail = b""
        return text


class TextPieces(dict[int, "str | bytes | None"]):
    """Token id -> its text after other text; for a byte token its name; None for a skipped one."""

    def __init__(
        self, backend: tokenizers.Tokenizer, skipped: frozenset[str], byte_fallback: bool
    ) -> None:
        super().__init__()
        self._backend = backend
        self._skipped = skipped
        self._byte_fallback = byte_fallback

    def __missing__(self, token_id: int) -> str | bytes | None:
        token = self._backend.id_to_token(int(token_id))
        piece: str | bytes | None
        if token is None or token in self._skipped:
            piece = None
        elif self._byte_fallback and BYTE_TOKEN.fullmatch(token):
            piece = token.encode()
        else:
            piece = self.decode([token], first=False)
        self[token_id] = piece
        return piece

    def token(self, token_id: int) -> str:
        return self._backend.id_to_token(int(token_id)) or ""

    def decode(self, unit: list[str], first: bool) -> str:
        """The text of one unit's tokens, at the start of the text or within it."""
        tokens = unit if first else [ANCHOR, *unit]
        decoder = self._backend.decoder
        text = decoder.decode(tokens) if decoder is not None else " ".join(tokens)
        return text if first else text[len(ANCHOR) :]


class PieceDetokenizer:
    """Concatenates the tokens' texts. A run of byte tokens is held until another token ends it:
    one byte that does not fit turns all bytes of its run into U+FFFD."""

    __slots__ = ("_first", "_pieces", "_plain", "_run")

    def __init__(self, pieces: TextPieces) -> None:
        self._pieces = pieces
        self._run: list[str] = []
        self._first = True
        self._plain = False

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if self._plain and isinstance(piece, str):
            return piece
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            self._run.append(piece.decode())
            self._plain = False
            return ""
        before = self.flush()
        if self._first:
            piece = self._pieces.decode([self._pieces.token(token_id)], first=True)
            self._first = False
        self._plain = True
        return before + piece

    def flush(self) -> str:
        if not self._run:
            return ""
        text = self._pieces.decode(self._run, self._first)
        self._run = []
        self._first = False
        return text


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _is_local(steps: list[dict[str, Any]]) -> bool:
    """Whether each unit's text depends on nothing but whether the unit is the first."""
    fused = False
    for step in steps:
        kind = step["type"]
        one_char = len(step.get("pattern", {}).get("String", "")) == 1
        if kind == "Fuse":
            fused = True
        elif kind == "Strip":
            if step["stop"] or step["start"] > 1:
                return False
        elif kind == "Replace":
            if fused and not one_char:
                return False
        elif kind not in ("ByteFallback", "Metaspace", "WordPiece") or fused:
            return False
    return True


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes as printable characters, from character to byte.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
