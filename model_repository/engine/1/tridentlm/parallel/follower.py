"""A rank beside the first: `python -m tridentlm.parallel.follower FD FOLDER`, a child of rank 0.

It computes its part of every plan that comes through the socket FD, and ends with the socket. The
ranks find each other in FOLDER.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tridentlm import memory
from tridentlm.errors import InternalError, TridentError
from tridentlm.models.shard import Shard
from tridentlm.parallel.followers import TRACE_SIGNAL, Job, remove, wait_for_hangup
from tridentlm.parallel.group import DistributedGroup, open_store
from tridentlm.runner import ModelRunner
from tridentlm.startup import settle


def follow(leader: Connection, folder: Path) -> None:
    """Loads what the leader says, then computes plans until it says None."""
    job: Job = leader.recv()
    timeout = job.settings.rank_timeout
    store = open_store(folder, timeout)
    leader.send(None)

    def wait_until_loaded() -> None:
        leader.send(None)
        if not leader.poll(timeout):
            raise InternalError(
                f"Rank 0 did not load its weights within {timeout:g} s (rank_timeout)."
            )
        leader.recv()

    shard = Shard(job.rank, job.settings.tp)
    group = DistributedGroup(shard, store, job.device, timeout, wait_until_loaded)
    runner = ModelRunner(job.settings, job.files, group)
    settle()
    leader.send(None)
    while (plan := leader.recv()) is not None:
        runner.launch(plan)
    if runner.device == "cuda":
        torch.cuda.synchronize()  # the leader's last kernels wait for what this rank's send


def end_with(leader: Connection, folder: Path) -> None:
    # The main thread may be in a collective that never returns.
    wait_for_hangup([leader])
    remove(folder)
    os._exit(1)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(TRACE_SIGNAL)
    logging.basicConfig(level=logging.WARNING, format="engine rank: %(message)s")
    logging.getLogger(memory.__name__).setLevel(logging.INFO)
    leader, folder = Connection(int(sys.argv[1])), Path(sys.argv[2])
    threading.Thread(target=end_with, args=(leader, folder), daemon=True).start()
    try:
        follow(leader, folder)
    except Exception as error:
        remove(folder)  # the leader may be gone
        if not isinstance(error, TridentError):
            traceback.print_exc()
            error = InternalError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            leader.send(error.payload())
        return 1
    return 0


if __name__ == "__main__":
    # Python's own end would free CUDA Graphs and NCCL in any order, and some wait for ever.
    os._exit(main())
