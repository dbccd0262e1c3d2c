"""`Session`: the connection to one Triton server, kept up for as long as it is open."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Sequence
from typing import Any

import orjson
from tritonclient.grpc import service_pb2_grpc

from tridentlm.errors import EngineDown, TridentError
from tridentlm.protocol import Op
from tridentlm_client import wire
from tridentlm_client.link import Link
from tridentlm_client.stream import Stream, Submission
from tridentlm_client.wire import TlsOptions

MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 2.0
CLOSE_SECONDS = 3.0

log = logging.getLogger(__name__)


class Session:
    """Submits requests to a TridentLM model repository and hands out their output as it comes.

        async with Session("localhost:8001") as session:
            [outcome] = await session.submit([Submission(prompt="Hello")])
            if isinstance(outcome, TridentError):
                raise outcome
            async for delta in outcome:
                print(delta.text, end="", flush=True)

    It connects again by itself when the server drains, restarts or falls silent, under a new
    session id; requests that were running then end with an EngineDown error. All methods belong to
    the event loop in which `start` was called.
    """

    def __init__(
        self,
        target: str,
        *,
        engine: str = "engine",
        submit: str = "submit",
        tls: TlsOptions | None = None,
    ) -> None:
        self.target = target
        self._engine, self._submit_model = engine, submit
        self._credentials = None if tls is None else tls.credentials()
        self._uids = itertools.count(1)
        self._status: dict[str, Any] | None = None
        self._link: Link | None = None
        self._error: TridentError = EngineDown(f"Triton at {target} was not reached yet.")
        self._closing = asyncio.Event()
        self._connected = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Session:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def start(self, timeout: float = 60.0) -> None:
        """Connects, trying again with back-off; returns after the session's first frame.

        Raises the last error after `timeout` seconds. It goes on trying until `close`.
        """
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())
        if not await _happens(self._connected, timeout):
            raise self._error.with_traceback(None)

    async def close(self) -> None:
        """Aborts what runs, ends the session and closes the connection. Takes seconds at most."""
        self._closing.set()
        if self._keeper is None:
            return
        if self._link is not None:
            self._link.close()
        await asyncio.wait([self._keeper], timeout=CLOSE_SECONDS)
        if self._link is not None:
            self._link.cancel()
        await self._keeper
        self._keeper = None

    @property
    def status(self) -> dict[str, Any] | None:
        """The last status object seen, which the server sends once a second."""
        if self._link is not None and self._link.status is not None:
            self._status = self._link.status
        return self._status

    @property
    def ready(self) -> bool:
        """Connected, frames arrive, and the engine is up and takes requests."""
        link = self._usable()
        if link is None or link.status is None:
            return False
        return bool(link.status.get("up")) and not link.status.get("draining")

    async def submit(self, submissions: Sequence[Submission]) -> list[Stream | TridentError]:
        """One outcome for each submission, in order: its stream once it is admitted, or the error.

        Submissions of one moment travel together. Cancelling the call aborts all of them.
        """
        link = self._usable()
        if link is None:
            return [self._unusable() for _ in submissions]
        return await link.submit(submissions)

    def abort(self, uid: str) -> None:
        """Ends a running request early; its stream's `end` then says abort."""
        link = self._usable()
        if link is not None:
            link.abort(uid)

    async def fetch_status(self) -> dict[str, Any]:
        """Asks the engine for its status now. Raises EngineDown without a connection."""
        answer = await self._ask(Op.STATUS)
        status: dict[str, Any] = orjson.loads(answer or b"{}")
        return status

    async def flush_cache(self) -> None:
        """Empties the engine's prefix cache. Raises EngineDown without a connection."""
        await self._ask(Op.FLUSH_CACHE)

    async def _ask(self, op: str) -> bytes | None:
        link = self._usable()
        if link is None:
            raise self._unusable()
        return await link.ask(op)

    def _usable(self) -> Link | None:
        link = self._link
        usable = link is not None and link.connected and not link.draining
        return link if usable else None

    def _unusable(self) -> EngineDown:
        trouble = self._link.trouble if self._link is not None else None
        error = EngineDown("The session was closed.") if self._closing.is_set() else trouble
        message = (error or self._error).message
        return EngineDown(f"No session with Triton at {self.target}: {message}")

    async def _keep(self) -> None:
        delay = MIN_BACKOFF_SECONDS
        while not self._closing.is_set():
            channel = wire.open_channel(self.target, self._credentials)
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            link = Link(stub, self._engine, self._submit_model, self._uids, self._connected.set)
            self._link = link
            self._error = await link.run()
            self._status, self._link = self.status, None
            await channel.close()
            if link.connected:
                delay = MIN_BACKOFF_SECONDS
            if not self._closing.is_set():
                log.info("session with %s ended: %s", self.target, self._error)
                await _happens(self._closing, delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, MAX_BACKOFF_SECONDS)


async def _happens(event: asyncio.Event, timeout: float) -> bool:
    """Waits `timeout` seconds for the event; False when it did not come.

    Unlike `asyncio.wait_for` before Python 3.12, it never loses a cancellation that comes together
    with the event.
    """
    waiter = asyncio.get_running_loop().create_task(event.wait())
    try:
        await asyncio.wait([waiter], timeout=timeout)
    finally:
        waiter.cancel()
    return event.is_set()
