"""A session: one long-lived response stream that carries the news of all requests of a client.

    streams of the session --mark--> dirty --flush, once a step--> one frame --> responder
                                                                      ^ at most MAX_UNACKED ahead:
                                                                        beyond, news merge in place

Rolling: a client opens the same session on a new stream, and the pump moves over between two
frames: the old stream gets its FINAL, the next frame (seq + 1) goes to the new one.
"""

from __future__ import annotations

from typing import Any, Protocol

from tridentlm.protocol import MAX_UNACKED, Frame
from tridentlm.streams import TextStream


class FrameSender(Protocol):
    """One stream to the client."""

    def send_frame(self, frame: bytes) -> None: ...

    def finish(self) -> None: ...

    def is_cancelled(self) -> bool: ...


class Session:
    """State of one session. `flush`, `mark` and `roll` run in the pump thread only."""

    def __init__(self, id: str, sender: FrameSender, now: float) -> None:
        self.id = id
        self.streams: dict[str, TextStream] = {}
        self.last_heard = now
        self._sender = sender
        self._next_sender: FrameSender | None = None
        self._dirty: dict[str, TextStream] = {}
        self._seq = 0
        self._acked = 0

    def mark(self, stream: TextStream) -> None:
        self._dirty[stream.uid] = stream

    def acknowledge(self, seq: int, now: float) -> None:
        """The client has everything up to `seq`."""
        self._acked = max(self._acked, seq)
        self.last_heard = now

    def move_to(self, sender: FrameSender, now: float) -> None:
        """The client opened this session on another stream; the pump moves over in `roll`."""
        superseded, self._next_sender = self._next_sender, sender
        self.last_heard = now
        if superseded is not None:
            superseded.finish()

    def roll(self) -> None:
        if self._next_sender is not None:
            old, self._sender, self._next_sender = self._sender, self._next_sender, None
            old.finish()

    def flush(self, status: dict[str, Any] | None = None, *, draining: bool = False) -> None:
        """Sends one frame with all news, unless the client is too far behind to take it.

        A draining server no longer hears acknowledgements, so then nobody is taken to be behind.
        """
        self.roll()
        behind = self._seq - self._acked >= MAX_UNACKED and not draining
        if behind or (not self._dirty and status is None):
            return
        dirty, self._dirty = self._dirty, {}
        texts, counts = [], []
        ends: dict[str, dict[str, Any]] = {}
        extras: dict[str, dict[str, Any]] = {}
        for uid, stream in dirty.items():
            text, count, ids = stream.take()
            texts.append(text)
            counts.append(count)
            if ids:
                extras[uid] = {"token_ids": ids}
            if stream.log is not None and (told := stream.take_logprobs()):
                extras.setdefault(uid, {}).update(told)
            if stream.end is not None and not stream.owing:
                ends[uid] = stream.end
        self._seq += 1
        frame = Frame(self._seq, list(dirty), texts, counts, ends, extras, status)
        self._sender.send_frame(frame.pack())

    def is_cancelled(self) -> bool:
        return self._sender.is_cancelled()

    def finish(self) -> None:
        """FINAL on every stream of the session."""
        self.roll()
        self._sender.finish()
