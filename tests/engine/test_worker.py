"""The engine process, started for real and spoken to over the real channel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

import tridentlm.worker
from tests.waiting import PATIENCE, wait_until, wait_until_gone
from tridentlm.channel import (
    FLUSH,
    HELLO,
    Failed,
    Idle,
    Message,
    Ready,
    Step,
    WorkerClient,
    pack_add,
    receiver,
    sender,
    unpack_message,
)
from tridentlm.config import EngineSettings
from tridentlm.core.plan import StepPlan
from tridentlm.core.request import FinishReason, Request
from tridentlm.engine import Engine
from tridentlm.errors import ModelNotFound
from tridentlm.simulated import SimulatedRunner, SimulatedStep
from tridentlm.worker import Worker

SETTINGS = EngineSettings(runner="simulated", step_ms=1.0, max_running=8)


def request(request_id: int, max_tokens: int = 20, **fields: Any) -> Request:
    return Request(request_id, np.arange(1, 11, dtype=np.int32), max_tokens, **fields)


class Ears:
    """Collects what the worker says."""

    def __init__(self, client: WorkerClient) -> None:
        self.client = client
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}

    def hear(self) -> Message:
        message = self.client.recv(PATIENCE)
        assert message is not None, "the worker is silent"
        if isinstance(message, Step):
            self.errors.update(message.output.errors)
            output = message.output
            for i, token, finish in zip(output.ids, output.tokens, output.finish, strict=True):
                assert int(i) not in self.finish, "an output after the terminal one"
                if token >= 0:
                    self.tokens.setdefault(int(i), []).append(int(token))
                if finish:
                    self.finish[int(i)] = FinishReason(finish)
        return message

    def hear_until_ended(self, *ids: int) -> None:
        while not self.finish.keys() >= set(ids):
            self.hear()

    def hear_idle(self) -> Idle:
        while not isinstance(message := self.hear(), Idle):
            pass
        return message


@pytest.fixture
def client() -> Iterator[WorkerClient]:
    client = WorkerClient(SETTINGS, python=sys.executable)
    yield client
    client.close()


@pytest.fixture
def ears(client: WorkerClient) -> Ears:
    ears = Ears(client)
    ready = ears.hear()
    assert isinstance(ready, Ready)
    assert (ready.limits.max_running, ready.model) == (8, "simulated")
    return ears


def test_requests_of_one_message_are_answered_and_then_the_engine_idles(ears: Ears) -> None:
    ears.client.add([request(i) for i in range(12)])
    ears.hear_until_ended(*range(12))
    assert {len(tokens) for tokens in ears.tokens.values()} == {20}
    assert set(ears.finish.values()) == {FinishReason.LENGTH}
    stats = ears.hear_idle().stats
    assert (stats.running, stats.waiting, stats.free_slots) == (0, 0, 8)
    assert stats.generation_tokens == 240


def test_abort_ends_a_running_and_a_queued_request_and_no_other(ears: Ears) -> None:
    ears.client.add([request(i, max_tokens=8000) for i in range(9)])
    while 0 not in ears.tokens:
        ears.hear()
    ears.client.abort([0, 8, 1234])
    ears.hear_until_ended(0, 8)
    assert ears.finish == {0: FinishReason.ABORT, 8: FinishReason.ABORT}
    ears.client.abort(list(range(1, 8)))
    ears.hear_until_ended(*range(1, 8))
    assert ears.hear_idle().stats.free_slots == 8


def test_bad_request_is_answered_with_an_error_and_its_neighbours_are_served(ears: Ears) -> None:
    bad = [
        request(1, max_tokens=0),
        request(2, max_tokens=9000),
        request(3, temperature=float("nan")),
        Request(4, np.array([-7], np.int32), 5),
    ]
    ears.client.add([request(0), *bad, request(5)])
    ears.client.flush()
    ears.hear_until_ended(*range(6))
    assert sorted(ears.errors) == [1, 2, 3, 4]
    assert {ears.finish[0], ears.finish[5]} == {FinishReason.LENGTH}


def test_deadline_is_kept_by_the_engine_process(ears: Ears) -> None:
    start = time.monotonic()
    ears.client.add([request(1, max_tokens=8000, deadline=start + 0.2)])
    ears.hear_until_ended(1)
    assert ears.finish == {1: FinishReason.ABORT}
    assert time.monotonic() - start > 0.2


def test_stop_ends_what_runs_says_so_and_exits_cleanly(ears: Ears) -> None:
    ears.client.add([request(1, max_tokens=8000)])
    while 1 not in ears.tokens:
        ears.hear()
    ears.client.stop()
    ears.hear_until_ended(1)
    assert ears.finish == {1: FinishReason.ABORT}
    assert ears.client.process.wait(PATIENCE) == 0


def test_no_file_is_left_once_the_engine_is_ready(ears: Ears) -> None:
    assert not ears.client._folder.exists()
    ears.client.add([request(1)])
    ears.hear_until_ended(1)


def test_killed_process_is_noticed_and_its_successor_serves(ears: Ears) -> None:
    ears.client.add([request(1, max_tokens=8000)])
    ears.hear()
    os.kill(ears.client.process.pid, signal.SIGKILL)
    wait_until(lambda: ears.client.recv(0.1) is None and not ears.client.alive)
    ears.client.add([request(2)])
    successor = Ears(WorkerClient(SETTINGS, python=sys.executable))
    try:
        assert isinstance(successor.hear(), Ready)
        successor.client.add([request(2)])
        successor.hear_until_ended(2)
    finally:
        successor.client.close()


def test_interrupt_from_the_terminal_does_not_end_it(ears: Ears) -> None:
    ears.client.process.send_signal(signal.SIGINT)
    ears.client.add([request(1)])
    ears.hear_until_ended(1)
    assert ears.client.alive


def test_closing_twice_and_sending_afterwards_is_harmless() -> None:
    client = WorkerClient(SETTINGS, python=sys.executable)
    client.close()
    client.close()
    client.add([request(1)])
    assert not client.alive


def test_model_that_does_not_exist_is_reported_before_the_process_exits(tmp_path: Path) -> None:
    settings = EngineSettings(model=str(tmp_path / "missing"))
    client = WorkerClient(settings, python=sys.executable)
    try:
        message = Ears(client).hear()
        assert isinstance(message, Failed)
        assert isinstance(message.error, ModelNotFound)
        assert client.process.wait(PATIENCE) == 1
    finally:
        client.close()


STUB = """
import sys, time
from tridentlm.channel import WorkerClient
from tridentlm.config import EngineSettings
client = WorkerClient(EngineSettings(runner="simulated"), python=sys.executable)
assert sys.argv[1] == "loading" or client.recv(60) is not None
print(client.process.pid, client._folder, flush=True)
time.sleep(600)
"""

SERVER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
"""


@pytest.mark.parametrize("state", ["loading", "ready"])
@pytest.mark.parametrize("killed", ["stub", "server"])
def test_death_of_stub_or_server_ends_the_engine_process(killed: str, state: str) -> None:
    command = [sys.executable, "-c", SERVER, STUB, state]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        pid, folder = server.stdout.readline().split()
        engine = psutil.Process(int(pid))
        stub = engine.parent()
        assert stub is not None
        (stub if killed == "stub" else server).kill()
        wait_until_gone([engine, stub])
        assert not Path(folder).exists()
    finally:
        server.kill()
        server.communicate()


class BreakingRunner(SimulatedRunner):
    """Its third step fails, as on a lost device."""

    def launch(self, plan: StepPlan) -> SimulatedStep:
        if plan.step == 2:
            raise RuntimeError("device lost")
        return super().launch(plan)


class InThread:
    """A worker of this process, which a test can reach into; up once entered, joined at the end."""

    def __init__(self, settings: EngineSettings, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        to_worker, from_worker = f"ipc://{folder}/in", f"ipc://{folder}/out"
        self.inbox = receiver(self.context, from_worker)
        self.outbox = sender(self.context, to_worker)
        self.codes: list[int] = []
        self.worker = Worker(receiver(self.context, to_worker), sender(self.context, from_worker))
        self.thread = threading.Thread(target=lambda: self.codes.append(self.worker.run(settings)))

    def __enter__(self) -> InThread:
        self.thread.start()
        self.outbox.send_multipart([HELLO])
        assert isinstance(self.hear(), Ready)
        return self

    def __exit__(self, *exception: object) -> None:
        self.thread.join(PATIENCE)
        self.context.destroy(linger=0)

    def hear(self) -> Message:
        assert self.inbox.poll(int(PATIENCE * 1e3)), "the worker is silent"
        return unpack_message(self.inbox.recv_multipart())


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_failing_step_answers_every_request_and_ends_the_process(
    steps_in_flight: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = EngineSettings(
        runner="simulated", step_ms=0, max_running=2, steps_in_flight=steps_in_flight
    )
    broken = BreakingRunner(settings), "broken"
    monkeypatch.setattr(tridentlm.worker, "build_runner", lambda settings: broken)
    with InThread(settings, tmp_path) as worker:
        worker.outbox.send_multipart(pack_add([request(i) for i in range(5)], time.monotonic()))
        errors: dict[int, str] = {}
        while len(errors) < 5:
            message = worker.hear()
            if isinstance(message, Step):
                errors.update(message.output.errors)
        assert set(errors.values()) == {"The engine failed: RuntimeError: device lost"}
    assert worker.codes == [1]


def test_a_failed_integrity_check_is_told_and_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lose_a_page(engine: Engine) -> None:
        engine.scheduler.kv.pool.allocate(1)

    monkeypatch.setattr(Engine, "flush_cache", lose_a_page)
    with InThread(SETTINGS, tmp_path) as worker:
        worker.outbox.send_multipart(pack_add([request(1)], time.monotonic()))
        message = worker.hear()
        while not isinstance(message, Idle) or not message.stats.integrity_checks:
            message = worker.hear()
        assert (message.stats.integrity_checks, message.stats.integrity_failures) == (1, 0)
        worker.outbox.send_multipart([FLUSH])
        while isinstance(message, Idle) and not message.stats.integrity_failures:
            message = worker.hear()
        assert isinstance(message, Idle)
        assert (message.stats.integrity_checks, message.stats.integrity_failures) == (2, 1)
    assert worker.codes == [1]
