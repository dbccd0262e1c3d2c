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
    at = text.find(mark[0], max(len(text) - len(mark) + 1, 0))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one; the begin of a call stays by itself."""
    if len(pieces) < 2:
        return pieces
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if last and piece.kind != "call" and last[0] == piece.kind and last.nth == piece.nth:
            out[-1] = last._replace(text=last.text + piece.text)
        else:
            out.append(piece)
    return out
