"""Turns single submissions into few requests: an ensemble request costs the server 0.8 to 2 ms."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson

from tridentlm.errors import InternalError, InvalidRequest, TridentError, from_payload
from tridentlm_client import wire
from tridentlm_client.commands import Commands
from tridentlm_client.stream import Stream, Submission

MAX_BATCH = 64
MAX_UNANSWERED = 4
MAX_HOLD_SECONDS = 0.004


class _Entry:
    """A submission on its way: what to send, and where its outcome goes."""

    __slots__ = ("outcome", "packed", "stream")

    def __init__(self, stream: Stream, packed: bytes) -> None:
        self.stream = stream
        self.packed = packed
        self.outcome: asyncio.Future[Stream | TridentError] = (
            asyncio.get_running_loop().create_future()
        )


class Submitter:
    """Sends at once when little is on its way, else what has gathered when an answer comes.

    A submission waits MAX_HOLD_SECONDS at most. `streams` is the map that frames are handed out by;
    rejected requests are taken out of it.
    """

    def __init__(
        self, commands: Commands, model: str, session_id: str, streams: dict[str, Stream]
    ) -> None:
        self._commands = commands
        self._model = model
        self._session_id = session_id
        self._streams = streams
        self._unsent: list[_Entry] = []
        self._unanswered = 0
        self._timer: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(
        self, submissions: Sequence[Submission], streams: Sequence[Stream]
    ) -> list[Stream | TridentError]:
        """One outcome for each submission, in order. Cancelled, it aborts what it has submitted."""
        entries = [self._add(*pair) for pair in zip(submissions, streams, strict=True)]
        try:
            return [e if isinstance(e, TridentError) else await e.outcome for e in entries]
        except asyncio.CancelledError:
            for entry in entries:
                if isinstance(entry, _Entry):
                    entry.outcome.cancel()
                    entry.stream.close()
            raise

    def _add(self, submission: Submission, stream: Stream) -> _Entry | TridentError:
        try:
            entry = _Entry(stream, submission.pack())
        except TypeError as error:
            return InvalidRequest(f"The request cannot be written as JSON: {error}.")
        # Frames may overtake the outcome, so the stream is known before it is submitted.
        self._streams[stream.uid] = stream
        self._unsent.append(entry)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            if self._unanswered < MAX_UNANSWERED:
                self._timer = loop.call_soon(self._flush)
            else:
                self._timer = loop.call_later(MAX_HOLD_SECONDS, self._flush)
        return entry

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [entry for entry in self._unsent if not entry.outcome.done()]
        self._unsent = []
        for start in range(0, len(batch), MAX_BATCH):
            self._unanswered += 1
            sending = self._send(batch[start : start + MAX_BATCH])
            task = asyncio.get_running_loop().create_task(sending)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, batch: list[_Entry]) -> None:
        try:
            outcomes = await self._ask(batch)
        except TridentError as error:
            outcomes = [{"error": error.payload()}] * len(batch)
        self._unanswered -= 1
        for entry, outcome in zip(batch, outcomes, strict=True):
            self._settle(entry, outcome)
        if self._unsent:
            self._flush()

    async def _ask(self, batch: list[_Entry]) -> list[dict[str, Any]]:
        request = wire.infer_request(
            self._model,
            strings={
                "request": [entry.packed for entry in batch],
                "uid": [entry.stream.uid for entry in batch],
            },
            parameters={"session": self._session_id},
        )
        answer = wire.read_string(await self._commands.ask(request), "outcomes")
        outcomes: list[dict[str, Any]] = orjson.loads(answer) if answer is not None else []
        if len(outcomes) != len(batch):
            raise InternalError("The server's answer does not fit the submission.")
        return outcomes

    def _settle(self, entry: _Entry, outcome: dict[str, Any]) -> None:
        stream, error = entry.stream, outcome.get("error")
        if error is not None:
            self._streams.pop(stream.uid, None)
        if entry.outcome.done():
            return
        if error is not None:
            entry.outcome.set_result(from_payload(error))
        else:
            stream.prompt_tokens = outcome.get("prompt_tokens", 0)
            entry.outcome.set_result(stream)

    def fail(self, error: TridentError) -> None:
        """Answers what was not sent yet."""
        waiting, self._unsent = self._unsent, []
        for entry in waiting:
            self._settle(entry, {"error": error.payload()})
