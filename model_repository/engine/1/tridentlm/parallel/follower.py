"""A rank beside the first: `python -m tridentlm.parallel.follower FD`, a child of rank 0.

It computes its part of every plan that comes through the socket FD, and ends with the socket.
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

from tridentlm import memory
from tridentlm.errors import InternalError, TridentError
from tridentlm.models.shard import Shard
from tridentlm.parallel.followers import Job, wait_for_hangup
from tridentlm.parallel.group import joined
from tridentlm.runner import ModelRunner
from tridentlm.startup import settle


def follow(leader: Connection) -> None:
    """Loads what the leader says, then computes plans until it says None."""
    job: Job = leader.recv()
    with joined(Shard(job.rank, job.settings.tp), job.port, job.device) as group:
        runner = ModelRunner(job.settings, job.files, group)
        settle()
        leader.send(None)
        while (plan := leader.recv()) is not None:
            runner.launch(plan)
    runner.close()


def end_with(leader: Connection) -> None:
    # The main thread may be in a collective that never returns.
    wait_for_hangup([leader])
    os._exit(1)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="engine rank: %(message)s")
    logging.getLogger(memory.__name__).setLevel(logging.INFO)
    leader = Connection(int(sys.argv[1]))
    threading.Thread(target=end_with, args=(leader,), daemon=True).start()
    try:
        follow(leader)
    except Exception as error:
        if not isinstance(error, TridentError):
            traceback.print_exc()
            error = InternalError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            leader.send(error.payload())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
