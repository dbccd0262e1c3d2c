"""The channel between the stub and the engine process: messages, sockets, and the stub's end.

    stub                                            engine process
    WorkerClient.add/abort/flush/stop -- PUSH ---> PULL   drained before every step
    WorkerClient.recv                 <-- PULL --- PUSH   one message per step

Each receiver binds and each sender connects: a connected socket without high-water mark queues
without end, so neither side ever blocks on a send, also while the other starts, is slow or is dead.
The worker says `ready` after it has heard `hello`: both ways are open then, and the sockets' files
are removed, so that no death leaves any behind.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zmq

from tridentlm.config import EngineSettings
from tridentlm.core.extras import Logprobs, RequestExtras
from tridentlm.core.plan import I32, EngineStats, StepOutput
from tridentlm.core.request import Limits, Request
from tridentlm.errors import TridentError, from_payload
from tridentlm.startup import child_environ

HELLO, ADD, ABORT, FLUSH, STOP = b"hello", b"add", b"abort", b"flush", b"stop"
READY, FAILED, STEP, IDLE = b"ready", b"failed", b"step", b"idle"

Frames = list[bytes]


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests (`grammars`: with one). Its first message, or else `Failed` is."""

    limits: Limits
    model: str
    device: str
    dtype: str
    load_seconds: float
    grammars: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not start; the process exits."""

    error: TridentError


@dataclass(frozen=True, slots=True)
class Step:
    """News of one step; possibly none, as when a long prompt is computed."""

    output: StepOutput
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Idle:
    """The heartbeat, every IDLE_SECONDS without work."""

    stats: EngineStats


IDLE_SECONDS = 0.5

Message = Ready | Failed | Step | Idle


def pack_add(requests: Sequence[Request], now: float) -> Frames:
    """`now`: time.monotonic(); a deadline crosses as the seconds that are left."""
    heads = [
        {
            "id": r.id,
            "n": len(r.prompt),
            "max_tokens": r.max_tokens,
            "temperature": r.temperature,
            "top_p": r.top_p,
            "top_k": r.top_k,
            "min_p": r.min_p,
            "seed": r.seed,
            "stop_token_ids": list(r.stop_token_ids),
            "priority": r.priority,
            "cache_salt": r.cache_salt,
            "client": r.client,
            "extras": r.extras,
            "deadline_s": None if math.isinf(r.deadline) else r.deadline - now,
        }
        for r in requests
    ]
    ids = b"".join(np.ascontiguousarray(r.prompt, np.int32).tobytes() for r in requests)
    return [ADD, orjson.dumps(heads), ids]


def split_add(frames: Frames) -> Iterator[tuple[dict[str, Any], I32]]:
    """The requests of one `add` message, each still unchecked: its head and prompt ids."""
    ids = np.frombuffer(frames[2], np.int32)
    start = 0
    for head in orjson.loads(frames[1]):
        yield head, ids[start : start + head["n"]]
        start += head["n"]


def unpack_request(head: dict[str, Any], ids: I32, now: float) -> Request:
    """Raises TypeError, ValueError or KeyError for a head that is not one of `pack_add`."""
    left = head["deadline_s"]
    return Request(
        id=int(head["id"]),
        prompt=ids,
        max_tokens=int(head["max_tokens"]),
        temperature=float(head["temperature"]),
        top_p=float(head["top_p"]),
        top_k=int(head["top_k"]),
        min_p=float(head["min_p"]),
        seed=int(head["seed"]),
        stop_token_ids=frozenset(map(int, head["stop_token_ids"])),
        deadline=math.inf if left is None else now + float(left),
        priority=int(head["priority"]),
        cache_salt=str(head["cache_salt"]),
        client=str(head["client"]),
        extras=None if head["extras"] is None else RequestExtras.from_wire(head["extras"]),
    )


def pack_message(message: Message) -> Frames:
    if isinstance(message, Ready):
        return [READY, orjson.dumps(asdict(message))]
    if isinstance(message, Failed):
        return [FAILED, orjson.dumps(message.error.payload())]
    if isinstance(message, Idle):
        return [IDLE, orjson.dumps(message.stats)]
    output = message.output
    head = {"stats": message.stats, "cached": output.cached, "errors": output.errors}
    arrays = (output.ids, output.tokens, output.finish)
    packed = orjson.dumps(head, option=orjson.OPT_NON_STR_KEYS)
    frames = [STEP, packed, *(array.tobytes() for array in arrays)]
    if (told := output.logprobs) is not None:  # of one row at least
        tables = (told.ids, told.positions, told.tokens, told.values, told.ranks)
        frames += [array.tobytes() for array in tables]
    return frames


def unpack_message(frames: Frames) -> Message:
    kind, head = frames[0], orjson.loads(frames[1])
    if kind == READY:
        head["limits"] = Limits(**head["limits"])
        return Ready(**head)
    if kind == FAILED:
        return Failed(from_payload(head))
    if kind == IDLE:
        return Idle(EngineStats(**head))
    output = StepOutput(
        ids=np.frombuffer(frames[2], np.int64),
        tokens=np.frombuffer(frames[3], np.int32),
        finish=np.frombuffer(frames[4], np.uint8),
        cached=[(request_id, length) for request_id, length in head["cached"]],
        errors={int(request_id): text for request_id, text in head["errors"].items()},
        logprobs=_unpack_logprobs(frames[5:]) if len(frames) > 5 else None,
    )
    return Step(output, EngineStats(**head["stats"]))


def _unpack_logprobs(frames: Frames) -> Logprobs:
    ids, positions, tokens, values, ranks = frames
    rows = np.frombuffer(ids, np.int64)
    shape = (len(rows), -1)
    return Logprobs(
        ids=rows,
        positions=np.frombuffer(positions, np.int64),
        tokens=np.frombuffer(tokens, np.int32).reshape(shape),
        values=np.frombuffer(values, np.float32).reshape(shape),
        ranks=np.frombuffer(ranks, np.int32),
    )


def receiver(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.bind(endpoint)
    return socket


def sender(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)  # ms; the other side binds a moment later
    socket.connect(endpoint)
    return socket


class WorkerClient:
    """Starts the engine process and talks to it. One object is one process's life.

    Any thread may send; one thread at a time may call `recv` and `close`. A worker that has died is
    noticed by `alive` alone: look at it when `recv` returns None. What is sent to it is lost.
    """

    def __init__(self, settings: EngineSettings, *, python: str) -> None:
        """`python` is the interpreter to run: inside Triton's stub sys.executable is none."""
        self._folder = Path(tempfile.mkdtemp(prefix="tridentlm-"))
        to_worker, from_worker = (f"ipc://{self._folder}/{name}" for name in ("in", "out"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = receiver(self._context, from_worker)
        self._outbox = sender(self._context, to_worker)
        self._lock = threading.Lock()
        arguments = [
            *(python, "-m", "tridentlm.worker"),
            *("--endpoint-in", to_worker, "--endpoint-out", from_worker),
            *("--ancestors", str(os.getpid()), str(os.getppid())),
            *("--settings", orjson.dumps(settings).decode()),
        ]
        self.process = subprocess.Popen(arguments, env=child_environ(), stdin=subprocess.DEVNULL)
        self._send([HELLO])

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def add(self, requests: Sequence[Request]) -> None:
        self._send(pack_add(requests, time.monotonic()))

    def abort(self, ids: Sequence[int]) -> None:
        self._send([ABORT, np.asarray(ids, np.int64).tobytes()])

    def flush(self) -> None:
        """Empties the prefix cache."""
        self._send([FLUSH])

    def stop(self) -> None:
        """Asks the process to abort everything, say so, and exit."""
        self._send([STOP])

    def _send(self, frames: Frames) -> None:
        with self._lock:
            if not self._outbox.closed:
                self._outbox.send_multipart(frames)

    def recv(self, timeout: float) -> Message | None:
        """The next message, or None after `timeout` seconds without one."""
        if not self._inbox.poll(round(timeout * 1e3)):
            return None
        message = unpack_message(self._inbox.recv_multipart())
        if isinstance(message, Ready):
            self._remove_files()
        return message

    def kill(self) -> None:
        """Ends the process at once; returns when it is gone."""
        self.process.kill()
        self.process.wait()

    def close(self, timeout: float = 2.0) -> None:
        """Stops the process, by force after `timeout` seconds, and frees the sockets."""
        if self.alive:
            self.stop()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
        with self._lock:
            self._context.destroy(linger=0)
        self._remove_files()

    def _remove_files(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
