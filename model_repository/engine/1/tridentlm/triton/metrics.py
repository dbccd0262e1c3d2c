"""The engine's metrics, in Triton's own /metrics beside its `nv_` families.

An update through Triton's API is a blocking call of about 30 us, so the pump only notes numbers and
a thread publishes them once a second.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from tridentlm.channel import Step
from tridentlm.streams import TextStream
from tridentlm.triton.process import COUNTED

LATENCY_BUCKETS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0]
STEP_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5]

GAUGES = {
    "engine_up": "1 while the engine process takes requests",
    "num_requests_running": "Requests that hold a slot",
    "num_requests_waiting": "Requests that wait for a slot",
    "kv_cache_usage_ratio": "Share of the KV cache's pages that requests hold",
    "prefix_cache_usage_ratio": "Share of the KV cache's pages that only keep a prefix for reuse",
    "sessions": "Open sessions",
}
COUNTERS = {
    "prompt_tokens_total": "Prompt tokens of requests that ended",
    "generation_tokens_total": "Tokens generated for requests that ended",
    "prefix_cache_queries_tokens_total": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits_tokens_total": "Prompt tokens found in the prefix cache",
    "preemptions_total": "Times a request lost its pages to another and was queued again",
    "integrity_checks_total": "Checks of the books on slots, pages and prefix cache",
    "integrity_failures_total": "Checks that failed; each ends the engine process",
    "engine_restarts_total": "Times the engine process was started again",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token", LATENCY_BUCKETS),
    "inter_token_latency_seconds": ("Time between a request's tokens", STEP_BUCKETS),
    "e2e_request_latency_seconds": ("Arrival to end", LATENCY_BUCKETS),
    "step_seconds": ("Time of an engine step", STEP_BUCKETS),
}


class Metrics:
    """Notes numbers on the pump's thread, publishes them on its own."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._families: list[Any] = []
        self._gauges = {n: self._family(n, text, "GAUGE") for n, text in GAUGES.items()}
        self._counters = {n: self._family(n, text, "COUNTER") for n, text in COUNTERS.items()}
        self._histograms = {
            name: self._family(name, text, "HISTOGRAM", buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        finished = pb_utils.MetricFamily(
            name="tridentlm_request_finished_total",
            description="Requests that ended, by reason",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self._families.append(finished)
        self._finished: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._observations: list[tuple[str, float]] = []
        self._busy_since: float | None = None
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._publish, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and lets go of Triton's objects, which must not outlive the model:
        their destructors use memory that the stub unmaps before the interpreter ends."""
        self._outbox.put(None)
        self._thread.join(timeout=2)
        self._gauges = self._counters = self._histograms = self._finished = {}
        self._families.clear()

    def first_token(self, seconds: float) -> None:
        self._observations.append(("time_to_first_token_seconds", seconds))

    def restarted(self) -> None:
        self._counts["engine_restarts_total"] += 1

    def step(self, step: Step, now: float) -> None:
        """A step's time is from the last step's message to its own, while requests run."""
        if self._busy_since is not None:
            self._observations.append(("step_seconds", now - self._busy_since))
            if len(step.output.ids):
                self._observations.append(("inter_token_latency_seconds", now - self._busy_since))
        self._busy_since = now if step.stats.running else None

    def ended(self, streams: Sequence[TextStream], now: float) -> None:
        for stream in streams:
            end = stream.end or {}
            usage = end["usage"]
            self._reasons[end["finish_reason"]] += 1
            self._counts["prompt_tokens_total"] += usage["prompt_tokens"]
            self._counts["generation_tokens_total"] += usage["completion_tokens"]
            self._counts["prefix_cache_queries_tokens_total"] += usage["prompt_tokens"]
            self._counts["prefix_cache_hits_tokens_total"] += usage["cached_tokens"]
            self._observations.append(("e2e_request_latency_seconds", now - stream.arrived))

    def status(self, status: dict[str, Any]) -> None:
        """Hands everything noted so far, and the gauges, to the publishing thread."""
        pages = status.get("num_pages") or 0
        gauges = {
            "engine_up": float(status["up"]),
            "num_requests_running": status.get("running", 0),
            "num_requests_waiting": status.get("waiting", 0),
            "kv_cache_usage_ratio": 1 - status.get("free_pages", pages) / pages if pages else 0.0,
            "prefix_cache_usage_ratio": status.get("cached_pages", 0) / pages if pages else 0.0,
            "sessions": status["sessions"],
        }
        for name in COUNTED:
            self._counts[f"{name}_total"] += status[name] - self._counted[name]
            self._counted[name] = status[name]
        self._outbox.put((gauges, self._counts, self._reasons, self._observations))
        self._counts, self._reasons, self._observations = Counter(), Counter(), []

    def _family(self, name: str, text: str, kind: str, buckets: list[float] | None = None) -> Any:
        family = pb_utils.MetricFamily(
            name=f"tridentlm_{name}",
            description=text,
            kind=getattr(pb_utils.MetricFamily, kind),
        )
        self._families.append(family)
        if buckets is None:
            return family.Metric(labels=self._labels)
        return family.Metric(labels=self._labels, buckets=buckets)

    def _publish(self) -> None:
        while (noted := self._outbox.get()) is not None:
            gauges, counts, reasons, observations = noted
            for name, value in gauges.items():
                self._gauges[name].set(value)
            for name, value in counts.items():
                self._counters[name].increment(value)
            for reason, value in reasons.items():
                self._finished_metric(reason).increment(value)
            for name, value in observations:
                self._histograms[name].observe(value)

    def _finished_metric(self, reason: str) -> Any:
        if reason not in self._finished:
            labels = {**self._labels, "reason": reason}
            self._finished[reason] = self._families[-1].Metric(labels=labels)
        return self._finished[reason]
