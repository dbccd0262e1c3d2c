"""A `tridentlm` command as a child process, and what the machine shows of it from outside."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from openai_proxy.processes import is_alive
from tests.waiting import PATIENCE, command_line, free_ports

START_SECONDS = 240.0
TRIVIAL_MODEL = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            word = pb_utils.get_input_tensor_by_name(request, "word").as_numpy()[0].decode()
            text = np.array([f"{word} from {sys.prefix}".encode()], dtype=object)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("text", text)]))
        return answers
"""
TRIVIAL_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 0
input [ {{ name: "word" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "text" data_type: TYPE_STRING dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""


def write_trivial_model(repository: Path, name: str, source: str = TRIVIAL_MODEL) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(source)
    (repository / name / "config.pbtxt").write_text(TRIVIAL_CONFIG.format(name=name))


class Command:
    """Runs `tridentlm ARGS`; `lines` collects what it says; `stop()` leaves nothing behind."""

    def __init__(self, args: Sequence[str], environ: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()
        self._offspring: dict[int, psutil.Process] = {}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "openai_proxy.cli", *args],
            env={**os.environ, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def __str__(self) -> str:
        return self.output

    def wait_for(self, text: str, seconds: float = START_SECONDS) -> None:
        """Returns once a line has `text`; fails when the command ends or time is over first."""
        until = time.monotonic() + seconds
        while not any(text in line for line in self.lines):
            try:
                line = self._new.get(timeout=max(until - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"no {text!r} within {seconds} s:\n{self.output}") from None
            if line is None and not any(text in x for x in self.lines):
                raise AssertionError(f"ended without {text!r}:\n{self.output}")

    def observe(self) -> list[psutil.Process]:
        """All living descendants; remembered for `survivors`."""
        if self.child.poll() is None:
            for process in psutil.Process(self.child.pid).children(recursive=True):
                self._offspring[process.pid] = process
        return [p for p in self._offspring.values() if is_alive(p)]

    def find(self, *words: str) -> psutil.Process:
        """The first descendant whose command line has all `words`."""
        for process in self.observe():
            line = command_line(process)
            if all(word in line for word in words):
                return process
        raise AssertionError(f"no process with {words}")

    def survivors(self) -> list[str]:
        return [command_line(p) for p in self._offspring.values() if is_alive(p)]

    def end(self, number: int = signal.SIGTERM, seconds: float = 2 * PATIENCE) -> tuple[int, float]:
        """Sends a signal; returns exit code and seconds until the end."""
        self.observe()
        began = time.monotonic()
        self.child.send_signal(number)
        return self.wait(seconds), time.monotonic() - began

    def wait(self, seconds: float = 2 * PATIENCE) -> int:
        code = self.child.wait(seconds)
        self._reader.join(PATIENCE)
        return code

    def stop(self) -> None:
        self.observe()
        self.child.kill()
        self.child.wait(PATIENCE)
        for process in self._offspring.values():
            if is_alive(process):
                process.kill()
        self._reader.join(PATIENCE)

    def _read(self) -> None:
        assert self.child.stdout is not None
        with self.child.stdout as stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))
                self._new.put(self.lines[-1])
        self._new.put(None)


class Service(Command):
    """`tridentlm serve` with the simulated runner on free ports, ready when made."""

    def __init__(self, *args: str) -> None:
        self.port, self.http, self.grpc, metrics = free_ports(4)
        ports = {"port": self.port, "http-port": self.http, "grpc-port": self.grpc}
        flags = [f"--{name}={port}" for name, port in {**ports, "metrics-port": metrics}.items()]
        super().__init__(["serve", "--runner=simulated", *flags, *args])
        try:
            self.wait_for("ready after")
        except AssertionError:
            self.stop()
            raise
        self.observe()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
