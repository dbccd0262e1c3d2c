"""The pump: the thread between the engine process and the clients.

    one message a step --> text for every row --> one frame for every session with news
                                              `-> plain requests: to their own sender thread

A prompt's log-probabilities leave in parts, one between two steps, whosever turn it is; until the
last one the end of their request waits.

It also does the housekeeping: sessions that have gone, status frames, draining.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from tridentlm.channel import Step
from tridentlm.config import EngineSettings
from tridentlm.errors import EngineDown, InternalError, TridentError
from tridentlm.protocol import STATUS_SECONDS
from tridentlm.streams import TextStream
from tridentlm.tokenlog import TokenLog, tell
from tridentlm.triton.ledger import Ledger
from tridentlm.triton.metrics import Metrics
from tridentlm.triton.process import EngineProcess
from tridentlm.triton.sessions import Session

TICK_SECONDS = 0.1
DRAIN_SLACK_SECONDS = 2.0
PART_SECONDS = 0.005
"""The pause between two parts, if no step ends it: who takes them needs as long as this thread."""


class Pump:
    """Only this thread feeds streams and sends frames. `status` gives what sessions are told."""

    def __init__(
        self,
        settings: EngineSettings,
        ledger: Ledger,
        process: EngineProcess,
        metrics: Metrics,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._process = process
        self._metrics = metrics
        self._status = status
        self._status_due = 0.0
        self._announced: tuple[bool, bool] | None = None
        self._draining_since: float | None = None
        self._closing = False
        self._owing: dict[TextStream, None] = {}  # in the order of their turns
        self._thread = threading.Thread(target=self._run, name="pump", daemon=True)

    @property
    def draining(self) -> bool:
        return self._draining_since is not None

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> None:
        """Running requests may finish, at most `drain_seconds`; then every session ends."""
        if self._draining_since is None:
            self._draining_since = time.monotonic()

    def announce(self) -> None:
        """A session has opened and waits for its first status."""
        self._status_due = 0.0

    def close(self) -> None:
        """Ends the thread, then every request with an error, then every session."""
        self._closing = True
        self._thread.join(timeout=5)
        self._end_all(EngineDown("The server is shutting down.", code="draining"))

    def close_session(self, session_id: str) -> None:
        """Forgets the session and aborts its requests."""
        streams = self._ledger.close_session(session_id)
        self._process.abort([stream.id for stream in streams])

    def _run(self) -> None:
        next_tick = 0.0
        told = False
        while not self._closing:
            event = self._process.receive(PART_SECONDS if told else TICK_SECONDS)
            if isinstance(event, Step):
                self._take_step(event)
            elif event is not None:
                self._fail_all(event)
            told = self._tell_owed()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                self._tick(now)

    def _take_step(self, step: Step) -> None:
        ledger, output = self._ledger, step.output
        now = time.monotonic()
        if output.logprobs is not None:
            tell(output.logprobs, self._log_of)
        owing: list[TextStream] = []
        for id, cached_tokens in output.cached:
            if (stream := ledger.get(id)) is not None:
                stream.set_cached(cached_tokens)
                self._metrics.first_token(now - stream.arrived)
                if stream.log is not None and stream.log.owes:
                    owing.append(stream)
        self._owe(owing)
        sessions: set[Session] = set()
        ended: list[TextStream] = []
        rows = zip(output.ids.tolist(), output.tokens.tolist(), output.finish.tolist(), strict=True)
        for id, token, finish in rows:
            stream = ledger.get(id)
            if stream is None:  # ended by a stop string; the engine hears of it a step later
                continue
            if id in output.errors:
                stream.fail(InternalError(output.errors[id]))
            stream.feed(token, finish)
            if stream.end is not None:
                ended.append(stream)
                if not finish:
                    self._process.abort([id])
            outlet = stream.outlet
            outlet.mark(stream)
            if isinstance(outlet, Session):
                sessions.add(outlet)
        ledger.forget(ended)
        for session in sessions:
            self._flush(session)
        self._metrics.step(step, now)
        self._metrics.ended(ended, now)

    def _log_of(self, id: int) -> TokenLog | None:
        stream = self._ledger.get(id)
        return None if stream is None else stream.log

    def _owe(self, streams: list[TextStream]) -> None:
        """Lets them wait for their turns, but the first, which most often is the only one."""
        for stream in streams:
            stream.owing = True
            self._owing[stream] = None
        if streams:
            self._build_part(streams[0])

    def _build_part(self, stream: TextStream) -> None:
        assert stream.log is not None, "it owes"
        stream.log.build()
        del self._owing[stream]
        stream.owing = stream.log.owes
        if stream.owing:
            self._owing[stream] = None

    def _tell_owed(self) -> bool:
        """Builds and sends a part, for somebody who has taken the last one; False: nothing sent."""
        for stream in list(self._owing):
            outlet = stream.outlet
            if isinstance(outlet, Session) and self._ledger.session(outlet.id) is not outlet:
                del self._owing[stream]
            elif stream.log is not None and not stream.log.ready:
                self._build_part(stream)
                outlet.mark(stream)
                if isinstance(outlet, Session):
                    self._flush(outlet)
                return True
        return False

    def _fail_all(self, error: TridentError) -> None:
        streams = self._ledger.streams()
        for stream in streams:
            stream.fail(error)
            stream.outlet.mark(stream)
        self._ledger.forget(streams)
        self._flush_all()
        self._metrics.ended(streams, time.monotonic())

    def _end_all(self, error: TridentError) -> None:
        while self._owing:
            stream = next(iter(self._owing))
            self._build_part(stream)
            stream.outlet.mark(stream)
        self._fail_all(error)
        for session in self._ledger.sessions():
            self.close_session(session.id)

    def _flush(self, session: Session, status: dict[str, Any] | None = None) -> None:
        try:
            session.flush(status, draining=self.draining)
        except Exception:
            logging.exception("session %s cannot be sent to: closing it", session.id)
            self.close_session(session.id)

    def _flush_all(self, status: dict[str, Any] | None = None) -> None:
        for session in self._ledger.sessions():
            self._flush(session, status)

    def _tick(self, now: float) -> None:
        for session in self._ledger.sessions():
            silent = now - session.last_heard > self._settings.session_timeout
            if (silent and not self.draining) or session.is_cancelled():
                self.close_session(session.id)
        self._ledger.drop_old_tombstones(now)
        state = (self._process.up, self.draining)
        if now >= self._status_due or state != self._announced:
            self._status_due, self._announced = now + STATUS_SECONDS, state
            status = self._status()
            self._metrics.status(status)
            self._flush_all(status)
        else:
            self._flush_all()
        if self._draining_since is not None:
            self._drain_further(now - self._draining_since)

    def _drain_further(self, waited: float) -> None:
        limit = self._settings.drain_seconds
        if waited > limit:
            self._process.abort([stream.id for stream in self._ledger.streams()])
        if not len(self._ledger) or waited > limit + DRAIN_SLACK_SECONDS:
            self._end_all(EngineDown("The server is shutting down.", code="draining"))
