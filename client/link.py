"""The life of one session id: its two streams to the server, from the first frame to the last.

    engine   --frames-->                   _pump -> on_frame -> Stream, Stream, ...
    commands <--submit/ack/abort/close--   submit, _tick, abort, close

    opening --first frame--> connected --"unavailable"--> draining --FINAL--> ended
                                 |                                             ^
                                 `-- FINAL, a gap, no frame for too long, -----'
                                     a broken stream, close()

The session's stream rolls: a new call with the same session id is opened beside the old one, and
its frames are read after the old one's FINAL, because two streams have no mutual order.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from tridentlm.errors import EngineDown, InternalError, TridentError
from tridentlm.protocol import ACK_FRAMES, ACK_SECONDS, STALE_SECONDS, VERSION, Op
from tridentlm_client import wire
from tridentlm_client.commands import Commands
from tridentlm_client.rpc import Calls, Rpc
from tridentlm_client.stream import Delta, End, Stream, Submission
from tridentlm_client.submitter import Submitter

TICK_SECONDS = 0.25
LAST_WORDS_SECONDS = 3.0
DRAIN_SECONDS = 60.0

log = logging.getLogger(__name__)


class Link:
    """One session id. `run` carries it from start to end; everything else may be called meanwhile.

    `connected` is set by the first frame, which calls `on_connected`. `status` is the last one
    seen. `trouble` is why the server takes no more requests while `draining`. `uids` numbers the
    requests.
    """

    def __init__(
        self,
        stub: Any,
        engine: str,
        submit: str,
        uids: Iterator[int],
        on_connected: Callable[[], None],
    ) -> None:
        self.session_id = secrets.token_hex(16)
        self.status: dict[str, Any] | None = None
        self.connected = False
        self.draining = False
        self.trouble: TridentError | None = None
        self._loop = asyncio.get_running_loop()
        self._stub, self._engine, self._uids = stub, engine, uids
        self._on_connected = on_connected
        self._streams: dict[str, Stream] = {}
        self._seq = 0
        self._acked = 0
        self._ack_time = self._loop.time()
        self._quiet_ticks = 0
        self._closed = False
        self._limit: asyncio.Handle | None = None
        self._aborts: list[str] = []
        self._retired = Calls()
        self._commands = Commands(stub, self._on_lost)
        self._submitter = Submitter(self._commands, submit, self.session_id, self._streams)
        self._frames = self._open()
        self._next: Rpc | None = None

    # ---- the life

    async def run(self) -> TridentError:
        """Dispatches frames until the session ends; returns why it did.

        All streams have their end by then, and all gRPC calls are read to theirs.
        """
        ticks = self._loop.create_task(self._tick())
        broken = False
        try:
            reason = await self._pump()
        except TridentError as error:
            reason, broken = error, True
        except Exception as error:
            log.exception("session %s failed", self.session_id)
            reason, broken = InternalError(f"The session failed: {error!r}"), True
        ticks.cancel()
        self._end_streams(reason)
        await self._end_calls(broken)
        return reason

    async def _pump(self) -> TridentError:
        while True:
            response = await self._frames.read()
            if response is None:
                return EngineDown("The server ended the session.")
            if response.error_message:
                return wire.parse_error(response.error_message)
            frame = wire.read_string(response.infer_response, "frame")
            if frame is not None:
                self.on_frame(frame)
            if wire.is_final(response.infer_response):
                if self._next is None:
                    return EngineDown("The server drains or restarts; the session has ended.")
                self._retire(self._frames)
                self._frames, self._next = self._next, None
            elif self._frames.full and self._next is None and not self.draining:
                self._next = self._open()

    def _open(self) -> Rpc:
        rpc = Rpc(self._stub)
        rpc.send(self._request(Op.SESSION, protocol=VERSION))
        return rpc

    def _retire(self, rpc: Rpc) -> None:
        rpc.half_close()
        self._retired.add(rpc, rpc.read_to_end())

    def _end_streams(self, reason: TridentError) -> None:
        self.draining = True
        message = "The session was closed." if self._closed else reason.message
        self._commands.fail(EngineDown(message))
        self._submitter.fail(EngineDown(message))
        for uid in list(self._streams):
            stream = self._streams.pop(uid, None)
            if stream is not None:
                stream.end = End.from_error(EngineDown(message))
                self._notify(stream)

    async def _end_calls(self, broken: bool) -> None:
        if self._limit is not None:
            self._limit.cancel()
        if broken:
            self._commands.send(self._request(Op.CLOSE))
            self.cancel()
        self._commands.half_close()
        for rpc in filter(None, (self._frames, self._next)):
            self._retire(rpc)
        await self._commands.ended(LAST_WORDS_SECONDS)
        await self._retired.ended(LAST_WORDS_SECONDS)

    def close(self) -> None:
        """Asks the server to forget the session and abort its requests; `run` then ends."""
        self._closed = True
        self._commands.send(self._request(Op.CLOSE))
        self.drain()

    def drain(self) -> None:
        """Sends nothing more and lets the server end the session, for DRAIN_SECONDS at most."""
        if self.draining:
            return
        self.draining = True
        self._commands.half_close()
        for rpc in filter(None, (self._frames, self._next)):
            rpc.half_close()
        self._limit = self._loop.call_later(DRAIN_SECONDS, self.cancel)

    def cancel(self) -> None:
        """Gives up on a server that does not end its streams."""
        for rpc in filter(None, (self._frames, self._next)):
            rpc.cancel()

    def _on_lost(self, error: TridentError) -> None:
        self.trouble = self.trouble or error
        self.drain()

    async def _tick(self) -> None:
        # Counts ticks, not seconds: when this process was busy for long, its frames are unread,
        # not missing.
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._quiet_ticks += 1
            if self._quiet_ticks * TICK_SECONDS > STALE_SECONDS:
                self.cancel()
                return
            if self._seq and self._loop.time() - self._ack_time >= ACK_SECONDS:
                self._ack()

    # ---- frames

    def on_frame(self, data: bytes | memoryview) -> None:
        """Hands one frame to its streams. Raises InternalError for a gap in the numbering."""
        seq, uids, texts, counts, ends, extras, status = orjson.loads(data)
        if seq != self._seq + 1:
            raise InternalError(f"Frame {seq} came after frame {self._seq}.")
        self._seq = seq
        self._quiet_ticks = 0
        streams = self._streams
        for uid, end in ends.items():
            if uid in streams:
                streams[uid].end = End.from_wire(end)
        for uid, text, count in zip(uids, texts, counts, strict=True):
            stream = streams.get(uid)
            if stream is not None:
                extra = extras.get(uid) if extras else None
                stream._pending.append(Delta(text, count, extra))
                if stream._waiter is not None or stream.on_news is not None:
                    self._notify(stream)
        for uid in ends:
            stream = streams.pop(uid, None)
            if stream is not None and uid not in uids:
                self._notify(stream)
        if status is not None:
            self.status = status
            if not self.connected:
                self.connected = True
                self._on_connected()
        if seq - self._acked >= ACK_FRAMES:
            self._ack()

    def _notify(self, stream: Stream) -> None:
        try:
            stream.notify()
        except Exception:
            log.exception("on_news of request %s failed", stream.uid)

    # ---- commands

    def _request(self, op: str, *, uids: Sequence[str] = (), **parameters: int) -> Any:
        strings: dict[str, Sequence[str]] = {"op": [op]}
        if uids:
            strings["uid"] = uids
        return wire.infer_request(
            self._engine,
            strings=strings,
            parameters={"session": self.session_id, **parameters},
            empty_final=True,
        )

    def _ack(self) -> None:
        self._acked, self._ack_time = self._seq, self._loop.time()
        self._commands.send(self._request(Op.ACK, seq=self._seq))

    def abort(self, uid: str) -> None:
        """Ends a request early. Calls of one loop iteration travel together."""
        if not self._aborts:
            self._loop.call_soon(self._send_aborts)
        self._aborts.append(uid)

    def _send_aborts(self) -> None:
        uids, self._aborts = self._aborts, []
        self._commands.send(self._request(Op.ABORT, uids=uids))

    async def ask(self, op: str) -> bytes | None:
        """Sends an operation that concerns the engine and returns its `frame` output, if any."""
        frame = wire.read_string(await self._commands.ask(self._request(op)), "frame")
        return None if frame is None else bytes(frame)

    async def submit(self, submissions: Sequence[Submission]) -> list[Stream | TridentError]:
        """One outcome for each submission, in order. Cancelled, it aborts what it has submitted."""
        streams = [Stream(f"{next(self._uids):x}", self.abort, self._forget) for _ in submissions]
        return await self._submitter.submit(submissions, streams)

    def _forget(self, uid: str) -> None:
        self._streams.pop(uid, None)
