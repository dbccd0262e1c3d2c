"""The processes of ranks 1, 2, ... as rank 0 sees them. Without torch, so that they start early.

Messages go through a pair of sockets for each:

    leader                                           follower
    Job ───────────────────────────────────────────►
                      ◄──────────────────────── None  has arrived; joins, loads its weights
                      ◄──────────────────────── None  has loaded
    GO, when all have loaded ──────────────────────►  measures memory, captures graphs
                      ◄──────────────────────── None  is ready
    StepPlan, StepPlan, ..., None ─────────────────►  computes, ends

A follower that fails says its error instead. One that is `rank_timeout` seconds behind the leader
fails the start. A rank that ends, however it ends, closes its sockets; the leader's process ends
then too, and with it all others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from tridentlm.config import EngineSettings
from tridentlm.core.extras import StepExtras
from tridentlm.core.plan import StepPlan
from tridentlm.errors import InternalError, TridentError, from_payload
from tridentlm.hub import ModelFiles
from tridentlm.startup import child_environ

logger = logging.getLogger(__name__)

GRACE_SECONDS = 2.0
"""For the leader to say what is wrong, before it ends because a follower has ended."""

EXIT_SECONDS = 1.0

TRACE_SIGNAL, TRACE_SECONDS = signal.SIGUSR1, 0.3

GO = "go"
ARRIVE, LOAD, GET_READY = "arrive", "load its weights", "get ready"


@dataclass(frozen=True, slots=True)
class Job:
    """What a follower shall run as `rank`."""

    rank: int
    settings: EngineSettings
    files: ModelFiles
    device: str


class Followers:
    """Started by the constructor. One thread may call the methods.

    `folder` is empty, and for these ranks alone. Whoever ends them, or outlives the leader, removes
    it.
    """

    def __init__(self, count: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tridentlm-ranks-"))
        self._closing = False
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for _ in range(count):
            ours, theirs = Pipe()
            place = [str(theirs.fileno()), str(self.folder)]
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tridentlm.parallel.follower", *place],
                    env=child_environ(),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            )
            theirs.close()
            self._connections.append(ours)
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def ranks(self) -> int:
        """All, with the leader."""
        return len(self._processes) + 1

    def assign(self, job: Job) -> None:
        """Gives ranks 1, 2, ... the job, each with its own rank."""
        for rank, connection in enumerate(self._connections, 1):
            connection.send(replace(job, rank=rank))

    def wait_for(self, stage: str, seconds: float) -> None:
        """Returns when every follower has said that it has reached the `stage`.

        Raises the error of one that ends instead, EOFError if it leaves none, and InternalError
        when one is not there after `seconds`.
        """
        waiting = {connection: rank for rank, connection in enumerate(self._connections, 1)}
        deadline = time.monotonic() + seconds
        while waiting:
            heard = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for connection in heard:
                assert isinstance(connection, Connection)
                _raise_if_error(connection.recv())
                del waiting[connection]
            if not heard:
                if stage != ARRIVE:
                    self.trace()
                names = f"Rank {', '.join(map(str, waiting.values()))} of {self.ranks}"
                raise InternalError(f"{names} did not {stage} within {seconds:g} s (rank_timeout).")

    def go(self) -> None:
        """Lets them compute together: all have loaded."""
        for connection in self._connections:
            connection.send(GO)

    def send(self, plan: StepPlan) -> None:
        """Raises OSError when a follower has ended."""
        message = pickle.dumps(shared(plan), pickle.HIGHEST_PROTOCOL)
        for connection in self._connections:
            connection.send_bytes(message)

    def trace(self) -> None:
        """Lets those that have arrived write to stderr where their threads are."""
        for process in self._processes:
            process.send_signal(TRACE_SIGNAL)
        time.sleep(TRACE_SECONDS)

    def ended(self) -> list[tuple[int, int]]:
        """(exit code, rank) of those that have ended."""
        codes = [process.poll() for process in self._processes]
        return [(code, rank) for rank, code in enumerate(codes, 1) if code is not None]

    def reason(self) -> TridentError | None:
        """Why a follower has ended, or None: all live."""
        deadline = time.monotonic() + EXIT_SECONDS
        while time.monotonic() < deadline:
            if ended := self.ended():
                code, rank = min(ended)  # one killed by a signal takes others with it
                return self._last_words(rank) or InternalError(
                    f"Rank {rank} of {self.ranks} ended with code {code}."
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
        remove(self.folder)

    def _last_words(self, rank: int) -> TridentError | None:
        connection = self._connections[rank - 1]
        try:
            while connection.poll():
                _raise_if_error(connection.recv())
        except TridentError as error:
            return error
        except (EOFError, OSError):
            pass
        return None

    def _watch(self) -> None:
        wait_for_hangup(self._connections)
        if not self._closing:
            time.sleep(GRACE_SECONDS)
        if not self._closing:
            reason = self.reason()
            logger.error("%s The engine ends with it.", reason and reason.message)
            remove(self.folder)
            os._exit(1)


def remove(folder: Path) -> None:
    """Of a start that has ended. A thread that still opens files in it makes none any more."""
    gone = folder.with_name(f"{folder.name}.gone")
    with contextlib.suppress(OSError):  # somebody else has done so
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def wait_for_hangup(connections: Sequence[Connection]) -> int:
    """Returns the index of the first whose other end is closed, whatever is still unread in it."""
    descriptors = [connection.fileno() for connection in connections]
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLRDHUP)
    return descriptors.index(poller.poll()[0][0])


def shared(plan: StepPlan) -> StepPlan:
    """The plan without what only the leader needs, which chooses the tokens.

    The places whose log-probabilities are asked for stay: their logits come from all ranks.
    """
    if plan.extras is None:
        return plan
    if plan.extras.measured is None:
        return replace(plan, extras=None)
    none, no_bias = np.empty(0, np.int32), np.empty(0, np.float32)
    ids, measured = plan.extras.request_ids, plan.extras.measured
    return replace(plan, extras=StepExtras(ids, none, none, no_bias, measured=measured))


def _raise_if_error(message: Any) -> None:
    if message is not None:
        raise from_payload(message)
