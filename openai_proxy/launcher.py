"""`tridentlm serve`: Triton and the proxy as one thing that starts, lives and ends together.

check -> Triton ready -> proxy ready -> supervise --- SIGTERM --> proxy drains -> Triton drains
(ports,  (progress,                     |   |                     exit code 0
 model)   tail of log)                  |   `- a stub died: unload and load its model
                                        `- either child died: end the other, exit code 1
"""

from __future__ import annotations

import math
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType

from tridentlm.config import EngineSettings
from tridentlm.errors import TridentError

from openai_proxy.processes import Family
from openai_proxy.recovery import Recovery
from openai_proxy.settings import ProxySettings
from openai_proxy.tritonadmin import TritonAdmin
from openai_proxy.tritonlog import load_failures, readable
from openai_proxy.tritonserver import TritonServer, locate, numpy_problem, stub_problem

ENSEMBLES = ("generate", "submit")
NVIDIA_DEVICE = Path("/dev/nvidiactl")
TICK = 0.2
STUB_LOSS_GRACE = 5.0
TAIL = 30
LOOK_EVERY = 1.0
DRAIN_SLACK = 6.0  # what Triton needs beyond the requests: it looks once a second


class LaunchFailure(TridentError):
    """Why the service cannot start or go on; becomes exit code 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """`environ`: of both children. `settings`: what the engine makes of it and the repository.

    The proxy's `triton` and `triton_metrics` are made from the ports here.
    """

    environ: Mapping[str, str]
    proxy: ProxySettings
    settings: EngineSettings
    repository: Path
    triton_host: str = "127.0.0.1"
    http_port: int = 8100
    grpc_port: int = 8101
    metrics_port: int = 8102
    verbose: bool = False


def check_ports(options: ServeOptions) -> None:
    """Raises LaunchFailure naming every port that is taken or given twice."""
    wanted = [
        ("--port", options.proxy.host, options.proxy.port),
        ("--http-port", options.triton_host, options.http_port),
        ("--grpc-port", options.triton_host, options.grpc_port),
        ("--metrics-port", options.triton_host, options.metrics_port),
    ]
    problems = []
    for number, (flag, host, port) in enumerate(wanted):
        twin = next((other for other, _, taken in wanted[:number] if taken == port), None)
        if twin:
            problems.append(f"{flag} and {twin} are both {port}")
        elif not port_is_free(host, port):
            problems.append(f"port {port} ({flag}) is in use")
    if problems:
        raise LaunchFailure("; ".join(problems) + ".")


def port_is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def triton_arguments(options: ServeOptions) -> list[str]:
    host = options.triton_host
    return [
        f"--model-repository={options.repository}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in ENSEMBLES),
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={math.ceil(options.settings.drain_seconds + DRAIN_SLACK)}",
        f"--http-address={host}",
        f"--http-port={options.http_port}",
        f"--grpc-address={host}",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-address={host}",
        f"--metrics-port={options.metrics_port}",
        "--grpc-keepalive-time=10000",
        "--grpc-keepalive-permit-without-calls=1",
        "--pinned-memory-pool-byte-size=0",  # all our tensors are on the CPU
        *(() if NVIDIA_DEVICE.exists() else ("--allow-gpu-metrics=false",)),
    ]


class Launcher:
    """One run of the service. `say` gets the lines for the person who started it."""

    def __init__(self, options: ServeOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._families: list[Family] = []
        self._looked = 0.0
        reach = _reachable(options.triton_host)
        self._admin = TritonAdmin(reach, options.http_port)
        self._recovery = Recovery(self._admin, ENSEMBLES, say)
        self._proxy_url = f"http://{_url_host(_reachable(options.proxy.host))}:{options.proxy.port}"

    def run(self) -> int:
        """Serves until a signal (0) or a failure (1); no process of ours is left either way."""
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._serve()
        except LaunchFailure as failure:
            self._say(f"stopping: {failure.message}")
            return 1
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return 0

    def _serve(self) -> None:
        check_ports(self._options)
        server = locate()
        problem = numpy_problem(server) or stub_problem(server)
        if problem:
            raise LaunchFailure(f"{problem} (see `tridentlm doctor`)")
        began = time.monotonic()
        self._start_triton(server)
        self._start_proxy()
        self._say(f"ready after {time.monotonic() - began:.1f} s: {self._proxy_url}/v1")
        self._say(_example(self._proxy_url, self._options.proxy.api_key))
        while not self._stop.wait(TICK):
            self._check_children()
            if self._recovery.failure:
                raise LaunchFailure(self._recovery.failure)
        self._drain()

    def _start_triton(self, server: TritonServer) -> None:
        options = self._options
        self._say(f"Triton {server.version or 'of unknown version'} ({server.origin})")
        argv = server.command(triton_arguments(options))
        triton = self._spawn("triton", argv, server.environ(options.environ))
        self._await(self._admin.ready, triton)

    def _start_proxy(self) -> None:
        environ = {**self._options.environ, **proxy_environ(self._options)}
        argv = [sys.executable, "-m", "openai_proxy.cli", "proxy"]
        proxy = self._spawn("proxy", argv, environ)
        self._await(lambda: _answers(f"{self._proxy_url}/health/ready"), proxy)

    def _spawn(self, name: str, argv: list[str], environ: Mapping[str, str]) -> Family:
        family = Family(name, argv, environ, lambda line: self._show(name, line))
        self._families.append(family)
        return family

    def _await(self, ready: Callable[[], bool], family: Family) -> None:
        """Returns once `ready()`; leaves through LaunchFailure when it cannot come to that."""
        self._say(f"starting {family.name} ...")
        while not ready():
            if self._stop.wait(TICK):
                raise LaunchFailure("interrupted during the start")
            self._check_children(starting=True)

    def _check_children(self, *, starting: bool = False) -> None:
        for family in self._families:
            code = family.exit_code()
            if code is not None:
                reason = self._reason() if starting and family is self._families[0] else ""
                raise LaunchFailure(f"{family.name} ended with {_how(code)}{reason}")
        if time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        processes = self._families[0].observe()
        for family in self._families[1:]:
            family.observe()
        if not starting:
            self._recovery.look(processes)
            return
        missing = self._recovery.missing(processes)
        # Triton reports a model that fails and ends; one whose stub was killed it waits for.
        if missing and not self._families[0].wait(STUB_LOSS_GRACE):
            names = ", ".join(missing)
            raise LaunchFailure(f"the Python stub of {names} died{self._reason()}")

    def _reason(self) -> str:
        """Why Triton did not start: what it says of its models, else the end of its log."""
        lines = self._families[0].tail()
        told = load_failures(lines) or ["the end of its log:", *lines[-TAIL:]]
        return "".join(f"\n  {line}" for line in told)

    def _drain(self) -> None:
        """The proxy first, so that its running requests find a living engine to the end."""
        self._say("draining: no new requests; a second signal ends at once")
        until = time.monotonic() + self._options.settings.drain_seconds + DRAIN_SLACK
        for family in reversed(self._families):
            family.observe()
            family.terminate()
            while not family.wait(TICK):
                family.observe()
                if self._hurry.is_set() or time.monotonic() > until:
                    self._say(f"{family.name} did not end in time: killed")
                    family.kill()
            until = max(until, time.monotonic() + DRAIN_SLACK)
        self._say("stopped")

    def _end_all(self) -> None:
        for family in reversed(self._families):
            left = family.kill()
            if left:
                self._say(f"{family.name}: these processes could not be ended: {left}")
        self._recovery.remove_regions()

    def _show(self, name: str, line: str) -> None:
        shown = line if self._options.verbose or name == "proxy" else readable(line)
        if shown:
            self._say(f"{name} | {shown}")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()


def proxy_environ(options: ServeOptions) -> dict[str, str]:
    """The proxy's settings as its environment, where a key is not seen in the process list."""
    host = _url_host(_reachable(options.triton_host))
    given = {
        **asdict(options.proxy),
        "triton": f"{host}:{options.grpc_port}",
        "triton_metrics": f"http://{host}:{options.metrics_port}/metrics",
    }
    return {
        f"TRIDENTLM_PROXY_{spec.name.upper()}": str(given[spec.name])
        for spec in fields(ProxySettings)
    }


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _example(url: str, api_key: str) -> str:
    key = "  -H 'Authorization: Bearer YOUR_KEY' \\\n" if api_key else ""
    return (
        f"try:  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n{key}"
        """  -d '{"messages": [{"role": "user", "content": "Hello!"}]}'"""
    )
