"""Thoughts in a model's text, as it streams: <think>...</think>, then the answer.

    START --"<think>"--> THINKING --"</think>"--> ANSWER
      `--anything else, unless the prompt has opened the thoughts--^

Whitespace inside the marks' edges and before the answer is formatting, and is dropped.
"""

from __future__ import annotations

import enum

from openai_proxy.tools.pieces import Kind, Piece, held

OPENING, CLOSING = "<think>", "</think>"


class Phase(enum.Enum):
    START = enum.auto()
    THINKING = enum.auto()
    ANSWER = enum.auto()


def reasoning_for_template(template: str) -> bool:
    """True when a chat template knows thoughts."""
    return CLOSING in template


def leaves_open(prompt: str) -> bool:
    """True when a prompt ends inside thoughts, so that the model goes on with them."""
    return prompt.rfind(OPENING) > prompt.rfind(CLOSING)


class ReasoningParser:
    """`opened`: the prompt has opened the thoughts already."""

    def __init__(self, opened: bool) -> None:
        self._opened = opened
        self._phase = Phase.START
        self._buffer = ""
        self._space = ""
        self._silent = True

    @property
    def thinking(self) -> bool:
        """The next text is a thought, as far as is known."""
        return self._phase is Phase.THINKING or (self._phase is Phase.START and self._opened)

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        if self._phase is Phase.START and not self._decide():
            return pieces
        if self._phase is Phase.THINKING:
            self._think(pieces)
        if self._phase is Phase.ANSWER:
            self._answer(pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """What was held back, at the end of the text."""
        kind: Kind = "reasoning" if self.thinking else "content"
        text, self._buffer = self._space + self._buffer, ""
        return [Piece(kind, text)] if text and not (self._silent and not text.strip()) else []

    def _decide(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(OPENING):
            self._phase, self._buffer = Phase.THINKING, rest[len(OPENING) :]
        elif OPENING.startswith(rest):
            return False
        elif self._opened:
            self._phase = Phase.THINKING
        else:
            self._phase, self._silent = Phase.ANSWER, False
        return True

    def _think(self, pieces: list[Piece]) -> None:
        thought, mark, rest = self._buffer.partition(CLOSING)
        if not mark:
            kept = len(thought) - held(thought, CLOSING)
            thought, rest = thought[:kept], thought[kept:]
        thought = self._space + thought
        if self._silent:
            thought = thought.lstrip()
        said = thought.rstrip()
        self._space = thought[len(said) :]
        if said:
            self._silent = False
            pieces.append(Piece("reasoning", said))
        self._buffer = rest
        if mark:
            self._phase, self._silent, self._space = Phase.ANSWER, True, ""

    def _answer(self, pieces: list[Piece]) -> None:
        text, self._buffer = self._buffer, ""
        if self._silent:
            text = text.lstrip()
        if text:
            self._silent = False
            pieces.append(Piece("content", text))
