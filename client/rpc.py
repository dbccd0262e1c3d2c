"""ModelStreamInfer calls: one (`Rpc`), and all that are still open (`Calls`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc

from tridentlm.errors import EngineDown
from tridentlm.protocol import ROLL_BYTES, ROLL_FRAMES


class Rpc:
    """One bidirectional gRPC stream.

    Triton keeps every message of a stream until the stream ends, so a long-lived user watches
    `full` and moves to a new one. The end is always the same: `half_close`, then read to the end of
    the stream. `cancel` is for a server that does not answer any more: cancelling a call while its
    last response arrives makes Triton hold the model for ever.
    """

    def __init__(self, stub: Any) -> None:
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._call = stub.ModelStreamInfer(self._requests())
        self._messages = 0
        self._bytes = 0
        self._cancelled = False
        self.closing = False

    async def _requests(self) -> AsyncIterator[Any]:
        while (request := await self._outbox.get()) is not None:
            yield request

    @property
    def full(self) -> bool:
        return self._messages >= ROLL_FRAMES or self._bytes >= ROLL_BYTES

    def send(self, request: Any) -> None:
        self._count(request)
        self._outbox.put_nowait(request)

    def half_close(self) -> None:
        """Nothing more will be sent. The server ends the stream after its last response."""
        if not self.closing:
            self.closing = True
            self._outbox.put_nowait(None)

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()

    async def read(self) -> Any:
        """The next ModelStreamInferResponse, None at the end. Raises EngineDown when it breaks.

        Cancelling a task inside `read` cancels the call: end it by `half_close` or `cancel`.
        """
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise EngineDown(f"The connection to Triton failed: {error.details()}") from None
        except asyncio.CancelledError:
            if self._cancelled:
                raise EngineDown("The server does not answer any more.") from None
            raise
        if response is grpc.aio.EOF:
            return None
        self._count(response)
        return response

    async def read_to_end(self) -> None:
        """Drops what still comes, up to the end of the stream."""
        try:
            while await self.read() is not None:
                pass
        except EngineDown:
            pass

    def _count(self, message: Any) -> None:
        self._messages += 1
        self._bytes += message.ByteSize()


class Calls:
    """Tasks that each read one call to its end."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], Rpc] = {}

    def add(self, rpc: Rpc, reader: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(reader)
        self._tasks[task] = rpc
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def ended(self, timeout: float) -> None:
        """Waits `timeout` seconds for the end of all calls and cancels what lasts longer."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(list(self._tasks), timeout=timeout)
        for task in late:
            self._tasks[task].cancel()
        if late:
            await asyncio.wait(late)
