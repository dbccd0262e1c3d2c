"""The command stream of a session: submissions, acknowledgements, aborts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from tridentlm.errors import EngineDown, TridentError
from tridentlm_client import wire
from tridentlm_client.rpc import Calls, Rpc

STUCK_SECONDS = 0.5
"""A request that has no answer for so long may have reached an engine that died."""


class Commands:
    """The stream for everything but frames: submissions, acknowledgements, aborts.

    Requests are matched to answers by id, so moving to a new call needs no pause: the old one is
    half-closed and read to its end beside the new one. That is done behind a request that is stuck,
    too. When an engine's process has died and its model is being loaded again, Triton 2.51 refuses
    a request and fails the one that was stuck within the same milliseconds. On one call that makes
    it abort, with all its models, about one time in nine: gRPC finds a second message in a buffer.

    `on_lost(error)` is called when the stream breaks or Triton says that it takes no requests.
    """

    def __init__(self, stub: Any, on_lost: Callable[[TridentError], None]) -> None:
        self._stub = stub
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._sent: dict[str, float] = {}  # the current call's without an answer, the oldest first
        self._calls = Calls()
        self._closing = False
        self._rpc = self._open()

    def _open(self) -> Rpc:
        rpc = Rpc(self._stub)
        self._calls.add(rpc, self._read(rpc))
        return rpc

    def send(self, request: Any) -> None:
        """Sends a request whose answer, if only an empty one, nobody waits for.

        The request's id is set here. After `half_close` it does nothing.
        """
        if self._closing:
            return
        now = asyncio.get_running_loop().time()
        if self._rpc.full or now - next(iter(self._sent.values()), now) > STUCK_SECONDS:
            self._rpc.half_close()
            self._rpc = self._open()
            self._sent.clear()
        request.id = str(next(self._ids))
        self._sent[request.id] = now
        self._rpc.send(request)

    async def ask(self, request: Any) -> Any:
        """Sends a request and waits for its ModelInferResponse. Raises TridentError."""
        if self._closing:
            raise EngineDown("The session ends.")
        answer = asyncio.get_running_loop().create_future()
        self.send(request)
        self._answers[request.id] = answer
        try:
            return await answer
        finally:
            del self._answers[request.id]

    async def _read(self, rpc: Rpc) -> None:
        try:
            while (response := await rpc.read()) is not None:
                self._take(response)
            if not rpc.closing:
                self._lose(EngineDown("The server ended the stream."))
        except TridentError as error:
            self._lose(error)

    def _take(self, response: Any) -> None:
        text = response.error_message
        self._sent.pop(response.infer_response.id, None)
        answer = self._answers.get(response.infer_response.id)
        if answer is not None and not answer.done():
            if text:
                answer.set_exception(wire.parse_error(text))
            else:
                answer.set_result(response.infer_response)
        if text and wire.says_unavailable(text):
            self._on_lost(EngineDown(text))

    def _lose(self, error: TridentError) -> None:
        self.fail(error)
        self._on_lost(error)

    def fail(self, error: TridentError) -> None:
        """Ends every wait for an answer."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    def half_close(self) -> None:
        self._closing = True
        self._rpc.half_close()

    async def ended(self, timeout: float) -> None:
        """Waits `timeout` seconds for the end of every call, then cancels."""
        await self._calls.ended(timeout)
