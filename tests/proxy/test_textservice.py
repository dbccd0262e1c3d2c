"""Questions to the tokenizer model over gRPC: what is sent, what errors become, a new start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import orjson
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from openai_proxy.settings import ProxySettings
from openai_proxy.textservice import TextService
from tests.proxy.faketriton import serving
from tridentlm.errors import EngineDown, InternalError, InvalidRequest, TridentError
from tridentlm_client.wire import pack_strings


class FakeTokenizer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, reply: Callable[[], Any]) -> None:
        self._reply = reply
        self.asked: list[Any] = []

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        reply = self._reply()
        if isinstance(reply, tuple):
            await context.abort(*reply)
        response = service_pb2.ModelInferResponse(model_name=request.model_name)
        if reply is not None:
            response.outputs.add(name="answer", datatype="BYTES", shape=[1])
            response.raw_output_contents.append(pack_strings([orjson.dumps(reply)]))
        return response


@asynccontextmanager
async def service(port: int) -> AsyncIterator[TextService]:
    text = TextService(ProxySettings(triton=f"127.0.0.1:{port}", tokenizer_model="tok"))
    try:
        yield text
    finally:
        await text.close()


def test_a_question_names_its_operation_and_carries_json(port: int) -> None:
    async def run() -> None:
        async with (
            serving(port, FakeTokenizer(lambda: {"tokens": [1]})) as tokenizer,
            service(port) as text,
        ):
            assert await text.ask("tokenize", {"prompt": "é"}) == {"tokens": [1]}
            [request] = tokenizer.asked
            assert request.model_name == "tok"
            assert [i.name for i in request.inputs] == ["op", "request"]
            packed = pack_strings([orjson.dumps({"prompt": "é"})])
            assert list(request.raw_input_contents) == [pack_strings(["tokenize"]), packed]

    asyncio.run(run())


REFUSAL = orjson.dumps(InvalidRequest("no", param="tokens").payload()).decode()


@pytest.mark.parametrize(
    ("reply", "expected", "param"),
    [
        ((grpc.StatusCode.INVALID_ARGUMENT, REFUSAL), InvalidRequest, "tokens"),
        ((grpc.StatusCode.UNAVAILABLE, "unknown model"), EngineDown, None),
        ((grpc.StatusCode.INTERNAL, "stub died"), EngineDown, None),
        (None, InternalError, None),
    ],
)
def test_errors_are_typed(
    port: int, reply: Any, expected: type[TridentError], param: str | None
) -> None:
    async def run() -> None:
        async with serving(port, FakeTokenizer(lambda: reply)), service(port) as text:
            with pytest.raises(expected) as caught:
                await text.ask("detokenize", {"tokens": [1]})
            assert caught.value.param == param

    asyncio.run(run())


def test_what_json_cannot_hold_is_refused(port: int) -> None:
    async def run() -> None:
        async with service(port) as text:
            with pytest.raises(InvalidRequest):
                await text.ask("tokenize", {"prompt": object()})

    asyncio.run(run())


def test_it_answers_as_soon_as_triton_is_back(port: int) -> None:
    """However often it has failed before."""

    async def run() -> None:
        async with service(port) as text:
            for _ in range(5):
                with pytest.raises(EngineDown):
                    await text.ask("describe", {})
            async with serving(port, FakeTokenizer(lambda: {"x": 1})):
                assert await text.ask("describe", {}) == {"x": 1}
            with pytest.raises(EngineDown):
                await text.ask("describe", {})
            async with serving(port, FakeTokenizer(lambda: {"x": 2})):
                assert await text.ask("describe", {}) == {"x": 2}

    asyncio.run(run())
