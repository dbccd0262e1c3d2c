"""What tests ask of a machine that may be busy: free ports, and waiting for others."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from openai_proxy.processes import is_alive

PATIENCE = 60.0
"""Seconds for what comes soon: nobody's promise, and far more than an idle machine takes."""

FIRST_PORT = 10_000
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Different ports on which nobody listens.

    They lie below those that the system gives to connections, so that nobody gets one by chance
    before it is bound.
    """
    end = max(int(PORT_RANGE.read_text().split()[0]), 2 * FIRST_PORT)
    drawn = random.SystemRandom().sample(range(FIRST_PORT, end), 1000)
    return list(itertools.islice(filter(_is_free, drawn), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def wait_until(
    condition: Callable[[], object], seconds: float = PATIENCE, *what: object, pause: float = 0.02
) -> float:
    """Seconds until `condition()` held; fails after `seconds` with the texts of `what` as then."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise AssertionError("\n".join([f"not within {seconds} s:", *map(str, what)]))
        time.sleep(pause)
    return time.monotonic() - began


def wait_until_gone(processes: Sequence[psutil.Process], seconds: float = PATIENCE) -> float:
    """Seconds until all have ended, whether or not their parents have collected them."""
    return wait_until(lambda: not any(map(is_alive, processes)), seconds, processes)


def command_line(process: psutil.Process) -> str:
    """Empty for one that has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
