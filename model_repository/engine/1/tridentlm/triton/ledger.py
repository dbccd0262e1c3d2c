"""Who is here: every accepted request until its end, open sessions, and recent early aborts."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from tridentlm.protocol import TOMBSTONE_SECONDS
from tridentlm.streams import TextStream
from tridentlm.triton.sessions import FrameSender, Session

Key = tuple[str, str]
"""(session id, uid); the session id is "" for plain requests."""


class Ledger:
    """Safe to use from several threads. `lock` makes several steps one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._streams: dict[int, TextStream] = {}
        self._keys: dict[Key, TextStream] = {}
        self._clients: dict[int, str] = {}  # whose each request is
        self._held: Counter[str] = Counter()
        self._sessions: dict[str, Session] = {}
        self._tombstones: dict[Key, float] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def held_by(self, client: str) -> int:
        """Its requests that have not ended."""
        return self._held[client]

    def enter(self, key: Key, stream: TextStream, client: str) -> None:
        with self.lock:
            self._clients[stream.id] = client
            self._held[client] += 1
            self._streams[stream.id] = self._keys[key] = stream
            if isinstance(stream.outlet, Session):
                stream.outlet.streams[stream.uid] = stream

    def get(self, id: int) -> TextStream | None:
        return self._streams.get(id)

    def find(self, key: Key) -> TextStream | None:
        return self._keys.get(key)

    def streams(self) -> list[TextStream]:
        with self.lock:
            return list(self._streams.values())

    def forget(self, ended: Iterable[TextStream]) -> None:
        with self.lock:
            for stream in ended:
                self._streams.pop(stream.id, None)
                client = self._clients.pop(stream.id, None)
                if client is not None:
                    self._held[client] -= 1
                    if not self._held[client]:
                        del self._held[client]
                session = stream.outlet if isinstance(stream.outlet, Session) else None
                self._keys.pop(("" if session is None else session.id, stream.uid), None)
                if session is not None:
                    session.streams.pop(stream.uid, None)

    def note_early_abort(self, key: Key) -> None:
        """An abort may overtake its request: remembered for TOMBSTONE_SECONDS."""
        with self.lock:
            self._tombstones[key] = time.monotonic() + TOMBSTONE_SECONDS

    def take_early_abort(self, key: Key) -> bool:
        with self.lock:
            return self._tombstones.pop(key, None) is not None

    def drop_old_tombstones(self, now: float) -> None:
        with self.lock:
            self._tombstones = {k: t for k, t in self._tombstones.items() if t > now}

    def open_session(self, id: str, sender: FrameSender) -> None:
        """Opens a session, or moves an open one to another stream."""
        now = time.monotonic()
        with self.lock:
            session = self._sessions.get(id)
            if session is None:
                self._sessions[id] = Session(id, sender, now)
            else:
                session.move_to(sender, now)

    def session(self, id: str) -> Session | None:
        return self._sessions.get(id)

    def sessions(self) -> Sequence[Session]:
        with self.lock:
            return list(self._sessions.values())

    def close_session(self, id: str) -> list[TextStream]:
        """Forgets the session and ends its streams to the client; its requests are returned."""
        with self.lock:
            session = self._sessions.pop(id, None)
            streams = [] if session is None else list(session.streams.values())
        if session is not None:
            session.finish()
        return streams
