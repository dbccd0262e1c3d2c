"""Nothing generates for nobody: clients that leave, in every state and by every way in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.server.service import Service
from tests.waiting import PATIENCE, wait_until
from tridentlm_client import Session, Submission
from tridentlm_client.wire import infer_request

pytestmark = pytest.mark.server
LONG = 5000  # tokens: 25 s
TOGETHER = 320  # beyond the 256 slots, so that some of the requests only wait


async def leave_http(port: int, path: str, body: dict[str, Any], after: float) -> None:
    """Posts, reads for `after` seconds, hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n".encode()
        + data
    )

    async def read() -> None:
        while await reader.read(65536):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), after)
    writer.close()


async def leave_grpc(stub: Any, request: Any, after: float) -> None:
    """Streams for `after` seconds, then cancels the call."""
    call = stub.ModelStreamInfer(once_then_wait(request))

    async def read() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for _ in call:
                pass

    task = asyncio.create_task(read())
    await asyncio.sleep(after)
    call.cancel()
    await task


async def once_then_wait(request: Any) -> Any:
    yield request
    await asyncio.Event().wait()


class Leavers:
    """One way of leaving for each of the doors, by name."""

    def __init__(self, service: Service, stub: Any, session: Session) -> None:
        self.service = service
        self.stub = stub
        self.session = session

    async def chat(self, after: float, *, stream: bool) -> None:
        body = {
            "messages": [{"role": "user", "content": "word " * random.choice([1, 3000])}],
            "max_tokens": LONG,
            "stream": stream,
        }
        await leave_http(self.service.port, "/v1/chat/completions", body, after)

    async def generate_stream(self, after: float) -> None:
        body = {"text_input": "Hello", "max_tokens": LONG}
        path = "/v2/models/generate/generate_stream"
        await leave_http(self.service.http_port, path, body, after + 0.3)

    async def grpc_generate(self, after: float) -> None:
        request = infer_request(
            "generate", strings={"text_input": ["Hello"]}, parameters={"max_tokens": LONG}
        )
        await leave_grpc(self.stub, request, after)

    async def grpc_engine(self, after: float) -> None:
        request = infer_request("engine", strings={}, parameters={"max_tokens": LONG})
        request.inputs.add(name="input_ids", datatype="INT32", shape=[3])
        request.raw_input_contents.append(b"\1\0\0\0" * 3)
        await leave_grpc(self.stub, request, after)

    async def session_abort(self, after: float) -> None:
        (stream,) = await self.session.submit(
            [Submission(prompt="Hello", sampling={"max_tokens": LONG})]
        )
        await asyncio.sleep(after)
        stream.close()  # type: ignore[union-attr]

    def doors(self) -> list[Callable[[float], Awaitable[None]]]:
        return [
            lambda after: self.chat(after, stream=True),
            lambda after: self.chat(after, stream=False),
            self.generate_stream,
            self.grpc_generate,
            self.grpc_engine,
            self.session_abort,
        ]


async def leave_many(service: Service, count: int, longest: float, seed: int) -> None:
    rng = random.Random(seed)
    async with Session(service.grpc) as session, grpc.aio.insecure_channel(service.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        doors = Leavers(service, stub, session).doors()
        await asyncio.gather(
            *(doors[i % len(doors)](rng.uniform(0, longest)) for i in range(count))
        )


def assert_all_stops(service: Service) -> None:
    """Soon after the last client's leaving the engine holds nothing any more.

    That is within 0.5 s where nobody else computes (benchmarks/soak.py tells it), and always before
    a session is given up for its silence, after 10 s, or the answers come to their own ends.
    """
    wait_until(service.idle, 9, "an idle engine")


def assert_stops_at_once(service: Service) -> None:
    """An idle Triton takes 4 to 5 s by itself, one that waits for something 26 s."""
    start = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - start < 20


def test_two_hundred_clients_that_leave_at_random_free_everything(simulated: Service) -> None:
    before = simulated.chat(seed=5, max_tokens=40).json()["choices"]
    asyncio.run(leave_many(simulated, 200, 1.0, seed=1))
    assert_all_stops(simulated)
    assert simulated.chat(seed=5, max_tokens=40).json()["choices"] == before


def test_clients_that_leave_while_they_are_queued_free_their_place(simulated: Service) -> None:
    async def crowd() -> None:
        async with Session(simulated.grpc) as session:
            streams = await session.submit(
                [Submission(prompt="Hi", sampling={"max_tokens": LONG})] * TOGETHER
            )
            await asyncio.to_thread(
                wait_until, lambda: simulated.status()["waiting"] > 0, 15, "a queue"
            )
            await leave_many(simulated, 40, 0.5, seed=2)
            for stream in streams:
                stream.close()  # type: ignore[union-attr]

    asyncio.run(crowd())
    assert_all_stops(simulated)


def test_a_session_that_ends_takes_its_requests_with_it(simulated: Service) -> None:
    async def vanish() -> None:
        session = Session(simulated.grpc)
        await session.start()
        await session.submit([Submission(prompt="Hi", sampling={"max_tokens": LONG})] * 20)
        await session.close()

    asyncio.run(vanish())
    assert_all_stops(simulated)


def test_the_server_stops_at_once_after_clients_have_left(fresh: Service) -> None:
    fresh.start()
    asyncio.run(leave_many(fresh, 60, 0.6, seed=3))
    assert_all_stops(fresh)
    assert_stops_at_once(fresh)


def test_the_engine_unloads_at_once_after_clients_have_left(fresh: Service) -> None:
    """An open session or a leaked request would keep it UNLOADING."""
    fresh.start()
    asyncio.run(leave_many(fresh, 60, 0.6, seed=4))
    assert_all_stops(fresh)
    repository = f"{fresh.triton_url}/v2/repository"

    def unloaded() -> bool:
        states = httpx.post(f"{repository}/index", timeout=PATIENCE).json()
        return any(m["name"] == "engine" and m["state"] == "UNAVAILABLE" for m in states)

    unload = f"{repository}/models/engine/unload"
    httpx.post(unload, timeout=PATIENCE).raise_for_status()
    wait_until(unloaded, 15, "the engine unloaded")
    wait_until(lambda: not fresh.ready(), PATIENCE, "not ready")
    assert fresh.chat().status_code == 503
    for model in ("engine", "generate", "submit"):
        httpx.post(f"{repository}/models/{model}/load", timeout=PATIENCE).raise_for_status()
    wait_until(fresh.ready, PATIENCE, "ready again")
    assert fresh.chat().status_code == 200
    asyncio.run(leave_many(fresh, 120, 0.6, seed=5))  # the relay knows clients from before
    assert_all_stops(fresh)


def test_two_workers_never_mix_up_their_requests(simulated: Service) -> None:
    """The simulated engine's text depends on the seed alone, so a mix-up shows."""

    async def one(client: httpx.AsyncClient, seed: int) -> str:
        body = {"prompt": "Hi", "max_tokens": 30, "seed": seed}
        answer = await client.post("/v1/completions", json=body)
        return str(answer.json()["choices"][0]["text"])

    async def crowd(count: int) -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=simulated.url, limits=limits, timeout=2 * PATIENCE
        ) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(count)))

    together = asyncio.run(crowd(150))
    again = asyncio.run(crowd(150))
    assert together == again
    assert len(set(together)) == 150
