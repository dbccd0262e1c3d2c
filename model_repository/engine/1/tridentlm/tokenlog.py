"""The log-probabilities of one request in the stub, given out in step with its text.

An entry leaves when the text of its token has left, or at the end: of text that a stop string may
still swallow nothing is told.

    offset   0     3   5      9
    tokens   |Once| a| time|          text sent so far: "Once a" -> two entries leave

A prompt's entries are built in parts, each of them short enough to hold nobody up: all of a long
prompt at once would stop everybody's streams for half a second.
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

PART_CANDIDATES = 2048
"""Of a prompt's entries so many at once; about 2 us each."""

Row = tuple[list[int], list[float], int]
"""Token ids, the token itself first; their values; the token's rank."""


class TokenLog:
    """Entries as in `protocol.TokenLogprob`. `sent` counts characters of text that have left."""

    __slots__ = (
        "_built",
        "_next",
        "_of_prompt",
        "_offsets",
        "_prompt_tokens",
        "_prompt_top",
        "_texts",
        "_top",
        "_waiting",
        "length",
        "ready",
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
        self._built = 0
        self.ready: dict[str, list[Any]] = {}
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

    @property
    def owes(self) -> bool:
        """The prompt's entries can be built, and have not all been."""
        left = self._built < self._prompt_tokens == len(self._of_prompt)
        return left and bool(self._asked())

    def build(self) -> None:
        """Puts the next part of what it owes into `ready`."""
        asked = self._asked()
        size = max(PART_CANDIDATES // (sum(asked.values()) + len(asked)), 1)
        begin, self._built = self._built, min(self._built + size, self._prompt_tokens)
        for name, top in asked.items():
            entries = self.ready.setdefault(name, [])
            for i in range(begin, self._built):
                offset = self._offsets[i] if name == "logprobs" else None
                entries.append(self._entry(self._of_prompt[i], top, offset))

    def take(self, ended: bool) -> dict[str, list[Any]]:
        """What is ready, and `logprobs` that may leave: those of an echo before all others."""
        taken, self.ready = self.ready, {}
        if self._offsets and self.owes:
            return taken
        leaving = []
        waiting = self._waiting
        while waiting and (ended or self._end_of_first() <= self.sent):
            leaving.append(waiting.popleft())
        if leaving:
            taken["logprobs"] = taken.get("logprobs", []) + leaving
        return taken

    def _asked(self) -> dict[str, int]:
        """How many candidates each token of the prompt shall have, by the name of the list."""
        asked = {}
        if self._top is not None and self._offsets:
            asked["logprobs"] = self._top
        if self._prompt_top is not None:
            asked["prompt_logprobs"] = self._prompt_top
        return asked

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
