"""One answer's text cut into thoughts, content and tool calls, streaming or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai_proxy.reasoning import ReasoningParser
from openai_proxy.tools import TOOL_PARSERS, Piece, ToolParser, joined
from tridentlm_client import Delta


class OutputParser:
    """The parsers of one choice, in a row: thoughts first, then tool calls in what is left.

    `calls` counts the calls so far, `reasoning_tokens` the tokens of thoughts with their marks.
    With `single` only the first call is passed on.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, single: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._single = single
        self.calls = 0
        self.reasoning_tokens = 0

    def push(self, deltas: Sequence[Delta]) -> list[Piece]:
        pieces: list[Piece] = []
        for delta in deltas:
            pieces += self._push(delta)
        return joined(pieces)

    def flush(self) -> list[Piece]:
        """The rest, when the text has ended."""
        pieces = [] if self._reasoning is None else self._reasoning.flush()
        pieces = self._find_calls(pieces)
        if self._tools is not None:
            pieces += self._counted(self._tools.flush())
        return joined(pieces)

    def _push(self, delta: Delta) -> list[Piece]:
        if self._reasoning is None:
            return self._find_calls([Piece("content", delta.text)] if delta.text else [])
        before = self._reasoning.thinking
        pieces = self._reasoning.push(delta.text)
        if before or self._reasoning.thinking:
            # A delta is one token, unless its client lagged: then what follows the thoughts in the
            # same delta is taken off by its share of the text.
            after = sum(len(piece.text) for piece in pieces if piece.kind == "content")
            share = 1.0 if delta.count == 1 else 1 - after / max(len(delta.text), 1)
            self.reasoning_tokens += round(delta.count * share)
        return self._find_calls(pieces)

    def _find_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            if piece.kind == "content":
                found += self._counted(self._tools.push(piece.text))
            else:
                found.append(piece)
        return found

    def _counted(self, pieces: list[Piece]) -> list[Piece]:
        if self._single:
            pieces = [piece for piece in pieces if piece.nth == 0]
        for piece in pieces:
            if piece.kind == "call":
                self.calls += 1
        return pieces


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a request's answers are to be cut: makes one parser for each choice."""

    reasoning: bool
    opened: bool
    tool_parser: str | None
    names: tuple[str, ...]
    parallel: bool

    def parser(self) -> OutputParser:
        reasoning = ReasoningParser(self.opened) if self.reasoning else None
        tools = TOOL_PARSERS[self.tool_parser](self.names) if self.tool_parser else None
        return OutputParser(reasoning, tools, single=not self.parallel)


def delta_of(piece: Piece) -> dict[str, Any]:
    """The `delta` of a chat chunk. Thoughts go under both names that clients look for."""
    if piece.kind == "content":
        return {"content": piece.text}
    if piece.kind == "reasoning":
        return {"reasoning_content": piece.text, "reasoning": piece.text}
    call: dict[str, Any] = {"index": piece.nth}
    if piece.kind == "call":
        function = {"name": piece.text, "arguments": ""}
        call |= {"id": piece.call_id, "type": "function", "function": function}
    else:
        call["function"] = {"arguments": piece.text}
    return {"tool_calls": [call]}


def message_of(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The whole `message` that the pieces of one choice add up to."""

    def text_of(kind: str) -> str:
        return "".join(piece.text for piece in pieces if piece.kind == kind)

    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {
                "name": call.text,
                "arguments": "".join(
                    p.text for p in pieces if p.kind == "arguments" and p.nth == call.nth
                ),
            },
        }
        for call in pieces
        if call.kind == "call"
    ]
    content, reasoning = text_of("content"), text_of("reasoning")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not (calls or reasoning) else None,
        "refusal": None,
    }
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        message["tool_calls"] = calls
    return message
