"""The log-probabilities of one request in the stub, given out in step with its text.

An entry leaves when the text of its token has left, or at the end: of text that a stop string may
still swallow nothing is told.

    offset   0     3   5      9
    tokens   |Once| a| time|          text sent so far: "Once a" -> two entries leave
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tridentlm.core.extras import I32, Logprobs
from tridentlm.core.params import SamplingParams
from tridentlm.text.pieces import TokenTexts

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""

Row = tuple[list[int], list[float], int]
"""Token ids, the token itself first; their values; the token's rank."""


class TokenLog:
    """Entries as in `protocol.TokenLogprob`. `sent` counts characters of text that have left."""

    __slots__ = (
        "_next",
        "_of_prompt",
        "_offsets",
        "_prompt_tokens",
        "_prompt_top",
        "_texts",
        "_top",
        "_waiting",
        "length",
        "sent",
    )

    def __init__(self, params: SamplingParams, prompt: I32, texts: TokenTexts) -> None:
        self._texts = texts
        self._top = params.logprobs
        self._prompt_top = params.prompt_logprobs
        self._prompt_tokens = len(prompt)
        self._offsets: list[int] = []
        self._of_prompt: list[Row] = [([int(prompt[0])], [], 0)]  # nothing comes before the first
        self._waiting: deque[Any] = deque()
        self._next: Row | None = None
        self.length = 0
        self.sent = 0

    @classmethod
    def of(cls, params: SamplingParams, prompt: I32, texts: TokenTexts) -> TokenLog | None:
        """None when the request asks for no log-probabilities."""
        asks = params.logprobs is not None or params.prompt_logprobs is not None
        return cls(params, prompt, texts) if asks else None

    def note(self, position: int, row: Row) -> None:
        """What the engine tells of the token at `position`; one of the prompt may come twice."""
        if position >= self._prompt_tokens:
            self._next = row
        elif position == len(self._of_prompt):
            self._of_prompt.append(row)

    def begin_echo(self) -> None:
        """The text of the prompt's next token begins."""
        self._offsets.append(self.length)

    def begin(self) -> None:
        """The text of a sampled token, of which `note` has told, begins."""
        if self._top is not None and self._next is not None:
            self._waiting.append(self._entry(self._next, self._top, self.length))
            self._next = None

    def take(self, ended: bool) -> dict[str, list[Any]]:
        """`logprobs` that may leave, and once, when they are complete, `prompt_logprobs`."""
        taken: dict[str, list[Any]] = {}
        whole = len(self._of_prompt) == self._prompt_tokens
        if whole and self._offsets and self._top is not None:
            taken["logprobs"] = [
                self._entry(row, self._top, offset)
                for row, offset in zip(self._of_prompt, self._offsets, strict=True)
            ]
            self._offsets = []
        if whole and self._prompt_top is not None:
            taken["prompt_logprobs"] = [
                self._entry(row, self._prompt_top, None) for row in self._of_prompt
            ]
            self._prompt_top = None
        leaving = []
        waiting = self._waiting
        while waiting and (ended or self._end_of_first() <= self.sent):
            leaving.append(waiting.popleft())
        if leaving:
            taken["logprobs"] = taken.get("logprobs", []) + leaving
        return taken

    def _end_of_first(self) -> int:
        end: int = self._waiting[1][0] if len(self._waiting) > 1 else self.length
        return end

    def _entry(self, row: Row, top: int, offset: int | None) -> list[Any]:
        tokens, values, rank = row
        if not values:
            return [offset, [tokens[0], None, None, *self._texts[tokens[0]]], []]
        candidates = [
            [token, max(value, LEAST), place, *self._texts[token]]
            for token, value, place in zip(
                tokens[: top + 1], values, (rank, *range(1, top + 1)), strict=False
            )
        ]
        return [offset, candidates[0], candidates[1:]]


def tell(logprobs: Logprobs, find: Callable[[int], TokenLog | None]) -> None:
    """Notes the rows of a step in the logs of their requests; `find` may know of none."""
    columns = (logprobs.ids, logprobs.positions, logprobs.tokens, logprobs.values, logprobs.ranks)
    for id, position, tokens, values, rank in zip(*(c.tolist() for c in columns), strict=True):
        log = find(id)
        if log is not None:
            log.note(position, (tokens, values, rank))
