"""Starts of several ranks that cannot work: they end with the reason, soon, and leave nobody."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from tests.models.conftest import reference
from tests.models.test_gguf import write_gguf
from tests.parallel.conftest import settings_of
from tests.parallel.test_death import SECONDS, ranks_of, run_to_the_end
from tests.waiting import wait_until, wait_until_gone
from tridentlm.channel import WorkerClient
from tridentlm.config import EngineSettings
from tridentlm.engine import Engine, build_runner
from tridentlm.errors import EngineDown, InternalError, InvalidRequest
from tridentlm.hub import resolve_model
from tridentlm.llm import LLM
from tridentlm.models.shard import Shard
from tridentlm.parallel import check, follower, leader
from tridentlm.parallel.check import check_ranks
from tridentlm.parallel.followers import ARRIVE, Followers, Job
from tridentlm.parallel.group import DistributedGroup, open_store
from tridentlm.triton.process import EngineProcess

BOUND = 2.0


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, and no file of a start."""
    with tempfile.TemporaryDirectory() as folder:  # sockets' names may not be as long as pytest's
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield
        assert not ranks_of(psutil.Process())
        assert not list(Path(folder).glob("tridentlm-ranks-*"))


def send(followers: Followers, number: signal.Signals) -> None:
    followers._processes[0].send_signal(number)


def late(llama: Path) -> EngineSettings:
    return replace(settings_of(llama, 2), rank_timeout=BOUND)


class Patient(Followers):
    """Waits as long as it takes for ranks to arrive."""

    def wait_for(self, stage: str, seconds: float) -> None:
        super().wait_for(stage, SECONDS if stage == ARRIVE else seconds)


class Killed(Patient):
    """Rank 1 is killed when it has arrived."""

    def wait_for(self, stage: str, seconds: float) -> None:
        super().wait_for(stage, seconds)
        if stage == ARRIVE:
            send(self, signal.SIGKILL)


class Frozen(Followers):
    """Rank 1 is stopped before it hears what to do, and taken to have arrived."""

    def assign(self, job: Job) -> None:
        send(self, signal.SIGSTOP)
        super().assign(job)

    def wait_for(self, stage: str, seconds: float) -> None:
        if stage != ARRIVE:
            super().wait_for(stage, seconds)


def start(settings: EngineSettings, followers: Followers) -> leader.ParallelRunner:
    return leader.ParallelRunner(settings, resolve_model(settings), followers)


def test_a_rank_that_never_arrives_fails_the_start_within_the_bound(llama: Path) -> None:
    followers = Followers(1)
    send(followers, signal.SIGSTOP)
    with pytest.raises(InternalError, match=r"Rank 1 of 2 did not arrive within 2 s \(rank_timeo"):
        start(late(llama), followers)


def test_a_rank_that_dies_before_it_arrives_fails_the_start(llama: Path) -> None:
    followers = Followers(1)
    send(followers, signal.SIGKILL)
    with pytest.raises(InternalError, match="Rank 1 of 2 ended with code -9"):
        start(settings_of(llama, 2), followers)


def test_ranks_that_do_not_join_fail_the_start_and_the_next_one_works(llama: Path) -> None:
    with pytest.raises(InternalError, match=r"The ranks did not join within 2 s \(rank_timeout\)"):
        start(late(llama), Frozen(1))
    with pytest.raises(InternalError, match="Rank 1 of 2 ended with code -9"):
        start(late(llama), Killed(1))
    again, _ = build_runner(settings_of(llama, 2))
    run_to_the_end(Engine(again))
    again.close()


HALF = """
import sys
import orjson
from tridentlm.config import EngineSettings
from tridentlm.errors import InternalError
from tridentlm.hub import resolve_model
from tridentlm.parallel.followers import ARRIVE, Followers
from tridentlm.parallel.leader import ParallelRunner

class Half(Followers):
    def wait_for(self, stage, seconds):
        super().wait_for(stage, seconds)
        if stage == ARRIVE:
            self._processes[0].kill()
            self._processes[0].wait()
            with (self.folder / "store").open("ab") as file:
                file.write(bytes([9, 0, 0, 0]))  # the length of what does not come

settings = EngineSettings(**orjson.loads(sys.argv[1]))
try:
    ParallelRunner(settings, resolve_model(settings), Half(1))
except InternalError as error:
    print(error.message)
"""


def test_a_rank_that_dies_in_the_middle_of_a_word_to_the_others_fails_the_start(
    llama: Path,
) -> None:
    """In a process of its own, one thread of which goes on waiting for the rest."""
    command = [sys.executable, "-c", HALF, orjson.dumps(settings_of(llama, 2)).decode()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == "Rank 1 of 2 ended with code -9.\n", done.stderr


def test_a_rank_that_hangs_while_it_loads_fails_the_start_within_the_bound(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followers = Patient(1)

    class Joined(DistributedGroup):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            send(followers, signal.SIGSTOP)

    monkeypatch.setattr(leader, "DistributedGroup", Joined)
    # On a busy machine it may be stopped a moment too early or too late.
    told = r"did not (load its weights|join) within 2 s \(rank_timeout\)|[Tt]imed out|[Tt]imeout"
    with pytest.raises((InternalError, RuntimeError), match=told):
        start(late(llama), followers)


def test_a_rank_does_not_wait_for_ever_until_the_first_has_loaded(
    llama: Path, tmp_path: Path
) -> None:
    """The test is rank 0, and never says that all have loaded."""
    settings = replace(settings_of(llama, 2), rank_timeout=5.0)
    ours, theirs = Pipe()
    store = open_store(tmp_path, SECONDS)
    met: list[DistributedGroup] = []  # it must not go before rank 1 has met it, too

    def join() -> None:
        met.append(DistributedGroup(Shard(0, 2), store, "cpu", SECONDS, lambda: None))

    joins = threading.Thread(target=join)
    joins.start()
    ours.send(Job(1, settings, resolve_model(settings), "cpu"))
    with pytest.raises(InternalError, match="Rank 0 did not load its weights within 5 s"):
        follower.follow(theirs, tmp_path)
    joins.join()
    assert [ours.recv() for _ in range(2)] == [None, None]  # arrived, loaded


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_leader_that_is_ended_while_it_loads_takes_every_rank_with_it(
    number: signal.Signals, llama: Path
) -> None:
    client = WorkerClient(settings_of(llama, 2), python=sys.executable)
    try:
        first = psutil.Process(client.process.pid)
        wait_until(lambda: ranks_of(first), SECONDS)
        ranks = [first, *ranks_of(first)]
        client.process.send_signal(number)
        assert client.process.wait(SECONDS) == -number
        wait_until_gone(ranks)
    finally:
        client.close()


def test_an_owner_that_closes_while_it_loads_leaves_no_rank(llama: Path) -> None:
    client = WorkerClient(settings_of(llama, 2), python=sys.executable)
    first = psutil.Process(client.process.pid)
    try:
        wait_until(lambda: ranks_of(first), SECONDS)
        ranks = [first, *ranks_of(first)]
    finally:
        client.close(timeout=0.1)
    wait_until_gone(ranks)


def test_a_leader_that_is_killed_while_it_serves_takes_every_rank_with_it(llama: Path) -> None:
    engine = EngineProcess(settings_of(llama, 2), on_restart=lambda: None)
    engine.start()
    try:
        assert engine._worker is not None
        first = psutil.Process(engine._worker.process.pid)
        ranks = [first, *ranks_of(first)]
        assert len(ranks) == 2
        first.kill()
        wait_until(lambda: isinstance(engine.receive(0.1), EngineDown), SECONDS)
        wait_until_gone(ranks)
    finally:
        engine.close()


def test_ranks_that_cannot_work_are_refused_before_any_starts(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = write_gguf(reference(llama), tmp_path / "model.gguf")
    monkeypatch.setattr("tridentlm.parallel.followers.subprocess", None)
    for attempt in (
        lambda: LLM(str(llama), tp=3),
        lambda: build_runner(settings_of(llama, 3)),
        lambda: build_runner(settings_of(gguf, 3)),
    ):
        with pytest.raises(InvalidRequest, match=r"This model can have tp 1, 2, 4\.") as caught:
            attempt()
        assert caught.value.param == "tp"


@pytest.mark.parametrize(
    ("device", "gpus", "tp", "reason"),
    [
        ("auto", 2, 4, "tp is 4, and 2 CUDA devices are visible: tp can be 1 to 2"),
        ("cuda", 0, 2, "tp is 2, and 0 CUDA devices are visible: device cpu takes any"),
        ("auto", 4, 4, ""),
        ("auto", 0, 4, ""),
        ("cpu", 2, 4, ""),
    ],
)
def test_more_ranks_than_gpus_are_refused_where_there_are_gpus(
    device: str, gpus: int, tp: int, reason: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "visible_gpus", lambda: gpus)
    settings = EngineSettings(model=str(llama), device=device, tp=tp)
    if not reason:
        check_ranks(settings, resolve_model(settings))
        return
    with pytest.raises(InvalidRequest, match=reason) as caught:
        check_ranks(settings, resolve_model(settings))
    assert caught.value.param == "tp"


def test_the_check_needs_no_torch(llama: Path) -> None:
    code = (
        "import sys; from tridentlm.config import EngineSettings; "
        "from tridentlm.hub import resolve_model; from tridentlm.parallel.check import check_ranks;"
        "settings = EngineSettings(model=sys.argv[1], tp=2); "
        "check_ranks(settings, resolve_model(settings)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(llama)], check=True)
