"""One run of `tridentlm serve` as a child process, with what tests ask of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import orjson
import psutil
from tritonclient.grpc import service_pb2_grpc

from tests.waiting import PATIENCE, command_line, free_ports, wait_until
from tridentlm_client.wire import infer_request, read_string

START_SECONDS = 240.0
PORTS = ("port", "http_port", "grpc_port", "metrics_port")


def get(url: str) -> httpx.Response:
    """Without reading the certificates, which would take most of a poll's time."""
    return httpx.get(url, timeout=PATIENCE, verify=False)


class Service:
    """`with Service(folder, "--runner", "simulated") as s:` starts it, waits, and stops it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port, self.http_port, self.grpc_port, self.metrics_port = free_ports(len(PORTS))
        self.log = folder / "serve.log"
        self._flags = flags
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def triton_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        ports = [f"--{name.replace('_', '-')}={getattr(self, name)}" for name in PORTS]
        argv = [sys.executable, "-m", "openai_proxy.cli", "serve", *ports, *self._flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            wait_until(lambda: self.ready() or self._check_alive(), START_SECONDS, "ready")
        except AssertionError:
            self.stop()
            raise AssertionError(f"the service did not start:\n{self.log_text()}") from None

    def stop(self) -> int | None:
        """SIGTERM, then the exit code."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(2 * PATIENCE)
        except subprocess.TimeoutExpired:
            for process in self.family():
                process.kill()
            self.process.kill()
            raise AssertionError(f"the service did not stop:\n{self.log_text()}") from None

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def ready(self) -> bool:
        try:
            return get(f"{self.url}/health/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def status(self) -> dict[str, Any]:
        """The engine's own status, through its `op=status`."""
        with grpc.insecure_channel(self.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = infer_request("engine", strings={"op": ["status"]}, parameters={})
            # To its end: a call that is left with its last response pins the engine in Triton 2.51.
            [message] = stub.ModelStreamInfer(iter([request]), timeout=PATIENCE)
        if message.error_message:
            raise AssertionError(message.error_message)
        body = read_string(message.infer_response, "frame")
        assert body is not None
        return dict(orjson.loads(body))

    def idle(self) -> bool:
        """No request left, every page and slot free."""
        status = self.status()
        return (
            status["unfinished"] == 0
            and status["running"] == 0
            and status["waiting"] == 0
            and status["free_pages"] == status["num_pages"]
            and status["free_slots"] == status["max_running"]
        )

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples on Triton's own /metrics."""
        text = get(f"http://127.0.0.1:{self.metrics_port}/metrics").text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((name + "{", name + " ")) and all(w in line for w in wanted)
        )

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, **fields}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=2 * PATIENCE)

    def family(self) -> list[psutil.Process]:
        """Every process that the service started, while it lives."""
        assert self.process is not None
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def find(self, *words: str) -> psutil.Process:
        """The process of the family whose command line holds all the words."""
        for process in self.family():
            line = command_line(process)
            if all(word in line for word in words):
                return process
        raise AssertionError(f"no process with {words}")

    def tritonserver(self) -> psutil.Process:
        return self.find("bin/tritonserver", "--model-repository")

    def engine_process(self) -> psutil.Process:
        return self.find("tridentlm.worker")

    def engine_stub(self) -> psutil.Process:
        parent = self.engine_process().parent()
        assert parent is not None
        return parent

    def kill(self, process: psutil.Process) -> None:
        os.kill(process.pid, signal.SIGKILL)

    def _check_alive(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError("ended")
        return False
