"""The engine model without Triton: requests in, the engine process behind, text out.

    execute() --submit, generate, ack, abort--> Broker --adds, aborts--> engine process
                                                  ^                          |
    sessions' frames, plain responses <-- pump thread <-- one message a step-'

Threads: Triton's (enters through the public methods), the pump (receives, detokenizes, sends
frames, looks after sessions and the process) and the plain sender. `_lock` guards the maps of
streams and sessions; only the pump touches a stream's text.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tridentlm import __version__
from tridentlm.channel import Step
from tridentlm.config import EngineSettings
from tridentlm.core.request import Request, SamplingParams
from tridentlm.errors import EngineDown, InternalError, InvalidRequest, TridentError
from tridentlm.protocol import STATUS_SECONDS, TOMBSTONE_SECONDS, VERSION
from tridentlm.text import Tokenizer
from tridentlm.triton.metrics import Metrics
from tridentlm.triton.plain import PlainRequest, PlainResponder, PlainSender
from tridentlm.triton.process import EngineProcess
from tridentlm.triton.sessions import FrameSender, Session
from tridentlm.triton.streams import Outlet, TextStream

TICK_SECONDS = 0.1
Ids = npt.NDArray[np.int32]


class Broker:
    """Owns every request between its acceptance and its one terminal output."""

    def __init__(
        self,
        settings: EngineSettings,
        model: str,
        tokenizer: Tokenizer,
        process: EngineProcess,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._model = model
        self._tokenizer = tokenizer
        self._process = process
        self._metrics = metrics
        self._lock = threading.RLock()
        self._streams: dict[int, TextStream] = {}
        self._keys: dict[tuple[str, str], TextStream] = {}
        self._sessions: dict[str, Session] = {}
        self._tombstones: dict[tuple[str, str], float] = {}
        self._numbers = itertools.count(1)
        self._draining_since: float | None = None
        self._status_due = 0.0
        self._announced: tuple[bool, bool] = (False, False)
        self._plain_sender = PlainSender(self._abort_stream)
        self._closing = False
        self._pump = threading.Thread(target=self._run, name="pump", daemon=True)

    def start(self) -> None:
        """Starts the engine process and the pump; returns when the engine can take requests.

        Raises the TridentError that the engine process failed with.
        """
        self._process.start()
        self._pump.start()

    def close(self) -> None:
        """Ends every request with an error, the threads and the engine process."""
        self._closing = True
        self._pump.join(timeout=5)
        self._fail_all(EngineDown("The server is shutting down."))
        for session in self._open_sessions():
            self.close_session(session.id)
        self._plain_sender.close()
        self._process.close()
        self._metrics.close()

    # Requests

    def submit(self, session_id: str, entries: Sequence[dict[str, Any]], ids: Ids) -> list[Any]:
        """Takes a session's requests; for each {"uid", "prompt_tokens"} or {"uid", "error"}.

        `entries[i]` is {"uid", "n", "sampling", "return_token_ids"} and owns the next n of `ids`,
        or {"uid", "error"} when the tokenizer already refused it.
        """
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None:
            raise InvalidRequest("This session is not open.", param="session", code="no_session")
        outcomes: list[dict[str, Any]] = []
        accepted: list[tuple[Request, TextStream]] = []
        offset = 0
        with self._lock:
            for entry in entries:
                uid = str(entry["uid"])
                if "error" in entry:
                    outcomes.append({"uid": uid, "error": entry["error"]})
                    continue
                prompt = ids[offset : offset + entry["n"]]
                offset += entry["n"]
                try:
                    pair = self._admit(
                        (session_id, uid),
                        prompt,
                        entry["sampling"],
                        session,
                        entry["return_token_ids"],
                    )
                except TridentError as error:
                    outcomes.append({"uid": uid, "error": error.payload()})
                    continue
                session.streams[uid] = pair[1]
                accepted.append(pair)
                outcomes.append({"uid": uid, "prompt_tokens": len(prompt)})
            self._process.add([request for request, _ in accepted])
        return outcomes

    def generate(
        self,
        ids: Ids,
        sampling: dict[str, Any],
        responder: PlainResponder,
        *,
        streaming: bool,
        relayed: bool,
    ) -> None:
        """Takes a plain request, whose responses go to `responder`. Raises a TridentError."""
        outlet = PlainRequest(responder, self._plain_sender, streaming=streaming, relayed=relayed)
        with self._lock:
            key = ("", f"plain-{next(self._numbers)}")
            request, stream = self._admit(key, ids, sampling, outlet, keep_ids=True)
            outlet.stream = stream
            self._plain_sender.track(outlet)
            self._process.add([request])

    def abort(self, session_id: str, uids: Sequence[str]) -> None:
        """Ends requests early. An unknown uid may still be on its way: it is remembered a while."""
        with self._lock:
            for uid in uids:
                stream = self._keys.get((session_id, uid))
                if stream is not None:
                    self._process.abort([stream.id])
                else:
                    self._tombstones[session_id, uid] = time.monotonic() + TOMBSTONE_SECONDS

    def passed(self, count: int) -> None:
        """The relay has passed on `count` responses of plain requests."""
        self._plain_sender.passed(count)

    def _admit(
        self,
        key: tuple[str, str],
        prompt: Ids,
        sampling: dict[str, Any],
        outlet: Outlet,
        keep_ids: bool,
    ) -> tuple[Request, TextStream]:
        """Checks one request and enters it in the maps. Raises a TridentError; holds `_lock`."""
        if key in self._keys:
            raise InvalidRequest(f"The uid {key[1]} is in use.", param="uid")
        if not self._process.up:
            raise EngineDown("The engine is starting again; try in a moment.")
        if self._draining_since is not None:
            raise EngineDown("The server is shutting down.", code="draining")
        if self._tombstones.pop(key, None) is not None:
            raise InvalidRequest("The request was aborted before it arrived.", code="aborted")
        if not isinstance(sampling, dict):
            raise InvalidRequest("sampling must be a JSON object.", param="sampling")
        params = SamplingParams.from_mapping(sampling)
        limits = self._process.limits
        limits.check_ids(prompt)
        max_tokens = limits.resolve(len(prompt), params.max_tokens)
        limits.check_queue(len(self._streams))
        now = time.monotonic()
        stops = frozenset(params.stop_token_ids)
        request = Request(
            id=next(self._numbers),
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            seed=_random_seed() if params.seed is None else params.seed % 2**64,
            stop_token_ids=stops if params.ignore_eos else stops | self._process.eos_token_ids,
            deadline=now + params.timeout if params.timeout else float("inf"),
        )
        detokenizer = self._tokenizer.detokenizer(params.skip_special_tokens)
        stream = TextStream(
            request.id,
            key[1],
            outlet,
            len(prompt),
            params,
            detokenizer,
            arrived=now,
            keep_ids=keep_ids,
        )
        self._streams[stream.id] = self._keys[key] = stream
        return request, stream

    def _abort_stream(self, stream: TextStream) -> None:
        with self._lock:
            self._process.abort([stream.id])

    # Sessions

    def open_session(self, session_id: str, sender: FrameSender) -> None:
        """Opens a session, or moves an open one to a new stream."""
        now = time.monotonic()
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None:
                session.move_to(sender, now)
            elif self._draining_since is not None:
                raise EngineDown("The server is shutting down.", code="draining")
            else:
                self._sessions[session_id] = Session(session_id, sender, now)
                self._status_due = 0.0

    def acknowledge(self, session_id: str, seq: int) -> None:
        with self._lock:
            session = self._sessions.get(session_id)
        if session is not None:
            session.acknowledge(seq, time.monotonic())

    def close_session(self, session_id: str) -> None:
        """Forgets the session and aborts its requests."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
            if session is not None:
                self._process.abort([stream.id for stream in session.streams.values()])
        if session is not None:
            session.finish()

    # The server

    def drain(self) -> None:
        """No new requests; running ones finish, at most `drain_seconds`; then sessions end."""
        with self._lock:
            if self._draining_since is None:
                self._draining_since = time.monotonic()

    def flush_cache(self) -> None:
        with self._lock:
            self._process.flush_cache()

    def status(self) -> dict[str, Any]:
        """What `op=status` answers and sessions hear once a second."""
        with self._lock:
            return {
                "protocol": VERSION,
                "version": __version__,
                "model": self._model,
                "up": self._process.up,
                "draining": self._draining_since is not None,
                "sessions": len(self._sessions),
                "unfinished": len(self._streams),
                **self._process.describe(),
            }

    # The pump

    def _run(self) -> None:
        next_tick = 0.0
        while not self._closing:
            event = self._process.receive(TICK_SECONDS)
            if isinstance(event, Step):
                self._take_step(event)
            elif event is not None:
                self._fail_all(event)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                self._tick(now)

    def _take_step(self, step: Step) -> None:
        """One engine step: text for every row, then one frame for every session with news."""
        streams, output = self._streams, step.output
        now = time.monotonic()
        for id, cached_tokens in output.cached:
            if (stream := streams.get(id)) is not None:
                stream.set_cached(cached_tokens)
                self._metrics.first_token(now - stream.arrived)
        sessions: set[Session] = set()
        ended: list[TextStream] = []
        rows = zip(output.ids.tolist(), output.tokens.tolist(), output.finish.tolist(), strict=True)
        for id, token, finish in rows:
            stream = streams.get(id)
            if stream is None:
                continue
            if id in output.errors:
                stream.fail(InternalError(output.errors[id]))
            stream.feed(token, finish)
            if stream.end is not None:
                ended.append(stream)
                if not finish:
                    self._abort_stream(stream)
            outlet = stream.outlet
            outlet.mark(stream)
            if isinstance(outlet, Session):
                sessions.add(outlet)
        self._forget(ended)
        for session in sessions:
            self._flush(session)
        self._metrics.step(step, now)
        self._metrics.ended(ended, now)

    def _forget(self, ended: Sequence[TextStream]) -> None:
        with self._lock:
            for stream in ended:
                self._streams.pop(stream.id, None)
                outlet = stream.outlet
                if isinstance(outlet, Session):
                    outlet.streams.pop(stream.uid, None)
                    self._keys.pop((outlet.id, stream.uid), None)
                else:
                    self._keys.pop(("", stream.uid), None)

    def _fail_all(self, error: TridentError) -> None:
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.fail(error)
            stream.outlet.mark(stream)
        self._forget(streams)
        for session in self._open_sessions():
            self._flush(session)
        self._metrics.ended(streams, time.monotonic())

    def _flush(self, session: Session, status: dict[str, Any] | None = None) -> None:
        try:
            session.flush(status)
        except Exception:
            logging.exception("session %s cannot be sent to: closing it", session.id)
            self.close_session(session.id)

    def _open_sessions(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())

    def _tick(self, now: float) -> None:
        """Housekeeping, ten times a second: gone sessions, status frames, draining, metrics."""
        for session in self._open_sessions():
            silent = now - session.last_heard > self._settings.session_timeout
            if silent or session.is_cancelled():
                self.close_session(session.id)
        with self._lock:
            self._tombstones = {k: t for k, t in self._tombstones.items() if t > now}
        state = (self._process.up, self._draining_since is not None)
        if now >= self._status_due or state != self._announced:
            self._status_due, self._announced = now + STATUS_SECONDS, state
            status = self.status()
            self._metrics.status(status)
            for session in self._open_sessions():
                self._flush(session, status)
        else:
            for session in self._open_sessions():
                self._flush(session)
        if self._draining_since is not None:
            self._drain_further(now)

    def _drain_further(self, now: float) -> None:
        with self._lock:
            waited = now - (self._draining_since or now)
            if self._streams and waited > self._settings.drain_seconds:
                self._process.abort(list(self._streams))
        if not self._streams or waited > self._settings.drain_seconds + 2:
            self._fail_all(EngineDown("The server is shutting down.", code="draining"))
            for session in self._open_sessions():
                self.close_session(session.id)


def _random_seed() -> int:
    return int.from_bytes(os.urandom(8), "little")
