from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from openai_proxy.tritonserver import (
    ServerNotFound,
    TritonServer,
    locate,
    numpy_problem,
    stub_problem,
)
from tests.launcher.service import START_SECONDS, Command, write_trivial_model
from tests.waiting import PATIENCE, free_ports, wait_until


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIDENTLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_server_with_a_stub_for_this_python_is_found(own_cache: Path) -> None:
    server = locate()
    assert os.access(server.binary, os.X_OK)
    assert stub_problem(server) == ""


def test_python_models_run_in_this_environment_on_the_located_server(tmp_path: Path) -> None:
    write_trivial_model(tmp_path, "echo")
    http, grpc, metrics = free_ports(3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    triton = Command(["triton", "--", f"--model-repository={tmp_path}", *ports])
    try:
        url = f"http://127.0.0.1:{http}/v2/models/echo"
        wait_until(lambda: _status(f"{url}/ready") == 200, START_SECONDS, "model ready", triton)
        word = {"name": "word", "shape": [1], "datatype": "BYTES", "data": ["hello"]}
        answer = httpx.post(f"{url}/infer", json={"inputs": [word]}, timeout=PATIENCE).json()
        assert answer["outputs"][0]["data"] == [f"hello from {sys.prefix}"]
        code, _ = triton.end(signal.SIGTERM)
        assert code == 0
    finally:
        triton.stop()


def test_triton_root_works_without_executable_bits(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = _wheel()
    root = tmp_path / "unpacked"
    shutil.copytree(wheel / "pytriton" / "tritonserver", root / "pytriton" / "tritonserver")
    (root / "nvidia_pytriton.libs").symlink_to(wheel / "nvidia_pytriton.libs")
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and "nvidia_pytriton.libs" not in path.parts:
            path.chmod(0o644)
    monkeypatch.setenv("TRITON_ROOT", str(root))
    server = locate()
    assert server.origin == "TRITON_ROOT"
    assert stub_problem(server) == ""
    done = subprocess.run(server.command(["--help"]), env=server.environ(), capture_output=True)
    assert b"--model-repository" in done.stdout + done.stderr
    assert locate() == server, "the second look finds what the first has made"


def test_a_triton_root_without_a_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_ROOT", "/nowhere")
    with pytest.raises(ServerNotFound, match="/nowhere"):
        locate()


def test_a_server_on_path_goes_before_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (tmp_path / "TRITON_VERSION").write_text("2.69.0\n")
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    server = locate()
    assert (server.binary, server.origin, server.version) == (binary, "PATH", "2.69.0")


def test_the_stub_finds_this_interpreter_first() -> None:
    server = locate()
    path = server.environ({"PATH": "/usr/bin"})["PATH"].split(":")
    assert path == [str(Path(sys.executable).parent), "/usr/bin"]


@pytest.mark.parametrize(
    ("triton", "numpy", "works"),
    [
        ("2.51.0", "1.26.4", True),
        ("2.51.0", "2.1.0", False),
        ("2.69.0", "2.1.0", True),
        ("", "2.1.0", True),
    ],
)
def test_numpy_2_is_refused_where_the_stub_would_lose_its_bytes(
    triton: str, numpy: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: numpy)
    server = TritonServer(Path("x"), "test", triton, Path("y"))
    problem = numpy_problem(server)
    assert problem == "" if works else "numpy<2" in problem


def test_a_stub_that_lacks_a_library_is_reported_by_the_library_name(tmp_path: Path) -> None:
    stub = tmp_path / "stub"
    stub.write_text(
        "#!/bin/sh\n"
        'echo "$0: error while loading shared libraries: libpython3.99.so.1.0: no" >&2\n'
        "exit 127\n"
    )
    stub.chmod(0o755)
    server = dataclasses.replace(locate(), stub=stub)
    assert "libpython3.99.so.1.0" in stub_problem(server)


def _wheel() -> Path:
    spec = importlib.util.find_spec("pytriton")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).parent


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=PATIENCE, verify=False).status_code
    except httpx.HTTPError:
        return 0
