"""An in-process server that speaks the session protocol, for what a real one does too rarely.

It follows Triton: a stream ends after the client's half-close and its last request, a session is
one request that lasts until its FINAL, and an acknowledgement or abort is not answered.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import orjson
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.waiting import PATIENCE
from tridentlm_client import Session, Stream, Submission

STATUS = {"protocol": 1, "model": "fake", "up": True, "draining": False, "max_model_len": 128}


@dataclass
class Seen:
    """One request as the server got it."""

    model: str
    op: str
    parameters: dict[str, Any]
    strings: dict[str, list[bytes]]
    stream: FakeStream


@dataclass(eq=False)
class FakeStream:
    outbox: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    requests: int = 0
    open_requests: int = 0
    half_closed: bool = False
    ended: bool = False

    def send(self, request_id: str, outputs: dict[str, bytes], *, final: bool) -> None:
        response = service_pb2.ModelStreamInferResponse()
        response.infer_response.id = request_id
        response.infer_response.parameters["triton_final_response"].bool_param = final
        for name, value in outputs.items():
            response.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
            response.infer_response.raw_output_contents.append(
                struct.pack("<I", len(value)) + value
            )
        self.outbox.put_nowait(response)
        if final:
            self.done()

    def refuse(self, request_id: str, text: str) -> None:
        response = service_pb2.ModelStreamInferResponse(error_message=text)
        response.infer_response.id = request_id
        self.outbox.put_nowait(response)
        self.done()

    def done(self) -> None:
        self.open_requests -= 1
        self.check_end()

    def check_end(self) -> None:
        if self.half_closed and self.open_requests == 0:
            self.outbox.put_nowait(None)


class FakeSession:
    """A session of the engine: what it sends, on which of its streams."""

    def __init__(self, session_id: str, stream: FakeStream) -> None:
        self.id = session_id
        self.streams = [stream]
        self.seq = 0
        self.aborted: set[str] = set()

    def frame(
        self,
        *news: tuple[str, str],
        ends: dict[str, Any] | None = None,
        extras: dict[str, Any] | None = None,
        status: dict[str, Any] | None = None,
        skip: int = 0,
        stream: FakeStream | None = None,
    ) -> None:
        """Sends the next frame: (uid, text) pairs of one token each."""
        self.seq += 1 + skip
        uids, texts = [u for u, _ in news], [t for _, t in news]
        body = [self.seq, uids, texts, [1] * len(news), ends or {}, extras or {}, status]
        (stream or self.streams[0]).send("", {"frame": orjson.dumps(body)}, final=False)

    def final(self) -> None:
        """Ends the session's current stream: a roll when there is a newer one."""
        self.streams.pop(0).send("", {}, final=True)


def end(reason: str = "stop", tokens: int = 1, **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
    return {"finish_reason": reason, "stop_reason": None, "usage": usage, **more}


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`accept` decides a submission's outcome, `answer` its words (None: the test sends frames)."""

    def __init__(self) -> None:
        self.accept: Callable[[str, Any], dict[str, Any]] = accept_all
        self.answer: Callable[[Any], list[str]] | None = None
        self.sessions: dict[str, FakeSession] = {}
        self.streams: list[FakeStream] = []
        self.seen: list[Seen] = []
        self.refusal: str | None = None
        self.is_stuck = False  # takes acknowledgements and does not answer
        self.auto_roll = True
        self.hold_outcomes = asyncio.Event()
        self.hold_outcomes.set()
        self.word_seconds = 0.001
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, port: int = 0, credentials: Any = None) -> str:
        self._server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        address = f"localhost:{port}"
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        await self._server.start()
        return f"localhost:{self.port}"

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._server.stop(None)

    @property
    def session(self) -> FakeSession:
        """The session opened last."""
        return list(self.sessions.values())[-1]

    def ops(self, op: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.op == op]

    async def ModelStreamInfer(
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        stream = FakeStream()
        self.streams.append(stream)
        reader = asyncio.create_task(self._read(requests, stream))
        try:
            while (response := await stream.outbox.get()) is not None:
                yield response
        finally:
            stream.ended = True
            reader.cancel()

    async def _read(self, requests: AsyncIterator[Any], stream: FakeStream) -> None:
        async for request in requests:
            strings = {
                tensor.name: unpack(raw)
                for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
            }
            parameters = {
                name: getattr(value, value.WhichOneof("parameter_choice"))
                for name, value in request.parameters.items()
            }
            op = strings["op"][0].decode() if "op" in strings else "submit"
            seen = Seen(request.model_name, op, parameters, strings, stream)
            self.seen.append(seen)
            stream.requests += 1
            stream.open_requests += 1
            if self.refusal is not None:
                stream.refuse(request.id, self.refusal)
            else:
                getattr(self, f"on_{op}")(request.id, seen)
        stream.half_closed = True
        stream.check_end()

    def on_session(self, request_id: str, seen: Seen) -> None:
        session_id = seen.parameters["session"]
        session = self.sessions.get(session_id)
        if session is None:
            self.sessions[session_id] = session = FakeSession(session_id, seen.stream)
            session.frame(status=STATUS)
        else:
            session.streams.append(seen.stream)
            if self.auto_roll:
                session.final()

    def on_ack(self, request_id: str, seen: Seen) -> None:
        if not self.is_stuck:
            seen.stream.send(request_id, {}, final=True)

    def on_abort(self, request_id: str, seen: Seen) -> None:
        session = self.sessions[seen.parameters["session"]]
        session.aborted |= {uid.decode() for uid in seen.strings["uid"]}
        seen.stream.send(request_id, {}, final=True)

    def on_close(self, request_id: str, seen: Seen) -> None:
        session = self.sessions[seen.parameters["session"]]
        while session.streams:
            session.final()
        seen.stream.send(request_id, {}, final=True)

    def on_status(self, request_id: str, seen: Seen) -> None:
        seen.stream.send(request_id, {"frame": orjson.dumps(STATUS)}, final=True)

    def on_flush_cache(self, request_id: str, seen: Seen) -> None:
        seen.stream.send(request_id, {}, final=True)

    def on_submit(self, request_id: str, seen: Seen) -> None:
        self._spawn(self._submit(request_id, seen))

    async def _submit(self, request_id: str, seen: Seen) -> None:
        await self.hold_outcomes.wait()
        outcomes = []
        for uid, raw in zip(seen.strings["uid"], seen.strings["request"], strict=True):
            body = orjson.loads(raw)
            outcome = self.accept(uid.decode(), body)
            outcomes.append(outcome)
            if self.answer is not None and "error" not in outcome:
                session = self.sessions[seen.parameters["session"]]
                self._spawn(self._generate(session, uid.decode(), self.answer(body)))
        seen.stream.send(request_id, {"outcomes": orjson.dumps(outcomes)}, final=True)

    async def _generate(self, session: FakeSession, uid: str, words: list[str]) -> None:
        for i, word in enumerate(words):
            if uid in session.aborted:
                session.frame(ends={uid: end("abort", i)})
                return
            last = i + 1 == len(words)
            extras = {uid: {"token_ids": [i]}}
            session.frame(
                (uid, word), ends={uid: end("stop", i + 1)} if last else {}, extras=extras
            )
            await asyncio.sleep(self.word_seconds)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def accept_all(uid: str, body: Any) -> dict[str, Any]:
    return {"uid": uid, "prompt_tokens": 1}


def unpack(raw: bytes) -> list[bytes]:
    values, at = [], 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        values.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    return values


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[FakeTriton, Session]]:
    server = FakeTriton()
    target = await server.start()
    try:
        async with Session(target) as session:
            yield server, session
    finally:
        await server.stop()


def run(test: Callable[[FakeTriton, Session], Awaitable[None]]) -> None:
    async def body() -> None:
        async with connected() as (server, session):
            await asyncio.wait_for(test(server, session), 2 * PATIENCE)

    asyncio.run(body())


async def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true")


async def accepted(session: Session, prompt: str = "hi", **more: Any) -> Stream:
    [outcome] = await session.submit([Submission(prompt=prompt, **more)])
    assert isinstance(outcome, Stream), outcome
    return outcome


async def text_of(stream: Stream) -> str:
    return "".join([delta.text async for delta in stream])
