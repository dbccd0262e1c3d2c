"""Questions to Triton's tokenizer model, for what the proxy cannot know: it has no tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import grpc
import orjson
from tritonclient.grpc import service_pb2_grpc

from openai_proxy.sessions import tls_options
from openai_proxy.settings import ProxySettings
from tridentlm.errors import EngineDown, InternalError, InvalidRequest, RequestTimeout
from tridentlm_client import wire

ASK_SECONDS = 30.0


class TextLike(Protocol):
    """The part of `TextService` that the endpoints use."""

    async def ask(self, op: str, body: Mapping[str, Any]) -> dict[str, Any]: ...

    async def close(self) -> None: ...


class TextService:
    """Unary calls on a channel of their own, which needs no session; made in the event loop."""

    def __init__(self, settings: ProxySettings) -> None:
        tls = tls_options(settings)
        self._model = settings.engine_names().tokenizer
        self._target = settings.triton
        self._credentials = None if tls is None else tls.credentials()
        self._ending: set[asyncio.Task[None]] = set()
        self._connect()

    def _connect(self) -> None:
        self._channel = wire.open_channel(self._target, self._credentials)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def ask(self, op: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The tokenizer's answer to `op`. Raises the TridentError that it refuses with."""
        try:
            packed = orjson.dumps(body)
        except TypeError as error:
            raise InvalidRequest(f"The request cannot be written as JSON: {error}.") from None
        request = wire.infer_request(
            self._model, strings={"op": [op], "request": [packed]}, parameters={}
        )
        try:
            response = await self._infer(request)
        except grpc.aio.AioRpcError as error:
            raise _as_trident_error(error) from None
        answer = wire.read_string(response, "answer")
        if answer is None:
            raise InternalError("The tokenizer did not answer.")
        value: dict[str, Any] = orjson.loads(answer)
        return value

    async def _infer(self, request: Any) -> Any:
        try:
            return await self._stub.ModelInfer(request, timeout=ASK_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        # A channel that has failed waits longer and longer before it tries again; a new one does
        # not. Others may still use the old one: it ends after them.
        ending = asyncio.get_running_loop().create_task(self._channel.close(ASK_SECONDS))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        self._connect()
        return await self._stub.ModelInfer(request, timeout=ASK_SECONDS)

    async def close(self) -> None:
        await self._channel.close()


def _as_trident_error(error: Any) -> Exception:
    details = error.details() or ""
    if wire.find_payload(details) is not None:
        return wire.parse_error(details)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestTimeout(f"The tokenizer took longer than {ASK_SECONDS:g} s.")
    return EngineDown(f"The tokenizer cannot be asked: {details}")
