"""`run_proxy` in processes of its own: workers, drain, restart. There is no Triton behind it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import orjson
import psutil

from openai_proxy.settings import ProxySettings
from tests.proxy.fakes import eventually
from tests.waiting import PATIENCE, command_line, free_ports, wait_until_gone

RUN = "import sys; from openai_proxy.serve import run_proxy, ProxySettings as S; "
RUN += "sys.exit(run_proxy(S.from_json(sys.argv[1])))"


@contextmanager
def process(**settings: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`run_proxy` as a child, up and answering; ends with all its workers gone."""
    [port] = free_ports(1)
    asked = ProxySettings(triton="127.0.0.1:9", port=port, drain_seconds=1, **settings)
    child = subprocess.Popen(
        [sys.executable, "-c", RUN, asked.to_json()], stderr=subprocess.PIPE, text=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: answers(url), 2 * PATIENCE)
        yield child, url
    finally:
        workers = workers_of(child) if child.poll() is None else []
        child.kill()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        child.communicate()


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=PATIENCE, verify=False)


def answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return get(f"{url}/health/live").status_code == 200
    return False


def workers_of(child: subprocess.Popen[str]) -> list[psutil.Process]:
    return [p for p in psutil.Process(child.pid).children() if "spawn_main" in command_line(p)]


def test_one_process_is_up_without_triton_logs_to_stderr_and_ends_cleanly() -> None:
    with process(log_json=True) as (child, url):
        assert get(f"{url}/health/ready").status_code == 503
        ask, name = {"prompt": "x"}, {"x-request-id": "find-me"}
        refused = httpx.post(f"{url}/v1/completions", json=ask, headers=name, timeout=PATIENCE)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=PATIENCE)
        assert child.returncode == 0
    [line] = [orjson.loads(line) for line in errors.splitlines() if "find-me" in line]
    assert (line["request_id"], line["status"], line["error"]) == ("find-me", 503, "engine_down")


def test_a_killed_worker_comes_back_and_all_workers_share_the_metrics() -> None:
    with process(workers=2) as (child, url):
        eventually(lambda: len(workers_of(child)) == 2)
        first, second = workers_of(child)
        os.kill(first.pid, signal.SIGKILL)
        eventually(lambda: len({p.pid for p in workers_of(child)} - {first.pid}) == 2)
        assert second.is_running()
        for _ in range(20):
            get(f"{url}/version")
        counted = re.compile(r'requests_total\{route="/version",status="200"\} (\d+)')
        eventually(lambda: counted.search(get(f"{url}/metrics").text)[1] == "20")
        gone = workers_of(child)
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 0
        wait_until_gone(gone)


def test_workers_end_when_their_supervisor_is_killed() -> None:
    with process(workers=2) as (child, _):
        eventually(lambda: len(workers_of(child)) == 2)
        workers = workers_of(child)
        child.kill()
        wait_until_gone(workers)


def test_a_taken_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ProxySettings(port=taken.getsockname()[1])
        child = subprocess.run(
            [sys.executable, "-c", RUN, settings.to_json()], capture_output=True, text=True
        )
    assert child.returncode == 1
    assert "cannot listen" in child.stderr
    assert "Traceback" not in child.stderr
