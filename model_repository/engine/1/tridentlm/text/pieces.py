"""Single tokens as text and bytes, for lists of tokens: not to be joined."""

from __future__ import annotations

import tokenizers

from tridentlm.text.detokenizer import TextPieces, token_pieces


class TokenTexts(dict[int, "tuple[str, list[int] | None]"]):
    """Token id -> its text, and its bytes where they are not the text's own UTF-8; else None.

    Special tokens have their names. Filled on demand; may be shared.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._pieces = token_pieces(backend, frozenset())

    def __missing__(self, token_id: int) -> tuple[str, list[int] | None]:
        piece = self._pieces[token_id] or ""
        raw: list[int] | None = None
        if isinstance(piece, bytes):
            if isinstance(self._pieces, TextPieces):
                piece = bytes([int(piece[3:5], 16)])  # <0xE4>
            raw = list(piece)
            piece = piece.decode("utf-8", "replace")
            raw = None if piece.encode() == bytes(raw) else raw
        self[token_id] = piece, raw
        return piece, raw
