"""A soak: every way in at once, three in ten clients leave early, then a clean exit.

    python -m benchmarks.soak [--seconds 60] [--clients 48]

Requests that stay must get exactly their tokens. Afterwards every page and slot must be free, and
the service must stop within 8 s. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import orjson
from tritonclient.grpc import service_pb2_grpc

from tests.server.service import Service, wait_until
from tests.server.test_disconnects import Leavers
from tridentlm_client import Session, Submission
from tridentlm_client.wire import infer_request, read_string

LEAVE_SHARE = 0.3


class Stayers:
    """One way in for each door; each returns the tokens it was given."""

    def __init__(self, service: Service, stub: Any, session: Session) -> None:
        self.service = service
        self.stub = stub
        self.session = session
        self.http = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None))

    async def chat(self, tokens: int) -> int:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens}
        url = f"{self.service.url}/v1/chat/completions"
        answer = (await self.http.post(url, json=body)).json()
        return int(answer["usage"]["completion_tokens"])

    async def chat_stream(self, tokens: int) -> int:
        body = {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        url = f"{self.service.url}/v1/chat/completions"
        usage: dict[str, Any] = {}
        async with self.http.stream("POST", url, json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    usage = json.loads(line[6:]).get("usage") or usage
        return int(usage["completion_tokens"])

    async def generate_stream(self, tokens: int) -> int:
        url = f"{self.service.triton_url}/v2/models/generate/generate_stream"
        count = 0
        body = {"text_input": "Hello", "max_tokens": tokens}
        async with self.http.stream("POST", url, json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    ids = json.loads(line[6:])["token_ids"]
                    count += len(ids) if isinstance(ids, list) else 1
        return count

    async def grpc_generate(self, tokens: int) -> int:
        request = infer_request(
            "generate", strings={"text_input": ["Hello"]}, parameters={"max_tokens": tokens}
        )
        usage = b"{}"

        async def once() -> Any:
            yield request

        async for message in self.stub.ModelStreamInfer(once()):
            if message.error_message:
                raise RuntimeError(message.error_message)
            usage = bytes(read_string(message.infer_response, "usage") or usage)
        return int(orjson.loads(usage)["completion_tokens"])

    async def in_session(self, tokens: int) -> int:
        (stream,) = await self.session.submit(
            [Submission(prompt="Hi", sampling={"max_tokens": tokens})]
        )
        if isinstance(stream, Exception):
            raise stream
        return sum([delta.count async for delta in stream])

    def doors(self) -> list[Callable[[int], Awaitable[int]]]:
        return [
            self.chat,
            self.chat_stream,
            self.generate_stream,
            self.grpc_generate,
            self.in_session,
        ]


async def soak(service: Service, seconds: float, clients: int) -> Counter[str]:
    tally: Counter[str] = Counter()
    end = time.monotonic() + seconds
    async with Session(service.grpc) as session, grpc.aio.insecure_channel(service.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stayers, leavers = Stayers(service, stub, session), Leavers(service, stub, session)

        async def client(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < end:
                if rng.random() < LEAVE_SHARE:
                    await rng.choice(leavers.doors())(rng.uniform(0, 0.6))
                    tally["left"] += 1
                    continue
                tokens = rng.randint(1, 120)
                door = rng.choice(stayers.doors())
                got = await asyncio.wait_for(door(tokens), 60)
                tally["stayed"] += 1
                if got != tokens:
                    tally["wrong"] += 1
                    print(f"{door.__name__}: {got} of {tokens} tokens", flush=True)

        await asyncio.gather(*(client(number) for number in range(clients)))
        await stayers.http.aclose()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=48)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder), "--runner", "simulated", "--workers", "2")
        with service:
            tally = asyncio.run(soak(service, arguments.seconds, arguments.clients))
            idle = wait_until(service.idle, 5, "an idle engine")
            start = time.monotonic()
            code = service.stop()
            stop = time.monotonic() - start
    print(json.dumps({**tally, "idle_s": round(idle, 2), "exit": code, "stop_s": round(stop, 1)}))
    raise SystemExit(bool(tally["wrong"] or code or stop > 8))


if __name__ == "__main__":
    main()
