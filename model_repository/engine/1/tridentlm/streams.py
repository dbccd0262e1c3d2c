"""One request's way from token ids to text: `TextStream`.

worker --(id, token, finish)--> feed() --> pending text, count, ids --> take() --> a response
                                  |
                                  `--> stop string found: ends here, whatever the engine does
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tridentlm.core.request import FinishReason, SamplingParams
from tridentlm.errors import TridentError
from tridentlm.text import IncrementalDetokenizer, StopChecker
from tridentlm.tokenlog import TokenLog

NO_TOKEN = -1


class Outlet(Protocol):
    """Where a stream's news go: a session's frames, or a plain client's own responses."""

    def mark(self, stream: TextStream) -> None:
        """The stream has something to take. Called by the pump thread only."""


class TextStream:
    """State of one running request in the stub. `id` is the engine's, `uid` the client's.

    `end` is None while the request runs, then {"finish_reason", "stop_reason", "usage", "error"?}.
    `log` has the log-probabilities if the request asks for any. While `owing`, parts of the
    prompt's are still to come, and its client must not hear of the end.
    """

    __slots__ = (
        "_cached_tokens",
        "_completion_tokens",
        "_count",
        "_detokenizer",
        "_ids",
        "_includes_stop",
        "_max_tokens",
        "_min_tokens",
        "_stop_checker",
        "_stop_token_ids",
        "_texts",
        "arrived",
        "end",
        "id",
        "log",
        "outlet",
        "owing",
        "prompt_tokens",
        "timeout",
        "uid",
    )

    def __init__(
        self,
        id: int,
        uid: str,
        outlet: Outlet,
        prompt_tokens: int,
        params: SamplingParams,
        detokenizer: IncrementalDetokenizer,
        *,
        arrived: float,
        keep_ids: bool,
        echo: Sequence[int] = (),
        log: TokenLog | None = None,
    ) -> None:
        """`echo`: the prompt's ids if the text shall begin with them."""
        self.id = id
        self.uid = uid
        self.outlet = outlet
        self.prompt_tokens = prompt_tokens
        self.arrived = arrived
        self.timeout = params.timeout
        self.end: dict[str, Any] | None = None
        self._detokenizer = detokenizer
        self._stop_checker = StopChecker(params.stop) if params.stop else None
        self._stop_token_ids = params.stop_token_ids
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._max_tokens = params.max_tokens
        self.log = log
        self.owing = False
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._texts: list[str] = []
        self._count = 0
        self._ids: list[int] | None = [] if keep_ids else None
        for token in echo:
            self._echo(token)

    @property
    def started(self) -> bool:
        """Whether the first token has come."""
        return self._completion_tokens > 0

    def set_cached(self, cached_tokens: int) -> None:
        self._cached_tokens = cached_tokens

    def feed(self, token: int, finish: int) -> None:
        """Takes one step's result: a token (-1: none) and a FinishReason value."""
        if self._max_tokens == 0 and token >= 0:
            token, finish = NO_TOKEN, FinishReason.LENGTH
        if token >= 0:
            self._completion_tokens += 1
            self._count += 1
            if self._ids is not None:
                self._ids.append(token)
            if self.log is not None:
                self.log.begin()
            if finish != FinishReason.STOP or self._includes_stop:
                text = self._detokenizer.push(token)
                if self.log is not None:
                    self.log.length += len(text)
                self._emit(text)
        if finish and self.end is None:
            self._finish(FinishReason(finish), token)

    def fail(self, error: TridentError) -> None:
        """Ends the stream with an error; what it had for its client stays."""
        if self.end is None:
            self._close("error", None)["error"] = error.payload()

    def take(self) -> tuple[str, int, list[int] | None]:
        """The text, token count and ids since the last call."""
        taken = ("".join(self._texts), self._count, self._ids)
        self._texts, self._count = [], 0
        if self._ids is not None:
            self._ids = []
        return taken

    def take_logprobs(self) -> dict[str, list[Any]] | None:
        """What `log` has for the text that was taken; None for a request that does not ask."""
        return None if self.log is None else self.log.take(self.end is not None)

    def _echo(self, token: int) -> None:
        text = self._detokenizer.push(token)
        self._texts.append(text)
        if self.log is not None:
            self.log.begin_echo()
            self.log.length += len(text)
            self.log.sent += len(text)

    def _emit(self, text: str) -> None:
        checker = self._stop_checker
        if text and checker is not None and self._completion_tokens > self._min_tokens:
            text = checker.push(text)
            if checker.matched is not None:
                if self._includes_stop:
                    text += checker.matched
                self._close("stop", checker.matched)
        if text:
            self._texts.append(text)
            if self.log is not None:
                self.log.sent += len(text)

    def _finish(self, reason: FinishReason, token: int) -> None:
        self._emit(self._detokenizer.flush())
        if self.end is not None:
            return
        if self._stop_checker is not None:
            self._texts.append(self._stop_checker.flush())
        stop_reason: str | int | None = None
        if reason is FinishReason.STOP and token in self._stop_token_ids:
            stop_reason = token
        elif reason is FinishReason.ABORT and self.timeout is not None:
            stop_reason = "timeout"
        self._close(reason.text, stop_reason)

    def _close(self, finish_reason: str, stop_reason: str | int | None) -> dict[str, Any]:
        self.end = {
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self._completion_tokens,
                "cached_tokens": self._cached_tokens,
            },
        }
        return self.end
