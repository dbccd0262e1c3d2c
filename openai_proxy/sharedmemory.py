"""The regions of Triton's Python backends in /dev/shm. Who is killed leaves its own behind."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

SHM = Path("/dev/shm")
REGIONS = "triton_python_backend_shm_region_*"


def regions() -> list[Path]:
    return list(SHM.glob(REGIONS))


def abandoned() -> list[Path]:
    """Those that no process has open; a living server has its own open all the time."""
    return [path for path in regions() if not _may_be_open(path)]


def remove_abandoned() -> int:
    """Removes them; returns how many are gone."""
    paths = abandoned()
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _may_be_open(path: Path) -> bool:
    """True also for another user's file, and where it cannot be told.

    The kernel grants a write lease only on a file that nobody else has open or mapped. It counts
    processes of other containers too, which /proc would not show.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        # Who opens the file now would have SIGIO sent to us, which ends a process; SIGURG does not.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
