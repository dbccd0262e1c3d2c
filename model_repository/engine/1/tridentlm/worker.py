"""The engine process: `python -m tridentlm.worker`, a child of Triton's stub.

It owns scheduler and device, so that neither Triton's I/O nor a device fault touches the other.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
import psutil
import zmq

from tridentlm.channel import (
    ABORT,
    ADD,
    FLUSH,
    HELLO,
    IDLE_SECONDS,
    STOP,
    Failed,
    Frames,
    Idle,
    Message,
    Ready,
    Step,
    pack_message,
    receiver,
    sender,
    split_add,
    unpack_request,
)
from tridentlm.config import EngineSettings
from tridentlm.engine import Engine, build_runner, load_grammars
from tridentlm.errors import InternalError, TridentError
from tridentlm.startup import settle

ANCESTOR_SECONDS = 0.5
LINGER_MS = 2000


class Worker:
    """The loop between channel and engine: drain the inbox, step, send one message."""

    def __init__(self, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def run(self, settings: EngineSettings) -> int:
        """Serves until `stop`; returns the process's exit code."""
        started = time.monotonic()
        try:
            runner, model = build_runner(settings)
        except Exception as error:
            traceback.print_exc()
            self._send(Failed(as_trident_error(error)))
            return 1
        engine = Engine.from_settings(runner, settings, load_grammars(runner, settings))
        settle()
        hello = self._inbox.recv_multipart()
        assert hello == [HELLO], "the stub speaks first"
        self._send(
            Ready(
                limits=runner.limits,
                model=model,
                device=runner.device,
                dtype=runner.dtype,
                load_seconds=time.monotonic() - started,
                grammars=engine.holds_grammars,
            )
        )
        try:
            self._serve(engine)
        except Exception as error:
            traceback.print_exc()
            output = engine.fail_all(f"The engine failed: {type(error).__name__}: {error}")
            if output is not None:
                self._send(Step(output, engine.stats()))
            return 1
        engine.close()
        return 0

    def _serve(self, engine: Engine) -> None:
        checked = True
        while True:
            busy = engine.has_work
            if not self._inbox.poll(0 if busy else round(IDLE_SECONDS * 1e3)) and not busy:
                if not checked:
                    self._check(engine)
                    checked = True
                self._send(Idle(engine.stats()))
                continue
            if not self._drain_inbox(engine):
                break
            checked = False
            output = engine.step()
            if output is not None:
                self._send(Step(output, engine.stats()))
        output = engine.shut_down()
        if output is not None:
            self._send(Step(output, engine.stats()))

    def _check(self, engine: Engine) -> None:
        """A failure is told, and ends the process: whatever it would say next might be wrong."""
        try:
            engine.check_integrity()
        except AssertionError:
            self._send(Idle(engine.stats()))
            raise

    def _drain_inbox(self, engine: Engine) -> bool:
        """Handles all messages that have come; False once the process shall stop."""
        while True:
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            kind = frames[0]
            if kind == STOP:
                return False
            if kind == ADD:
                add_all(engine, frames)
            elif kind == ABORT:
                for request_id in np.frombuffer(frames[1], np.int64).tolist():
                    engine.abort(request_id)
            elif kind == FLUSH:
                engine.flush_cache()

    def _send(self, message: Message) -> None:
        self._outbox.send_multipart(pack_message(message))


def add_all(engine: Engine, frames: Frames) -> None:
    """Queues the requests of one message; one that is wrong is answered with an error alone."""
    now = time.monotonic()
    for head, ids in split_add(frames):
        try:
            engine.add(unpack_request(head, ids, now))
        except (TridentError, TypeError, ValueError, KeyError, OverflowError) as error:
            engine.fail(head["id"], f"The engine refused the request: {error}")


def as_trident_error(error: Exception) -> TridentError:
    if isinstance(error, TridentError):
        return error
    return InternalError(f"The model could not be loaded: {type(error).__name__}: {error}")


def watch_ancestors(parent: int, grandparent: int, sockets: Sequence[Path]) -> None:
    """Ends this process within ANCESTOR_SECONDS of the death of the stub or of its server.

    A stub may outlive a server that was killed, with its interpreter locked up; nobody can reach
    it then, so it goes too.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(parent)
        while os.getppid() == parent and process.ppid() == grandparent:
            time.sleep(ANCESTOR_SECONDS)
        if os.getppid() == parent:
            process.kill()
    with contextlib.suppress(OSError):
        for path in sockets:
            path.unlink(missing_ok=True)
        sockets[0].parent.rmdir()
    os._exit(1)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the launcher's to handle
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="engine: %(message)s")
    parser = argparse.ArgumentParser(prog="tridentlm.worker", description=__doc__)
    parser.add_argument("--endpoint-in", required=True, help="bound here: messages from the stub")
    parser.add_argument("--endpoint-out", required=True, help="connected to: messages to the stub")
    parser.add_argument("--settings", required=True, help="EngineSettings as a JSON object")
    parser.add_argument("--ancestors", nargs=2, type=int, required=True, metavar="PID")
    options = parser.parse_args()
    sockets = [Path(e.removeprefix("ipc://")) for e in (options.endpoint_in, options.endpoint_out)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox, outbox = (
        receiver(context, options.endpoint_in),
        sender(context, options.endpoint_out),
    )
    # After the inbox is bound: an orphan's socket files must not appear after their removal.
    watcher = threading.Thread(target=watch_ancestors, args=(*options.ancestors, sockets))
    watcher.daemon = True
    watcher.start()
    code = Worker(inbox, outbox).run(EngineSettings(**orjson.loads(options.settings)))
    context.destroy(linger=LINGER_MS)
    return code


if __name__ == "__main__":
    # After the last message: where a rank was lost, Python's own end would wait for NCCL for ever.
    os._exit(main())
