"""The engine process as the stub sees it: what its deaths leave in the counts."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

import tridentlm.triton.process
from tridentlm.channel import Idle, Message, Ready
from tridentlm.config import EngineSettings
from tridentlm.core.plan import EngineStats
from tridentlm.core.request import Limits
from tridentlm.errors import EngineDown
from tridentlm.triton.process import EngineProcess

LIMITS = Limits(128, 64, 16, 4, 8, 32, 100)


def stats(**counts: int) -> EngineStats:
    return EngineStats(0, 0, 4, 64, 0, 1, 0, 0, 0, **counts)


class Life:
    """One process: what it says before it dies."""

    def __init__(self, *messages: Message) -> None:
        self.messages = deque(messages)

    def __call__(self, *_: Any, **__: Any) -> Life:
        return self

    @property
    def alive(self) -> bool:
        return bool(self.messages)

    def recv(self, timeout: float) -> Message | None:
        return self.messages.popleft() if self.messages else None

    def close(self, timeout: float = 0) -> None:
        pass


def test_counts_go_on_over_a_process_that_failed_its_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = Ready(LIMITS, "m", "cpu", "float32", 0.1)
    first = Life(ready, Idle(stats(preemptions=5, integrity_checks=3, integrity_failures=1)))
    second = Life(ready, Idle(stats(preemptions=1, integrity_checks=1)))
    lives = iter([first, second])
    monkeypatch.setattr(
        tridentlm.triton.process, "WorkerClient", lambda *args, **kwargs: next(lives)
    )
    monkeypatch.setattr(tridentlm.triton.process, "FIRST_BACKOFF", 0.0)
    restarts: list[bool] = []
    process = EngineProcess(EngineSettings(), lambda: restarts.append(True))
    process.start()
    assert process.receive(0) is None
    assert process.describe()["integrity_failures"] == 1
    assert isinstance(process.receive(0), EngineDown)
    described = process.describe()
    assert (described["integrity_failures"], "num_pages" in described) == (1, False)
    while not process.up or "running" not in process.describe():
        process.receive(0)
    described = process.describe()
    counts = [described[f"{n}"] for n in ("preemptions", "integrity_checks", "integrity_failures")]
    assert counts == [6, 4, 1]
    assert restarts == [True]
