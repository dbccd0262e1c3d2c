"""A streaming answer, written from the dispatcher's own call: no task wakes for a token.

    session reader task                                      server's transport
    frame -> stream.on_news -> EventStream._news -> events -> send(...) stepped by hand
                                                                |  returns: written
                                                                |  yields: the client lags
                                                   a task waits for room; meanwhile the deltas stay
                                                   in their streams and leave merged, as one event

The server's `send` is a coroutine that only ever waits for a full write buffer, so its first step
is the whole write in all other cases. That step costs about 1 us, a task switch 5 to 10.
"""

from __future__ import annotations

import asyncio
import logging
import types
from collections import deque
from collections.abc import Awaitable, Generator
from functools import partial
from typing import Any

from openai_proxy.answers import AnswerLike, ChoiceLike
from openai_proxy.exchange import Exchange, Headers
from openai_proxy.protocol import Job
from tridentlm.errors import InternalError

log = logging.getLogger("openai_proxy")

SSE_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
KEEP_ALIVE = b": keep-alive\n\n"


class EventStream:
    """Answers `exchange` with the events that `answer` makes of its choices' streams.

    `over` ends when the last event is written. It fails with a TridentError, nothing having been
    sent, when the engine's first news is an error: the caller then answers with its status. An
    error after that is an event of its own. With `keep_alive`, after so many seconds without a
    token a comment is written; the first one makes the status 200.
    """

    def __init__(
        self,
        exchange: Exchange,
        job: Job,
        answer: AnswerLike,
        headers: Headers,
        keep_alive: float = 0.0,
    ) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exchange = exchange
        self._job = job
        self._answer = answer
        self._headers = SSE_HEADERS + headers
        self._choices = answer.choices
        self._unfinished = set(self._choices)
        self._send = exchange.send_body
        self._begun = False
        self._opened = False
        self._keep_alive = keep_alive
        self._tokens_seen = 0
        self._timer: asyncio.TimerHandle | None = None
        self._outbox: deque[bytes] = deque()
        self._lagging: asyncio.Future[None] | None = None
        self._closing = False

    @property
    def begun(self) -> bool:
        """The status line is out: errors can only be events now."""
        return self._begun

    def begin(self) -> None:
        """Takes what the streams already hold and everything that comes."""
        for choice in self._choices:
            choice.stream.on_news = partial(self._news, choice)
            self._news(choice)
        if self._keep_alive:
            self._wait_silent()

    def close(self) -> None:
        """Writes nothing more."""
        for choice in self._choices:
            choice.stream.on_news = None
        if self._timer is not None:
            self._timer.cancel()
        if self._lagging is not None:
            self._lagging.cancel()

    def _news(self, choice: ChoiceLike) -> None:
        if self._lagging is not None or self.over.done():
            return
        try:
            self._collect(choice)
            self._flush()
        except Exception as failure:
            self._give_up(failure)

    def _collect(self, choice: ChoiceLike) -> None:
        """Turns the news of one choice into events in the outbox."""
        stream = choice.stream
        deltas, end = stream.take(), stream.end
        if choice not in self._unfinished or not (deltas or end):
            return
        error = None if end is None else self._job.error_of(end)
        if not self._opened:
            if error is not None and not deltas and not self._begun:
                self.over.set_exception(error)
                return
            self._open()
        if deltas and (event := choice.text(deltas)) is not None:
            self._outbox.append(event)
        if error is not None:
            self._exchange.error = error
            self._unfinished.clear()
            self._closing = True
            self._outbox += self._answer.failure(error)
        elif end is not None:
            self._unfinished.discard(choice)
            self._outbox.append(choice.finish())
            if not self._unfinished:
                self._complete()

    def _open(self) -> None:
        self._opened = True
        self._exchange.ttft = self._exchange.elapsed
        self._send_headers()
        self._outbox.extend(self._answer.opening())

    def _send_headers(self) -> None:
        if not self._begun:
            self._begun = True
            self._step(self._exchange.start(self._headers))

    def _complete(self) -> None:
        self._exchange.count(self._answer.usage())
        self._closing = True
        self._outbox.extend(self._answer.closing())

    def _flush(self) -> None:
        outbox = self._outbox
        while outbox and self._lagging is None:
            event = outbox.popleft()
            more = bool(outbox) or not self._closing
            self._step(self._send({"type": "http.response.body", "body": event, "more_body": more}))
        if self._closing and not outbox and self._lagging is None and not self.over.done():
            self.over.set_result(None)

    def _wait_silent(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive, self._say_alive)

    def _say_alive(self) -> None:
        """Counts tokens, not writes, so that a token costs nothing more for this."""
        tokens = sum(choice.completion_tokens for choice in self._choices)
        silent, self._tokens_seen = tokens == self._tokens_seen, tokens
        if self.over.done() or self._closing:
            return
        if silent and self._lagging is None:
            self._send_headers()
            self._outbox.append(KEEP_ALIVE)
            self._flush()
        self._wait_silent()

    def _step(self, sending: Awaitable[None]) -> None:
        """Runs a send up to its first wait; if it has one, the rest runs as a task."""
        try:
            waited = sending.send(None)  # type: ignore[attr-defined]
        except StopIteration:
            return
        self._lagging = asyncio.ensure_future(_finish_send(sending, waited))
        self._lagging.add_done_callback(self._caught_up)

    def _caught_up(self, sent: asyncio.Future[None]) -> None:
        self._lagging = None
        if sent.cancelled() or self.over.done():
            return
        if (failure := sent.exception()) is not None:
            self._give_up(failure)
            return
        self._flush()
        for choice in self._choices:
            self._news(choice)

    def _give_up(self, failure: BaseException) -> None:
        log.error("request %s: writing failed", self._exchange.request_id, exc_info=failure)
        if not self.over.done():
            self.over.set_exception(InternalError(f"The proxy failed: {failure!r}"))


@types.coroutine
def _finish_send(sending: Any, waited: Any) -> Generator[Any, None, None]:
    """Goes on with a coroutine whose first step returned `waited`."""
    while True:
        try:
            yield waited
            waited = sending.send(None)
        except StopIteration:
            return
