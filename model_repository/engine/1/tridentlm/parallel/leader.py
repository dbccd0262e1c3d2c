"""Rank 0: plans are made in its process, passed on to the other ranks, and computed by all.

    engine process = rank 0                    follower = rank 1, 2, ...
    schedule ─ StepPlan ─ one message each ──► recv
    launch                                     launch
      embedding, layers  ◄── all_reduce ──►      the same with its heads, experts' parts, ids
      logits             ◄── all_gather ──►      its part of the vocabulary
      sample: last_token ─── broadcast ───►      takes over
    collect, commit                            recv

Messages go through a pair of sockets for each follower. A rank that ends, however it ends, closes
its socket; the leader then ends with exit code 1, and that ends the followers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch

from tridentlm.config import EngineSettings
from tridentlm.core.plan import StepPlan
from tridentlm.core.runner import PendingStep
from tridentlm.errors import InternalError, InvalidRequest, TridentError, from_payload
from tridentlm.hub import ModelFiles
from tridentlm.models.shard import Shard
from tridentlm.parallel.group import joined, open_store
from tridentlm.parallel.lifeline import wait_for_hangup
from tridentlm.runner import ModelRunner
from tridentlm.startup import child_environ

logger = logging.getLogger(__name__)

GRACE_SECONDS = 2.0
"""For the leader to say what is wrong, before it ends because a follower has ended."""

EXIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """A follower's first message. `port`: of the store where the ranks meet."""

    shard: Shard
    settings: EngineSettings
    files: ModelFiles
    device: str
    port: int


class ParallelRunner:
    """Implements `core.runner.Runner` with `settings.tp` processes, this one included.

    At most one at a time in a process. While it is open, the end of a follower ends this process.
    """

    def __init__(self, settings: EngineSettings, files: ModelFiles) -> None:
        """Starts the followers and loads the model. Raises InvalidRequest or ModelNotFound."""
        device = _device(settings)
        if device == "cpu" and not settings.threads:
            threads = max(1, torch.get_num_threads() // settings.tp)
            settings = replace(settings, threads=threads)
        store, port = open_store()
        shards = [Shard(rank, settings.tp) for rank in range(settings.tp)]
        self._exits = contextlib.ExitStack()
        self._followers = Followers(
            [Job(shard, settings, files, device, port) for shard in shards[1:]]
        )
        try:
            group = self._exits.enter_context(joined(shards[0], store, device))
            self._runner = ModelRunner(settings, files, group)
            self._followers.wait_until_ready()
        except Exception as error:
            reason = self._followers.reason() or error
            self._abandon()
            raise reason from error
        self.limits, self.startup_seconds = self._runner.limits, self._runner.startup_seconds
        self.device, self.dtype = self._runner.device, self._runner.dtype

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises InternalError when a follower has ended; the runner is closed then."""
        try:
            self._followers.send(plan)
            return self._runner.launch(plan)
        except Exception as error:
            reason = self._followers.reason()
            self._abandon()
            if reason is None:
                raise
            raise reason from error

    def close(self) -> None:
        """Ends the followers and frees the model."""
        self._followers.stop()
        with contextlib.suppress(RuntimeError):  # of ranks that are gone
            self._exits.close()
        self._followers.wait()
        self._runner.close()

    def _abandon(self) -> None:
        self._followers.kill()
        with contextlib.suppress(RuntimeError):
            self._exits.close()


class Followers:
    """The processes of ranks 1, 2, ... and the sockets to them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._closing = False
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for job in jobs:
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "tridentlm.parallel.follower", str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                env=child_environ(),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
            ours.send(job)
        threading.Thread(target=self._watch, daemon=True).start()

    def wait_until_ready(self) -> None:
        """Raises EOFError or the follower's error when one ends instead."""
        for connection in self._connections:
            _raise_if_error(connection.recv())

    def send(self, plan: StepPlan) -> None:
        message = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        for connection in self._connections:
            connection.send_bytes(message)

    def reason(self) -> TridentError | None:
        """Why a follower has ended, or None: all live."""
        deadline = time.monotonic() + EXIT_SECONDS
        while time.monotonic() < deadline:
            codes = [process.poll() for process in self._processes]
            ended = [(code, rank) for rank, code in enumerate(codes, 1) if code is not None]
            if ended:
                code, rank = min(ended)  # one killed by a signal takes others with it
                return self._last_words(rank) or InternalError(
                    f"Rank {rank} of {len(codes) + 1} ended with code {code}."
                )
            time.sleep(0.02)
        return None

    def stop(self) -> None:
        """Asks all to end; `wait` waits for it."""
        self._closing = True
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)

    def wait(self) -> None:
        """Waits until all have ended, and ends those that do not."""
        deadline = time.monotonic() + EXIT_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
        self.kill()

    def kill(self) -> None:
        self._closing = True
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.wait()
            connection.close()

    def _last_words(self, rank: int) -> TridentError | None:
        try:
            connection = self._connections[rank - 1]
            while connection.poll():
                _raise_if_error(connection.recv())
        except TridentError as error:
            return error
        except (EOFError, OSError):
            pass
        return None

    def _watch(self) -> None:
        rank = 1 + wait_for_hangup(self._connections)
        if not self._closing:
            time.sleep(GRACE_SECONDS)
        if not self._closing:
            logger.error("Rank %d has ended, and the engine with it.", rank)
            os._exit(1)


def _raise_if_error(message: object) -> None:
    if message is not None:
        assert isinstance(message, dict)
        raise from_payload(message)


def _device(settings: EngineSettings) -> str:
    """The device of all ranks. Raises InvalidRequest when there are fewer GPUs than ranks."""
    if settings.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    visible = torch.cuda.device_count()
    if settings.tp > visible:
        raise InvalidRequest(
            f"tp is {settings.tp}, and {visible} CUDA devices are visible: tp can be 1 to "
            f"{visible}.",
            param="tp",
        )
    return "cuda"
