"""A scripted session in place of the one to Triton, and the real application on a real server."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI

from openai_proxy.app import create_app
from openai_proxy.serve import server_config
from openai_proxy.settings import EngineNames, ProxySettings
from tests.waiting import PATIENCE, wait_until
from tridentlm.errors import TridentError
from tridentlm_client import Delta, End, Stream, Submission

MODEL = "org/tiny-model"
FOREVER = 3600.0
Step = Delta | End | float | Callable[[], object]
TURNS = 200
"""Of the event loop, from the admission of a request to its first output at the latest."""


def ended(
    reason: str = "stop", completion: int = 2, cached: int = 1, stop: str | None = None
) -> End:
    usage = {"prompt_tokens": 5, "completion_tokens": completion, "cached_tokens": cached}
    return End(reason, stop, usage)


@dataclass
class Reply:
    """What the engine does with one submission: refuse it, or admit it and play `steps` (a number
    is a pause in seconds, a condition a pause until it holds). `admission` seconds pass before its
    outcome is known."""

    refusal: TridentError | None = None
    admission: float = 0.0
    steps: Sequence[Step] = field(
        default_factory=lambda: [Delta("Hello", 1), Delta(" world", 1), ended()]
    )


class FakeSession:
    """`reply` makes the script for each submission. `aborted` holds uids, `cancelled` counts
    submissions whose admission was given up."""

    def __init__(self) -> None:
        self.ready = True
        self.status: dict[str, Any] | None = {
            "model": MODEL,
            "max_model_len": 128,
            "up": True,
            "draining": False,
            "version": "9.9",
        }
        self.reply: Callable[[Submission], Reply] = lambda submission: Reply()
        self.submissions: list[Submission] = []
        self.aborted: list[str] = []
        self.cancelled = 0
        self.streams: list[Stream] = []
        self.closed = False
        self._uids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self.closed = True
        for task in self._tasks:
            task.cancel()

    async def submit(self, submissions: Sequence[Submission]) -> list[Stream | TridentError]:
        self.submissions += submissions
        replies = [self.reply(submission) for submission in submissions]
        try:
            await asyncio.sleep(max(reply.admission for reply in replies))
        except asyncio.CancelledError:
            self.cancelled += len(submissions)
            raise
        return [self._admit(reply) for reply in replies]

    def _admit(self, reply: Reply) -> Stream | TridentError:
        if reply.refusal is not None:
            return reply.refusal
        stream = Stream(str(next(self._uids)), self.aborted.append, lambda uid: None)
        stream.prompt_tokens = 5
        self.streams.append(stream)
        task = asyncio.get_running_loop().create_task(_play(stream, reply.steps))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    @property
    def attended(self) -> int:
        """How many streams are being read."""
        return sum(map(_is_read, self.streams))


class FakeText:
    """Answers for the tokenizer model: `replies` by op, an exception being raised."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.template = "{{ messages }}"
        self.generation_prompt = ""
        self.replies: dict[str, dict[str, Any] | Exception] = {}

    async def ask(self, op: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append((op, dict(body)))
        if op == "describe" and op not in self.replies:
            return {"chat_template": self.template, "generation_prompt": self.generation_prompt}
        reply = self.replies[op]
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def close(self) -> None:
        pass


class FakeCatalogue:
    """What Triton lists; engines may come and go."""

    def __init__(self, *engines: str) -> None:
        self.engines = list(engines)

    async def find(self) -> list[EngineNames]:
        return [EngineNames(name, f"{name}-submit", f"{name}-text") for name in self.engines]

    async def close(self) -> None:
        pass


def _is_read(stream: Stream) -> bool:
    return stream.on_news is not None or stream._waiter is not None


async def _play(stream: Stream, steps: Sequence[Step]) -> None:
    turns = itertools.count()  # of the loop, not seconds: a busy machine must not merge deltas
    while not _is_read(stream) and next(turns) < TURNS:
        await asyncio.sleep(0)
    for step in steps:
        if isinstance(step, End):
            stream.end = step
            stream.notify()
        elif isinstance(step, Delta):
            stream._pending.append(step)
            stream.notify()
        elif callable(step):
            while not step():
                await asyncio.sleep(0.005)
        else:
            await asyncio.sleep(step)
        if stream.end is not None:
            return
        await asyncio.sleep(0)


@dataclass
class Proxy:
    url: str
    session: FakeSession
    text: FakeText
    server: uvicorn.Server


@contextmanager
def running_proxy(**settings: Any) -> Iterator[Proxy]:
    session, text = FakeSession(), FakeText()
    catalogue = FakeCatalogue("engine")
    app = create_app(
        ProxySettings(**settings), lambda _: session, lambda _: text, lambda _: catalogue
    )
    with running_app(app) as (url, server):
        yield Proxy(url, session, text, server)
    assert session.closed, "the session was left open"


@contextmanager
def running_app(app: FastAPI) -> Iterator[tuple[str, uvicorn.Server]]:
    """The application on a real server, in a thread of its own."""
    config = server_config(app, app.state.settings)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not stop"


def eventually(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    wait_until(condition, seconds, "it did not happen", pause=0.005)
