"""Ranks that end or are killed: nobody waits for ever or is left behind, the engine comes back."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import psutil
import pytest

from tests.parallel.conftest import settings_of
from tests.waiting import command_line, wait_until_gone
from tridentlm.channel import Step, WorkerClient
from tridentlm.config import EngineSettings
from tridentlm.core.request import FinishReason, Request
from tridentlm.engine import Engine, build_runner
from tridentlm.errors import EngineDown, InternalError, InvalidRequest, TridentError
from tridentlm.parallel import check
from tridentlm.triton.process import EngineProcess

SECONDS = 120.0


def request(request_id: int, max_tokens: int = 20) -> Request:
    return Request(request_id, np.arange(3, 13, dtype=np.int32), max_tokens, temperature=0.0)


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """Ranks 1, 2, ... of a leader; libraries start children too, for a moment."""
    children = process.children()
    return [child for child in children if "tridentlm.parallel.follower" in command_line(child)]


class Owner:
    """Holds an engine process as the stub does."""

    def __init__(self, settings: EngineSettings) -> None:
        self.engine = EngineProcess(settings, on_restart=lambda: None)
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.messages: set[str] = set()

    @property
    def leader(self) -> psutil.Process:
        assert self.engine._worker is not None
        return psutil.Process(self.engine._worker.process.pid)

    def receive(self) -> None:
        event = self.engine.receive(0.1)
        if isinstance(event, TridentError):
            self.messages.add(event.message)
        if isinstance(event, Step):
            self.messages.update(event.output.errors.values())
            output = event.output
            for i, token, finish in zip(output.ids, output.tokens, output.finish, strict=True):
                if token >= 0:
                    self.tokens.setdefault(int(i), []).append(int(token))
                if finish:
                    self.finish[int(i)] = FinishReason(finish)

    def receive_until_ended(self, *ids: int) -> None:
        self.receive_until(lambda: self.finish.keys() >= set(ids))

    def receive_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"heard {self.messages}, ended {self.finish}"
            self.receive()


@pytest.fixture
def owner(llama: Path) -> Iterator[Owner]:
    owner = Owner(settings_of(llama, 2, num_pages=1200))
    owner.engine.start()
    yield owner
    owner.engine.close()


def test_killed_rank_ends_every_request_with_an_error_and_the_engine_comes_back(
    owner: Owner,
) -> None:
    owner.engine.add([request(0)])
    owner.receive_until_ended(0)
    leader, (follower,) = owner.leader, ranks_of(owner.leader)
    owner.engine.add([request(i, max_tokens=2000) for i in (1, 2)])
    while len(owner.tokens.get(2, [])) < 5:
        owner.receive()
    follower.kill()
    struck = time.monotonic()
    owner.receive_until_ended(1, 2)
    assert time.monotonic() - struck < SECONDS / 2
    assert owner.finish[1] == owner.finish[2] == FinishReason.ERROR
    assert any("Rank 1 of 2 ended with code -9" in message for message in owner.messages)
    owner.receive_until(lambda: not leader.is_running() and owner.engine.up)
    owner.engine.add([request(3)])
    owner.receive_until_ended(3)
    assert owner.tokens[3] == owner.tokens[0]

    died = EngineDown("The engine process died.").message
    owner.messages.clear()
    ranks = [owner.leader, *ranks_of(owner.leader)]
    assert len(ranks) == 2
    ranks[1].kill()
    owner.receive_until(lambda: died in owner.messages)  # while nothing runs, too
    wait_until_gone(ranks)


STUB = """
import sys, time
import orjson
from tridentlm.channel import WorkerClient
from tridentlm.config import EngineSettings
client = WorkerClient(EngineSettings(**orjson.loads(sys.argv[1])), python=sys.executable)
assert client.recv(120) is not None
print(client.process.pid, flush=True)
time.sleep(600)
"""


def test_no_rank_outlives_the_stub(llama: Path) -> None:
    command = [sys.executable, "-c", STUB, orjson.dumps(settings_of(llama, 2)).decode()]
    stub = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert stub.stdout is not None
        leader = psutil.Process(int(stub.stdout.readline()))
        ranks = [leader, *ranks_of(leader)]
        assert len(ranks) == 2
    finally:
        stub.kill()
        stub.communicate()
    wait_until_gone(ranks)


def test_rank_that_dies_while_the_model_loads_ends_the_engine_process(llama: Path) -> None:
    client = WorkerClient(settings_of(llama, 2), python=sys.executable)
    try:
        leader, deadline = psutil.Process(client.process.pid), time.monotonic() + SECONDS
        while not (ranks := ranks_of(leader)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ranks[0].kill()
        assert client.process.wait(SECONDS) == 1
    finally:
        client.close()


def test_numbers_of_ranks_that_do_not_fit_are_refused_with_those_that_do(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match=r"This model can have tp 1, 2, 4\."):
        build_runner(settings_of(llama, 3))
    monkeypatch.setattr(check, "visible_gpus", lambda: 2)
    with pytest.raises(InvalidRequest, match="2 CUDA devices are visible: tp can be 1 to 2"):
        build_runner(EngineSettings(model=str(llama), tp=4, device="cuda"))
    assert not ranks_of(psutil.Process())


def test_in_one_process_a_lost_rank_is_an_error_and_the_next_engine_works(llama: Path) -> None:
    settings = settings_of(llama, 2)
    runner, _ = build_runner(settings)
    (follower,) = ranks_of(psutil.Process())
    engine = Engine(runner)
    engine.add(request(0))
    assert engine.step() is not None
    follower.kill()
    with pytest.raises(InternalError, match="Rank 1 of 2 ended with code -9"):
        run_to_the_end(engine)
    runner.close()
    again, _ = build_runner(replace(settings, num_pages=0))
    # The pool is sized from the memory that the ranks share; it holds more than can be used.
    assert again.limits.num_pages == settings.max_running * again.limits.pages_for(2048)
    run_to_the_end(Engine(again))
    again.close()
    assert not ranks_of(psutil.Process())


def run_to_the_end(engine: Engine) -> None:
    engine.add(request(1))
    while engine.has_work:
        engine.step()
