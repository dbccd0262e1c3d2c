"""`tridentlm bench` against a running service."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.server.service import Service
from tests.waiting import PATIENCE

pytestmark = pytest.mark.server


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "openai_proxy.cli", "bench", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)


def test_bench_counts_every_token_and_reports_rates(simulated: Service) -> None:
    done = bench("--url", simulated.url, "--streams", "8", "--tokens", "40", "--runs", "2")
    assert done.returncode == 0
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["tokens"] for result in results] == [320, 320]
    for result in results:
        assert 0 < result["tok_s"] <= 8 * 40 / (39 * 0.005)  # an idle engine's first step is free
        assert result["gap_p99_ms"] >= 3  # of a busy client most gaps may be shorter
        assert result["failures"] == []


def test_bench_against_nobody_fails_with_the_reason() -> None:
    done = bench("--url", "http://127.0.0.1:9", "--streams", "1", "--tokens", "1", "--runs", "1")
    assert done.returncode == 1
    assert "Connect call failed" in json.loads(done.stdout)["failures"][0]
