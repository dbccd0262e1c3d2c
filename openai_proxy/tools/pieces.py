"""What the parsers cut an answer's text into, and the hold-back that makes them incremental."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["content", "reasoning", "call", "arguments"]


class Piece(NamedTuple):
    """A part of the answer. `call` begins tool call `nth`: `text` is the function's name and
    `call_id` its id; its `arguments` follow, as JSON text."""

    kind: Kind
    text: str
    nth: int = 0
    call_id: str = ""


def held(text: str, mark: str) -> int:
    """How many of the last characters of `text` may be the beginning of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one; the begin of a call stays by itself."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if last and piece.kind != "call" and last[0] == piece.kind and last.nth == piece.nth:
            out[-1] = last._replace(text=last.text + piece.text)
        else:
            out.append(piece)
    return out
