"""Plain Triton clients: every request streams its own responses, from one sender thread.

One `send()` costs 0.2 to 0.3 ms whatever it carries, so a request's news merge while it waits for
its turn: the first token goes out at once, later ones as fast as the thread gets round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from tridentlm.errors import TridentError, from_payload
from tridentlm.protocol import RELAY_REPORT
from tridentlm.streams import TextStream

HEARTBEAT_SECONDS = 0.25
CANCEL_POLL_SECONDS = 0.1
RELAY_WINDOW = 4 * RELAY_REPORT
RELAY_SILENCE_SECONDS = 0.5


class PlainResponder(Protocol):
    def send_output(
        self,
        text: str,
        ids: list[int],
        told: dict[str, list[Any]],
        end: dict[str, Any] | None,
        relay: str | None,
    ) -> None:
        """`told`: the log-probabilities that there are, as in a frame's extras."""

    def send_heartbeat(self, relay: str) -> None: ...

    def fail(self, error: TridentError) -> None: ...

    def finish(self) -> None: ...

    def is_cancelled(self) -> bool: ...


class PlainRequest:
    """The outlet of one plain request. `relayed`: it came through an ensemble with a relay step."""

    def __init__(
        self, responder: PlainResponder, sender: PlainSender, *, streaming: bool, relayed: bool
    ) -> None:
        self.relayed = relayed
        self.stream: TextStream | None = None
        self._responder = responder
        self._sender = sender
        self._streaming = streaming
        self._lock = threading.Lock()
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._told: dict[str, list[Any]] = {}
        self._end: dict[str, Any] | None = None
        self._last_sent = time.monotonic()
        self._sent_any = False

    def mark(self, stream: TextStream) -> None:
        text, _, ids = stream.take()
        with self._lock:
            self._texts.append(text)
            self._ids += ids or ()
            for name, entries in (stream.take_logprobs() or {}).items():
                self._told.setdefault(name, []).extend(entries)
            self._end = None if stream.owing else stream.end
            ended = self._end is not None
        if ended or self._streaming:
            self._sender.put(self)

    def send_pending(self) -> bool:
        """Sends what waits; True when that was the last response. Called by the sender thread."""
        with self._lock:
            text, ids, told, end = "".join(self._texts), self._ids, self._told, self._end
            if end is None and not self._streaming:
                return False
            self._texts, self._ids, self._told = [], [], {}
        if not (text or ids or told) and end is None:
            return False
        relay = self._relay_name()
        if end is not None and "error" in end and not self._sent_any:
            self._responder.fail(from_payload(end["error"]))
        else:
            self._responder.send_output(text, ids, told, end, relay)
        self._note_sent()
        return end is not None

    def beat(self, now: float) -> None:
        """Lets the relay look for its client when the request has had no output for a while."""
        if self.relayed and now - self._last_sent >= HEARTBEAT_SECONDS:
            self._responder.send_heartbeat(self._relay_name() or "")
            self._note_sent()

    def client_has_gone(self) -> bool:
        return not self.relayed and self._responder.is_cancelled()

    def _note_sent(self) -> None:
        self._last_sent = time.monotonic()
        self._sent_any = True

    def _relay_name(self) -> str | None:
        return self.stream.uid if self.relayed and self.stream is not None else None


class PlainSender:
    """The thread that sends for all plain requests, beats, and notices cancelled ones.

    The relay passes fewer responses on than this thread can send, and Triton would queue the
    difference without end, so that an abort found in the relay came seconds late. Hence a window:

        sent - passed < RELAY_WINDOW      or relayed requests wait, and their news merge meanwhile
    """

    def __init__(self, abort: Callable[[TextStream], None]) -> None:
        self._abort = abort
        self._requests: set[PlainRequest] = set()
        self._direct: dict[PlainRequest, None] = {}
        self._relayed: dict[PlainRequest, None] = {}
        self._in_relay = 0
        self._relay_heard = 0.0
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="plain-sender", daemon=True)
        self._thread.start()

    def track(self, request: PlainRequest) -> None:
        with self._wake:
            self._requests.add(request)
            self._wake.notify()

    def put(self, request: PlainRequest) -> None:
        """Queues the request once, however often it has news before its turn."""
        with self._wake:
            (self._relayed if request.relayed else self._direct)[request] = None
            self._wake.notify()

    def passed(self, count: int) -> None:
        """The relay has passed on `count` more responses."""
        with self._wake:
            self._in_relay = max(0, self._in_relay - count)
            self._relay_heard = time.monotonic()
            self._wake.notify()

    def close(self) -> None:
        """Sends what is queued, then ends the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        next_poll = 0.0
        while True:
            with self._wake:
                request = self._next()
                if request is None and self._closed and not self._relayed:
                    return
                if request is None:
                    self._wake.wait(CANCEL_POLL_SECONDS if self._requests else None)
            if request is not None and request.send_pending():
                with self._wake:
                    self._requests.discard(request)
            now = time.monotonic()
            if now >= next_poll:
                self._poll(now)
                next_poll = time.monotonic() + CANCEL_POLL_SECONDS

    def _next(self) -> PlainRequest | None:
        """The request that has waited longest and may be sent; holds the lock."""
        queue = self._direct
        if self._relayed and not queue and self._relay_takes_more():
            queue = self._relayed
            self._in_relay += 1
        if not queue:
            return None
        request = next(iter(queue))
        del queue[request]
        return request

    def _relay_takes_more(self) -> bool:
        if self._in_relay >= RELAY_WINDOW:
            # A relay that was started again never tells of what its predecessor had.
            if time.monotonic() - self._relay_heard < RELAY_SILENCE_SECONDS:
                return False
            self._in_relay, self._relay_heard = 0, time.monotonic()
        return True

    def _poll(self, now: float) -> None:
        with self._wake:
            requests = list(self._requests)
        for request in requests:
            request.beat(now)
            if request.client_has_gone() and request.stream is not None:
                self._abort(request.stream)
