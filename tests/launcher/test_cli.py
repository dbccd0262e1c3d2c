from __future__ import annotations

import dataclasses
import itertools
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from openai_proxy.cli import app
from openai_proxy.options import ALONE_HELP, CONNECTION_HELP, ENGINE_HELP, PROXY_HELP
from openai_proxy.settings import ProxySettings
from tests.waiting import PATIENCE, free_ports
from tridentlm import __version__
from tridentlm.config import EngineSettings


def tridentlm(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "openai_proxy.cli", *args]
    env = {**os.environ, "COLUMNS": "200", **environ}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=2 * PATIENCE)


def test_every_setting_has_a_flag() -> None:
    engine = {spec.name for spec in dataclasses.fields(EngineSettings)}
    proxy = {spec.name for spec in dataclasses.fields(ProxySettings)}
    assert set(ENGINE_HELP) == engine
    assert set(PROXY_HELP) | set(ALONE_HELP) | set(CONNECTION_HELP) == proxy - {"started"}
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for name in [*ENGINE_HELP, *PROXY_HELP]:
        assert "--" + name.replace("_", "-") in shown


def test_the_command_answers_fast_and_without_torch() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = tridentlm("version")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.strip() == __version__
    # Seconds of computing: how long others keep it from that is not its fault.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0
    code = (
        "import sys, openai_proxy.cli, openai_proxy.launcher, openai_proxy.doctor;"
        "print({'torch', 'transformers', 'fastapi', 'grpc'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tp", "0"], "tp must be at least 1"),
        (["--page-size", "7"], "page_size must be one of"),
        (["--max-running", "0"], "max_running"),
        (["--workers", "0"], "workers"),
        (["--port", "99999"], "port must be in 1 to 65535"),
        (["--http-port", "0"], "--http-port must be in 1 to 65535"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--repository", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--model", "/a", "--model", "/b", "--repository", "/c"], "--repository"),
        (["--model", "/a", "--model", "/b", "--served-model-name", "x"], "once for each"),
    ],
)
def test_serve_refuses_what_cannot_work_before_it_starts_anything(
    args: list[str], message: str
) -> None:
    done = tridentlm("serve", *args)
    assert done.returncode == 1
    assert message in done.stderr
    assert "starting" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["proxy", "--triton", "localhost"], "triton must be HOST:PORT, got 'localhost'"),
        (["proxy", "--triton", "::1:8001"], "triton must be HOST:PORT"),
        (["chat", "--triton", "localhost:0"], "triton must be HOST:PORT"),
        (["bench", "--url", "127.0.0.1:8000"], "must be http://HOST:PORT, got '127.0.0.1:8000'"),
        (["repository", "/proc/models"], "/proc/models"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(args: list[str], message: str) -> None:
    done = tridentlm(*args)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_replay_names_a_file_that_is_no_record(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text("{}")
    done = tridentlm("replay", str(file))
    assert done.returncode == 1
    assert f"{file} is no recorded request" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_names_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = tridentlm("serve", "--grpc-port", port)
    assert done.returncode == 1
    assert f"port {port} (--grpc-port) is in use" in done.stderr
    assert "starting" not in done.stderr


def test_serve_does_not_take_the_ports_of_another_that_still_loads() -> None:
    names = ("--port", "--http-port", "--grpc-port", "--metrics-port")
    ports = [str(port) for port in free_ports(4)]
    given = itertools.chain.from_iterable(zip(names, ports, strict=True))
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0tridentlm serve 127.0.0.1:{ports[3]}")
        done = tridentlm("serve", *given)
    assert done.returncode == 1
    assert f"port {ports[3]} (--metrics-port) is of another `tridentlm serve`" in done.stderr


def test_serve_names_a_port_given_twice() -> None:
    done = tridentlm("serve", "--http-port", "18123", "--metrics-port", "18123")
    assert done.returncode == 1
    assert "--metrics-port and --http-port are both 18123" in done.stderr


def test_repository_prints_the_folder_it_wrote(tmp_path: Path) -> None:
    target = tmp_path / "models"
    done = tridentlm("repository", str(target))
    assert done.stdout.strip() == str(target)
    again = tridentlm("repository", str(target))
    assert again.returncode == 1
    assert "not an empty folder" in again.stderr
