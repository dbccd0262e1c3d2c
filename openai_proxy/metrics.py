"""The proxy's own metrics: observed once a request, never once a token; merged over workers."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

from openai_proxy.exchange import Exchange

_TTFT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_DURATION_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class ProxyMetrics:
    """With PROMETHEUS_MULTIPROC_DIR set before the first import of prometheus_client, the values
    live in files of that folder, and any worker's `render` shows the sum over all."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        self._requests = Counter(
            "tridentlm_proxy_requests",
            "HTTP requests by route and status (499: the client went away).",
            ["route", "status"],
            registry=own,
        )
        self._in_flight = Gauge(
            "tridentlm_proxy_requests_in_flight",
            "Requests being answered now.",
            registry=own,
            multiprocess_mode="livesum",
        )
        self._ttft = Histogram(
            "tridentlm_proxy_time_to_first_token_seconds",
            "From a request's arrival to the engine's first output for it.",
            ["route"],
            buckets=_TTFT_SECONDS,
            registry=own,
        )
        self._duration = Histogram(
            "tridentlm_proxy_request_seconds",
            "From a request's arrival to the end of its response.",
            ["route"],
            buckets=_DURATION_SECONDS,
            registry=own,
        )

    def begin(self) -> None:
        self._in_flight.inc()

    def end(self, exchange: Exchange, route: str) -> None:
        self._in_flight.dec()
        self._requests.labels(route, str(exchange.status)).inc()
        self._duration.labels(route).observe(exchange.elapsed)
        if exchange.ttft is not None:
            self._ttft.labels(route).observe(exchange.ttft)

    def render(self) -> bytes:
        """The text exposition."""
        directory = os.environ.get(_DIRECTORY_VARIABLE)
        if directory is None:
            return generate_latest(self._registry)
        _forget_dead_workers(directory)
        merged = CollectorRegistry()
        multiprocess.MultiProcessCollector(merged, path=directory)  # type: ignore[no-untyped-call]
        return generate_latest(merged)


def _forget_dead_workers(directory: str) -> None:
    """Drops the gauges of killed workers: nobody else knows that they are gone."""
    for file in Path(directory).glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        if not psutil.pid_exists(pid):
            multiprocess.mark_process_dead(pid, directory)  # type: ignore[no-untyped-call]


def readiness_text(exposition: bytes, ready: bool) -> bytes:
    """This worker's readiness, and `tridentlm_engine_up` unless `exposition` (Triton's) carries it.

    Both are kept: what Triton says of an engine whose stub was killed is the last word of the dead.
    """
    text = _gauge("tridentlm_proxy_ready", "1 while the session serves requests.", ready)
    if b"tridentlm_engine_up" not in exposition:
        text += _gauge("tridentlm_engine_up", "1 while the engine process takes requests.", ready)
    return text.encode()


def _gauge(name: str, description: str, value: bool) -> str:
    return f"# HELP {name} {description}\n# TYPE {name} gauge\n{name} {int(value)}\n"
