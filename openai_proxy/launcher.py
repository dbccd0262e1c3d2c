"""`tridentlm serve`: Triton and the proxy as one thing that starts, lives and ends together.

check -> Triton ready -> proxy ready -> supervise --- SIGTERM --> proxy drains -> Triton drains
(ports,  (progress,                     |   |                     exit code 0
 model)   tail of log)                  |   `- a stub died: unload and load its model
                                        `- either child died: end the other, exit code 1
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from types import FrameType

from openai_proxy.launchplan import (
    DRAIN_SLACK,
    LaunchFailure,
    ServeOptions,
    claim_ports,
    proxy_environ,
    reachable,
    triton_arguments,
    url_host,
)
from openai_proxy.processes import Family
from openai_proxy.recovery import Recovery
from openai_proxy.tritonadmin import TritonAdmin
from openai_proxy.tritonlog import load_failures, readable
from openai_proxy.tritonserver import TritonServer, locate, numpy_problem, stub_problem

TICK = 0.2
STUB_LOSS_GRACE = 5.0
TAIL = 30
LOOK_EVERY = 1.0
EMPTY_GRACE = 2.0
IDLE_AFTER, IDLE_GRACE = 4.0, 1.5  # an idle Triton takes 4 to 5 s by itself
UNFINISHED = ("tridentlm_num_requests_running{", "tridentlm_num_requests_waiting{")


class Launcher:
    """One run of the service. `say` gets the lines for the person who started it."""

    def __init__(self, options: ServeOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._families: list[Family] = []
        self._looked = 0.0
        reach = reachable(options.triton_host)
        self._admin = TritonAdmin(reach, options.http_port)
        self._recovery = Recovery(self._admin, options.ensembles, say)
        self._proxy_url = f"http://{url_host(reachable(options.proxy.host))}:{options.proxy.port}"

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
        server = locate()
        problem = numpy_problem(server) or stub_problem(server)
        if problem:
            raise LaunchFailure(f"{problem} (see `tridentlm doctor`)")
        with claim_ports(self._options):
            self._serve_with(server)

    def _serve_with(self, server: TritonServer) -> None:
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
        triton, proxy = self._families
        until = time.monotonic() + self._options.drain_seconds
        self._end(proxy, until + DRAIN_SLACK)
        self._end(triton, max(until, time.monotonic()) + DRAIN_SLACK)
        self._say("stopped")

    def _end(self, family: Family, until: float) -> None:
        """Ends a child in good order, by force at `until` or on the second signal.

        A Triton whose stubs have all ended has nothing left to do; it can still wait, for requests
        that a killed stub never answered. One whose engine holds no request can wait too: Triton
        2.51 counts a gRPC call cancelled just as its last response went out for ever.
        """
        family.observe()
        family.terminate()
        began, empty_since, idle_since = time.monotonic(), math.inf, math.inf
        while not family.wait(TICK):
            now = time.monotonic()
            is_triton = family is self._families[0]
            empty_since = min(empty_since, now) if is_triton and not family.observe() else math.inf
            if is_triton and now - began > IDLE_AFTER:
                idle_since = min(idle_since, now) if self._engine_is_idle() else math.inf
            if now - empty_since > EMPTY_GRACE or now - idle_since > IDLE_GRACE:
                break
            if self._hurry.is_set() or now > until:
                self._say(f"{family.name} did not end in time: killed")
                break
        family.kill()

    def _engine_is_idle(self) -> bool:
        """Whether the engine's own metrics show no request; False when they cannot be read."""
        url = (
            f"http://{url_host(reachable(self._options.triton_host))}:{self._options.metrics_port}"
        )
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=1.0) as response:
                lines = response.read().decode().splitlines()
        except (OSError, urllib.error.URLError):
            return False
        held = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(UNFINISHED)]
        return bool(held) and not any(map(float, held))

    def _end_all(self) -> None:
        if self._families:
            self._recovery.note(self._families[0].observe())
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
