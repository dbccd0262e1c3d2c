"""Triton's metrics, with Triton's module replaced by one that only remembers."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from tridentlm.channel import Step
from tridentlm.core.plan import EngineStats, StepOutput


class Metric:
    def __init__(self) -> None:
        self.value = 0.0
        self.observed: list[float] = []

    def set(self, value: float) -> None:
        self.value = value

    def increment(self, value: float) -> None:
        assert value >= 0, "a counter never falls"
        self.value += value

    def observe(self, value: float) -> None:
        self.observed.append(value)


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    all: ClassVar[dict[str, MetricFamily]] = {}

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        self.kind, self.description = kind, description
        self.metrics: dict[str, Metric] = {}
        MetricFamily.all[name] = self

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:
        return self.metrics.setdefault(labels.get("reason", ""), Metric())


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    utils = types.ModuleType("triton_python_backend_utils")
    utils.MetricFamily = MetricFamily  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    monkeypatch.delitem(sys.modules, "tridentlm.triton.metrics", raising=False)
    MetricFamily.all.clear()
    made = importlib.import_module("tridentlm.triton.metrics").Metrics({"model": "m"})
    yield made
    made.close()
    del sys.modules["tridentlm.triton.metrics"]


def status(**fields: Any) -> dict[str, Any]:
    counted = {"preemptions": 0, "integrity_checks": 0, "integrity_failures": 0}
    return {"up": True, "sessions": 1, "num_pages": 100, "free_pages": 100, **counted, **fields}


def value(name: str) -> float:
    return MetricFamily.all[f"tridentlm_{name}"].metrics[""].value


def test_a_failed_integrity_check_and_preemptions_are_counted_once(metrics: Any) -> None:
    metrics.status(status(preemptions=2, integrity_checks=1))
    metrics.status(status(preemptions=5, integrity_checks=2, integrity_failures=1))
    metrics.status(status(up=False, preemptions=5, integrity_checks=2, integrity_failures=1))
    metrics.restarted()
    metrics.status(status(preemptions=5, integrity_checks=2, integrity_failures=1))
    metrics.close()
    names = ("preemptions", "integrity_checks", "integrity_failures", "engine_restarts")
    assert [value(f"{name}_total") for name in names] == [5, 2, 1, 1]
    assert value("engine_up") == 1


def test_pages_are_told_as_held_by_requests_and_as_kept_for_reuse(metrics: Any) -> None:
    metrics.status(status(free_pages=40, cached_pages=30, running=3, waiting=7))
    metrics.close()
    ratios = ("kv_cache_usage_ratio", "prefix_cache_usage_ratio")
    assert [round(value(name), 3) for name in ratios] == [0.6, 0.3]
    assert (value("num_requests_running"), value("num_requests_waiting")) == (3, 7)


def test_a_steps_time_counts_while_requests_run(metrics: Any) -> None:
    one = np.array([1])
    busy = EngineStats(1, 0, 1, 1, 0, 1, 0, 0, 0)
    idle = EngineStats(0, 0, 1, 1, 0, 1, 0, 0, 0)
    output = StepOutput(one, one.astype(np.int32), one.astype(np.uint8))
    for stats, now in ((busy, 1.0), (busy, 1.5), (idle, 1.75), (busy, 9.0)):
        metrics.step(Step(output, stats), now)
    metrics.status(status())
    metrics.close()
    for name in ("step_seconds", "inter_token_latency_seconds"):
        assert MetricFamily.all[f"tridentlm_{name}"].metrics[""].observed == [0.5, 0.25]
