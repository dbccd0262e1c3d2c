from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from openai_proxy import sharedmemory
from openai_proxy.processes import Family
from openai_proxy.recovery import Recovery, read_stub
from openai_proxy.sharedmemory import abandoned, remove_abandoned
from openai_proxy.tritonadmin import AdminError, TritonAdmin
from openai_proxy.tritonserver import locate
from tests.launcher.service import write_trivial_model
from tests.waiting import PATIENCE, free_ports, wait_until

MODELS = ("first", "second")


class Server:
    def __init__(self, repository: Path) -> None:
        http, grpc, metrics = free_ports(3)
        located = locate()
        argv = located.command(
            [
                f"--model-repository={repository}",
                "--model-control-mode=explicit",
                *(f"--load-model={name}" for name in MODELS),
                f"--http-port={http}",
                f"--grpc-port={grpc}",
                f"--metrics-port={metrics}",
            ]
        )
        self.said: list[str] = []
        self.family = Family("triton", argv, located.environ(), lambda line: None)
        self.admin = TritonAdmin("127.0.0.1", http)
        self.recovery = Recovery(self.admin, (), self.said.append)
        wait_until(self.admin.ready, 2 * PATIENCE, "ready")

    def stubs(self) -> dict[str, psutil.Process]:
        read = {process: read_stub(process) for process in self.family.observe()}
        return {stub.model: process for process, stub in read.items() if stub is not None}

    def look(self) -> None:
        self.recovery.look(self.family.observe())

    def look_until_back(self, model: str, old: int) -> None:
        def back() -> bool:
            self.look()
            fresh = self.stubs().get(model)
            if fresh is None or fresh.pid == old:
                return False
            with suppress(AdminError):  # a server that loads a model may be slow to answer
                return self.admin.states()[model] == "READY"
            return False

        wait_until(back, PATIENCE, f"{model} back", self.said)
        wait_until(lambda: any("back after" in line for line in self.said), PATIENCE, "said so")
        self.look()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    for name in MODELS:
        write_trivial_model(tmp_path / "models", name)
    made = Server(tmp_path / "models")
    try:
        yield made
    finally:
        made.family.kill()
        made.recovery.remove_regions()


@pytest.mark.server
def test_a_model_whose_stub_is_killed_comes_back(server: Server) -> None:
    server.look()
    for model in MODELS:
        server.said.clear()
        old = server.stubs()[model]
        old.kill()
        server.look_until_back(model, old.pid)
        assert server.said[0] == f"{model}: its Python stub died; loading the model again"
    assert server.recovery.failure == ""


@pytest.mark.server
def test_two_stubs_killed_at_once_both_come_back(server: Server) -> None:
    server.look()
    old = server.stubs()
    for process in old.values():
        process.kill()
    for model in MODELS:
        server.look_until_back(model, old[model].pid)


@pytest.mark.server
def test_a_stub_that_dies_as_soon_as_it_is_back_comes_back_again(server: Server) -> None:
    server.look()
    server.stubs()["first"].kill()
    wait_until(lambda: server.look() or server.said, PATIENCE, "loss noticed")
    wait_until(lambda: any("back after" in line for line in server.said), PATIENCE, "said so")
    again = server.stubs()["first"]
    again.kill()
    server.said.clear()
    server.look_until_back("first", again.pid)


@pytest.mark.server
def test_a_model_unloaded_on_purpose_stays_unloaded(server: Server) -> None:
    server.look()
    server.admin.unload("first")

    def unloaded() -> bool:
        server.look()
        return "first" not in server.stubs() and server.admin.states()["first"] == "UNAVAILABLE"

    wait_until(unloaded, PATIENCE, "unloaded")
    server.look()
    assert server.said == []


@pytest.mark.server
def test_a_model_that_cannot_be_loaded_again_is_a_failure(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openai_proxy.recovery.ATTEMPTS", 1)
    server.look()
    (tmp_path / "models" / "first" / "1" / "model.py").write_text("raise ValueError('broken')")
    server.stubs()["first"].kill()

    def failed() -> bool:
        server.look()
        return bool(server.recovery.failure)

    wait_until(failed, PATIENCE, "failure reported")
    assert "first" in server.recovery.failure
    assert any("broken" in line for line in server.said)


@pytest.mark.server
@pytest.mark.parametrize("by", ["the launcher", "doctor"])
def test_shared_memory_of_killed_stubs_is_removed(server: Server, by: str) -> None:
    server.recovery.note(server.family.observe())
    read = [read_stub(process) for process in server.stubs().values()]
    regions = [Path("/dev/shm", stub.region) for stub in read if stub is not None]
    assert len(regions) == 2
    assert all(region.exists() for region in regions)
    assert not {*regions} & {*abandoned()}
    server.family.kill()
    assert {*regions} <= {*abandoned()}
    if by == "the launcher":
        server.recovery.remove_regions()
    else:
        remove_abandoned()
    assert not any(region.exists() for region in regions)


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the same file system in place of all regions."""
    with tempfile.TemporaryDirectory(dir=sharedmemory.SHM) as folder:
        monkeypatch.setattr(sharedmemory, "SHM", Path(folder))
        yield Path(folder)


def test_whoever_opens_a_region_while_it_is_looked_at_ends_nobody(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = shm / sharedmemory.REGIONS.replace("*", "x")
    region.touch()
    opened: list[int] = []

    def leased(handle: int, command: int, argument: int = 0) -> int:
        result = fcntl_fcntl(handle, command, argument)
        if argument == fcntl.F_WRLCK:
            opens = f"import os; os.open({str(region)!r}, os.O_RDONLY | os.O_NONBLOCK)"
            other = subprocess.run([sys.executable, "-c", opens], capture_output=True)
            assert b"BlockingIOError" in other.stderr
            opened.append(handle)
        return result

    fcntl_fcntl = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", leased)
    assert abandoned() == [region]
    assert opened


def test_a_process_that_is_no_stub_is_none() -> None:
    assert read_stub(psutil.Process(os.getpid())) is None


def test_an_unreachable_server_is_an_admin_error() -> None:
    admin = TritonAdmin("127.0.0.1", free_ports(1)[0])
    assert not admin.ready()
    with pytest.raises(AdminError, match="/v2/repository/index"):
        admin.states()
