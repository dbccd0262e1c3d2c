"""The engine process as the stub sees it: started, watched, started again when it dies.

    down --start--> loading --Ready--> up --dies--> down, back-off 0.5 s, 1 s, 2 s, ... 30 s
                       `--Failed or dies--> down

`receive` belongs to one thread (the pump); `add` and `abort` may come from any.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from tridentlm.channel import Failed, Ready, Step, WorkerClient
from tridentlm.config import EngineSettings
from tridentlm.core.plan import EngineStats
from tridentlm.core.request import Limits, Request
from tridentlm.errors import EngineDown, InvalidRequest, TridentError
from tridentlm.hub import python_executable

FIRST_BACKOFF, LAST_BACKOFF = 0.5, 30.0
COUNTED = ("preemptions", "integrity_checks", "integrity_failures")
"""Fields of EngineStats that `describe` adds up over all processes so far."""


class EngineProcess:
    """One engine process at a time. `on_restart` is called whenever a lost one is replaced."""

    def __init__(self, settings: EngineSettings, on_restart: Callable[[], None]) -> None:
        self._settings = settings
        self._on_restart = on_restart
        self._worker: WorkerClient | None = None
        self._ready: Ready | None = None
        self._stats: EngineStats | None = None
        self._past: Counter[str] = Counter()  # what lost processes had counted
        self._start_at = 0.0
        self._backoff = FIRST_BACKOFF

    @property
    def up(self) -> bool:
        return self._ready is not None

    @property
    def limits(self) -> Limits:
        """Raises EngineDown while the process is not up."""
        if self._ready is None:
            raise EngineDown("The engine is starting again; try in a moment.")
        return self._ready.limits

    def check_grammar(self) -> None:
        """Raises InvalidRequest when the engine cannot hold answers to a grammar."""
        if self._ready is not None and not self._ready.grammars:
            raise InvalidRequest(
                "This engine cannot hold answers to a form or a tool call's schema.",
                param="grammar",
                code="unsupported_parameter",
            )

    def start(self) -> None:
        """Starts the process and waits until it has loaded. Raises what it failed with."""
        self._worker = WorkerClient(self._settings, python=python_executable())
        while self._ready is None:
            event = self.receive(1.0)
            if isinstance(event, TridentError):
                raise event

    def receive(self, timeout: float) -> Step | TridentError | None:
        """The next step, or the error that ended the process and with it all its requests."""
        if self._worker is None:
            if time.monotonic() < self._start_at:
                time.sleep(min(timeout, 0.05))
                return None
            self._worker = WorkerClient(self._settings, python=python_executable())
            self._on_restart()
        message = self._worker.recv(timeout)
        if message is None and not self._worker.alive:
            return self._lost(EngineDown("The engine process died."))
        if isinstance(message, Failed):
            return self._lost(message.error)
        if isinstance(message, Ready):
            logging.info(
                "engine ready: %s on %s in %s, loaded in %.1f s",
                message.model,
                message.device,
                message.dtype,
                message.load_seconds,
            )
            self._ready, self._backoff = message, FIRST_BACKOFF
        elif message is not None:
            self._stats = message.stats
            if isinstance(message, Step):
                return message
        return None

    def add(self, requests: Sequence[Request]) -> None:
        if requests and self._worker is not None:
            self._worker.add(requests)

    def abort(self, ids: Sequence[int]) -> None:
        if ids and self._worker is not None:
            self._worker.abort(ids)

    def flush_cache(self) -> None:
        if self._worker is not None:
            self._worker.flush()

    def close(self) -> None:
        self._ready = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def describe(self) -> dict[str, Any]:
        """Limits, load and names for `op=status`; only names while the process is down."""
        described: dict[str, Any] = {name: self._past[name] for name in COUNTED}
        if self._ready is not None:
            described |= asdict(self._ready.limits)
            for name in ("device", "dtype", "load_seconds"):
                described[name] = getattr(self._ready, name)
        if self._ready is not None and self._stats is not None:
            described |= asdict(self._stats)
            for name in COUNTED:
                described[name] += self._past[name]
        return described

    def _lost(self, error: TridentError) -> TridentError:
        logging.error("%s Starting it again in %.1f s.", error.message, self._backoff)
        for name in COUNTED if self._stats is not None else ():
            self._past[name] += getattr(self._stats, name)
        worker, self._worker = self._worker, None
        self._ready = self._stats = None
        if worker is not None:
            worker.close(timeout=0)
        self._start_at = time.monotonic() + self._backoff
        self._backoff = min(self._backoff * 2, LAST_BACKOFF)
        return error
