"""`tridentlm serve` as a whole: a real tritonserver, the real proxy, the simulated runner."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from openai_proxy.recovery import read_stub
from openai_proxy.sharedmemory import SHM
from tests.launcher.service import Command, Service
from tests.waiting import PATIENCE, free_ports, wait_until

pytestmark = pytest.mark.server

CHAT = "/v1/chat/completions"


@contextmanager
def serving(*args: str) -> Iterator[Service]:
    service = Service(*args)
    try:
        yield service
    finally:
        service.stop()


def chat(url: str, tokens: int = 5) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True}
    return httpx.post(url + CHAT, json=body, timeout=PATIENCE)


def answers(url: str) -> bool:
    try:
        ready = httpx.get(url + "/health/ready", timeout=PATIENCE, verify=False).status_code == 200
        return ready and chat(url).status_code == 200
    except httpx.HTTPError:
        return False


def assert_nothing_is_left(service: Service, within: float = 10.0) -> None:
    wait_until(lambda: service.survivors() == [], within, f"gone: {service.survivors()}")


def test_it_says_how_to_use_it_answers_and_ends_on_sigterm_without_a_timeout() -> None:
    with serving() as service:
        service.wait_for(f"curl {service.url}{CHAT}", PATIENCE)
        answer = chat(service.url, tokens=7)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 7
        code, seconds = service.end(signal.SIGTERM)
        assert code == 0, service.output
        assert seconds < 20.0, service.output  # an idle Triton takes 5 s, its timeout is 26 s
        assert "killed" not in service.output
        assert_nothing_is_left(service)


def test_sigterm_lets_a_running_answer_finish_and_takes_no_new_request() -> None:
    with serving("--step-ms=30", "--drain-seconds=60") as service:
        lines: list[str] = []
        body = {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 300,  # nine seconds
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }

        def stream() -> None:
            with httpx.stream("POST", service.url + CHAT, json=body, timeout=PATIENCE) as response:
                lines.extend(line for line in response.iter_lines() if line)

        reader = threading.Thread(target=stream)
        reader.start()
        wait_until(lambda: len(lines) > 5, PATIENCE, "streaming")
        service.observe()
        service.child.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses_connections(service.url), PATIENCE, "no new request")
        assert lines[-1] != "data: [DONE]"
        reader.join(PATIENCE)
        assert lines[-1] == "data: [DONE]"
        usage = json.loads(lines[-2].removeprefix("data: "))["usage"]
        assert usage["completion_tokens"] == 300
        assert service.wait() == 0
        assert_nothing_is_left(service)


def test_a_second_signal_ends_at_once() -> None:
    with serving("--step-ms=100") as service:
        body = {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 400,
            "stream": True,
            "ignore_eos": True,
        }
        with httpx.stream("POST", service.url + CHAT, json=body, timeout=PATIENCE) as response:
            next(response.iter_lines())
            service.observe()
            service.child.send_signal(signal.SIGINT)
            wait_until(lambda: "draining" in service.output, PATIENCE, "draining")
            began = time.monotonic()
            service.child.send_signal(signal.SIGINT)
            assert service.wait() == 0
            assert time.monotonic() - began < 15.0  # draining lasts 20 s
        assert_nothing_is_left(service)


def test_a_killed_tritonserver_ends_everything_with_exit_code_1() -> None:
    with serving() as service:
        regions = regions_of(service)
        assert len(regions) > 3
        service.find("bin/tritonserver", "--model-repository").kill()
        assert service.wait() == 1
        assert "triton ended with SIGKILL" in service.output
        assert_nothing_is_left(service)
        assert not any(region.exists() for region in regions)


def test_a_killed_proxy_ends_everything_with_exit_code_1() -> None:
    with serving() as service:
        service.find("openai_proxy.cli", "proxy").kill()
        assert service.wait() == 1
        assert "proxy ended with SIGKILL" in service.output
        assert_nothing_is_left(service)


def test_a_killed_launcher_takes_its_children_along() -> None:
    with serving() as service:
        service.observe()
        os.kill(service.child.pid, signal.SIGKILL)
        wait_until(lambda: service.survivors() == [], PATIENCE, "all gone")


def test_killed_stubs_come_back_and_the_service_answers_again() -> None:
    with serving() as service:
        for model in ("engine", "tokenizer", "relay"):
            stub = service.find("triton_python_backend_stub", f"/{model}/1/model.py")
            stub.kill()
            line = f"{model}: back after"
            wait_until(lambda line=line: line in service.output, 2 * PATIENCE, line, service)
            wait_until(lambda: answers(service.url), PATIENCE, "answers", service)
            assert plain_client_is_served(service)
        regions = regions_of(service)
        code, seconds = service.end(signal.SIGTERM)
        assert code == 0, service.output
        assert seconds < 20.0, service.output
        assert_nothing_is_left(service)
        assert not any(region.exists() for region in regions)


def test_an_interrupted_start_leaves_nothing() -> None:
    ports = ("port", "http-port", "grpc-port", "metrics-port")
    flags = [f"--{name}={port}" for name, port in zip(ports, free_ports(4), strict=True)]
    service = Command(["serve", "--runner=simulated", *flags])
    try:
        wait_until(lambda: regions_of(service), PATIENCE, "a stub", service)
        regions = regions_of(service)
        code, _ = service.end(signal.SIGINT)
        assert code == 1, service.output
        assert "interrupted during the start" in service.output
        assert_nothing_is_left(service)
        assert not any(region.exists() for region in regions)
    finally:
        service.stop()


def refuses_connections(url: str) -> bool:
    try:
        httpx.get(url + "/health/live", timeout=PATIENCE, verify=False)
    except httpx.TransportError:
        return True
    return False


def plain_client_is_served(service: Service) -> bool:
    url = f"http://127.0.0.1:{service.http}/v2/models/generate/generate"
    answer = httpx.post(url, json={"text_input": "Hello", "max_tokens": 3}, timeout=PATIENCE)
    return answer.status_code == 200


def regions_of(service: Command) -> list[Path]:
    """Shared memory of the stubs that live now."""
    stubs = map(read_stub, service.observe())
    return [SHM / stub.region for stub in stubs if stub is not None]
