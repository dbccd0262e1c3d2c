"""Processes that die under load: every stream ends, the service says so, and comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.service import START_SECONDS, Service, get
from tests.waiting import PATIENCE, command_line, free_ports, wait_until, wait_until_gone

pytestmark = pytest.mark.server
STREAMS = 32


def stream_until_end(
    service: Service, max_tokens: int, started: threading.Semaphore
) -> tuple[str, float]:
    """How one stream ended, "done", "error" (an error event) or "broken" (cut off), and when."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": max_tokens,
        "stream": True,
    }
    events: list[str] = []
    try:
        url = f"{service.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE, verify=False) as answer:
            for line in answer.iter_lines():
                if line:
                    events.append(line)
                if len(events) == 1 and line:
                    started.release()
    except httpx.HTTPError:
        return "broken", time.monotonic()
    assert events[-1] == "data: [DONE]"
    return ("error" if is_error(events[-2]) else "done"), time.monotonic()


def is_error(event: str) -> bool:
    error = json.loads(event.removeprefix("data: ")).get("error")
    assert error is None or set(error) == {"message", "type", "param", "code"}
    return error is not None


def under_load(
    service: Service, blow: Callable[[], object], max_tokens: int = 8000
) -> tuple[list[str], float]:
    """Runs STREAMS streams, strikes, and returns how they ended and seconds to the last end."""
    with ThreadPoolExecutor(STREAMS) as pool:
        runs = start_streams(pool, service, STREAMS, max_tokens)
        struck = time.monotonic()
        blow()
        ends = [run.result(timeout=PATIENCE) for run in runs]
    return [how for how, _ in ends], max(when for _, when in ends) - struck


def start_streams(
    pool: ThreadPoolExecutor, service: Service, count: int, max_tokens: int
) -> list[Future[tuple[str, float]]]:
    """Returns once each of them has had its first event."""
    started = threading.Semaphore(0)
    runs = [pool.submit(stream_until_end, service, max_tokens, started) for _ in range(count)]
    for _ in runs:
        assert started.acquire(timeout=PATIENCE)
    return runs


def test_a_killed_engine_process_ends_every_stream_with_an_error_and_comes_back(
    fresh: Service,
) -> None:
    fresh.start()

    def blow() -> None:
        fresh.kill(fresh.engine_process())
        wait_until(lambda: not fresh.ready(), PATIENCE, "not ready")

    ends, seconds = under_load(fresh, blow)
    assert ends == ["error"] * STREAMS
    assert seconds < 10
    wait_until(fresh.ready, PATIENCE, "ready again")
    assert fresh.chat().json()["choices"][0]["finish_reason"] == "length"
    wait_until(fresh.idle, PATIENCE, "idle")
    restarts = "tridentlm_engine_restarts_total"
    wait_until(lambda: fresh.metric(restarts) == 1, PATIENCE, "the restart noted")


def test_a_killed_engine_stub_is_replaced(fresh: Service) -> None:
    fresh.start()
    ends, _ = under_load(fresh, lambda: fresh.kill(fresh.engine_stub()))
    assert ends == ["error"] * STREAMS
    wait_until(fresh.ready, PATIENCE, "ready again")
    assert fresh.chat().status_code == 200
    generate = httpx.post(
        f"{fresh.triton_url}/v2/models/generate/generate",
        json={"text_input": "Hello", "max_tokens": 3, "stream": False},
        timeout=PATIENCE,
    )
    assert generate.json()["finish_reason"] == "length"
    assert fresh.stop() == 0


def test_a_killed_tritonserver_ends_the_service_with_the_reason(fresh: Service) -> None:
    fresh.start()
    family = fresh.family()
    assert fresh.process is not None
    ends, _ = under_load(fresh, lambda: fresh.kill(fresh.tritonserver()))
    assert set(ends) <= {"error", "broken"}
    assert fresh.process.wait(PATIENCE) == 1
    assert "triton ended with SIGKILL" in fresh.log_text()
    wait_until_gone(family)


def test_a_killed_proxy_worker_is_replaced_and_the_others_streams_run_on(tmp_path: Path) -> None:
    with Service(tmp_path, "--runner", "simulated", "--workers", "2") as service:
        lost, other = proxy_workers(service)
        supervisor = lost.parent()
        assert supervisor is not None
        # They share a socket, so each gets the streams that start while the other cannot take any.
        # Their supervisor, which would kill one that does not answer it, sees nothing of that.
        with ThreadPoolExecutor(STREAMS) as pool:
            with stopped(supervisor):
                with stopped(other):
                    broken = start_streams(pool, service, STREAMS // 2, 8000)
                with stopped(lost):
                    done = start_streams(pool, service, STREAMS // 2, 800)
                service.kill(lost)
            assert {run.result(PATIENCE)[0] for run in broken} == {"broken"}
            assert {run.result(PATIENCE)[0] for run in done} == {"done"}
        wait_until(lambda: len(proxy_workers(service)) == 2, PATIENCE, "the worker again")
        wait_until(service.idle, 15, "the dead worker's requests aborted")
        assert all(service.chat().status_code == 200 for _ in range(20))


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """It does nothing within."""
    process.suspend()
    try:
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, PATIENCE, "it stops")
        yield
    finally:
        process.resume()


def proxy_workers(service: Service) -> list[psutil.Process]:
    return [p for p in service.family() if "spawn_main" in command_line(p)]


def test_no_stub_outlives_a_bare_tritonserver_that_was_killed(tmp_path: Path) -> None:
    http, grpc, metrics = free_ports(3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    argv = [sys.executable, "-m", "openai_proxy.cli", "triton", "--"]
    repository = Path(__file__).parents[2] / "model_repository"
    environ = {**os.environ, "TRIDENTLM_RUNNER": "simulated"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [*argv, f"--model-repository={repository}", *ports], env=environ, stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{http}/v2"

    def ready() -> bool:
        try:
            return get(f"{url}/health/ready").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(ready, START_SECONDS, "tritonserver ready")
        family = psutil.Process(server.pid).children(recursive=True)
        assert len(family) >= 5
    finally:
        server.kill()
        server.wait()
    wait_until_gone(family)
