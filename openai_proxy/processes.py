"""Child processes whose whole offspring can be watched and ended.

A killed tritonserver's children are handed to init and some never exit by themselves, so what
belongs to a child is (a) everything in the session it leads and (b) every descendant seen alive.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import psutil

PR_SET_PDEATHSIG = 1
TAIL_LINES = 1000
_libc = ctypes.CDLL(None, use_errno=True)


def _end_with_parent() -> None:
    # Runs between fork and exec: nothing but this one system call.
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Family:
    """One child in a session of its own. Start it from the main thread, which it then ends with.

    `on_line` gets each line of its output, from a thread; `tail()` keeps the last ones.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        on_line: Callable[[str], None],
    ) -> None:
        self.name = name
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._seen: dict[int, psutil.Process] = {}
        self._child = subprocess.Popen(
            list(argv),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self._pump = threading.Thread(target=self._read, name=f"{name}-output", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def exit_code(self) -> int | None:
        """None while the child runs; negative for a signal, as in subprocess."""
        return self._child.poll()

    def observe(self) -> list[psutil.Process]:
        """The living descendants now; remembers them for `kill`."""
        try:
            now = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            now = []
        for process in now:
            self._seen.setdefault(process.pid, process)
        self._seen = {pid: p for pid, p in self._seen.items() if is_alive(p)}
        return [p for p in now if is_alive(p)]

    def terminate(self) -> None:
        """SIGTERM to the child alone: it ends its own children in good order."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """True when the child itself is gone within `seconds`."""
        try:
            self._child.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self, grace: float = 0.0) -> list[int]:
        """Ends the child and all its offspring, SIGKILL after `grace` seconds for the offspring to
        end by themselves. Returns the process ids that survived even that (none, normally)."""
        until = time.monotonic() + grace
        while grace and self._members() and time.monotonic() < until:
            time.sleep(0.05)
        until = time.monotonic() + 2.0
        while True:
            members = self._members()
            for process in members:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            self._child.poll()
            if not members or time.monotonic() > until:
                break
            time.sleep(0.02)
        self.wait(1.0)
        self._pump.join(0.5)
        return [p.pid for p in members]

    def tail(self) -> list[str]:
        """The last lines of output, TAIL_LINES at most."""
        if self.exit_code() is not None:
            self._pump.join(0.5)
        return list(self._lines)

    def _members(self) -> list[psutil.Process]:
        self.observe()
        found = dict(self._seen)
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.pid:
                    found[process.pid] = process
            except ProcessLookupError:
                continue
        return [p for p in found.values() if is_alive(p)]

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as stream:
            for raw in stream:
                line = raw.decode("utf-8", "replace").rstrip("\n")
                self._lines.append(line)
                self._on_line(line)


def is_alive(process: psutil.Process) -> bool:
    """False also for a zombie, which only waits for its parent to collect it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
