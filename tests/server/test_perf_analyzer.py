"""benchmarks/perf_analyzer.sh: NVIDIA's perf_analyzer, fetched and run against `generate`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.service import Service
from tests.waiting import PATIENCE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
VERSION = "2.60.0"
REQUESTS = 24


def perf_analyzer(
    *args: str, timeout: float = 2 * PATIENCE, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BENCHMARKS / "perf_analyzer.sh"), *args],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def stand_in(cache: Path, script: str) -> None:
    """Puts a shell script where the fetched program lies in a cache."""
    program = cache / "perf_analyzer" / f"perf_analyzer-{VERSION}" / "perf_analyzer"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def check_request(request: dict[str, Any]) -> None:
    max_tokens = request["request_inputs"]["max_tokens"]
    times, outputs = request["response_timestamps"], request["response_outputs"]
    assert 1 <= len(times) <= max_tokens  # tokens that wait are sent together
    assert len(outputs) == len(times)
    assert request["timestamp"] < times[0]
    assert times == sorted(times)
    assert {output["error"] for output in outputs} == {""}
    assert [output["finish_reason"] for output in outputs] == [""] * (len(times) - 1) + ["length"]
    assert json.loads(outputs[-1]["usage"])["completion_tokens"] == max_tokens


@pytest.mark.server
def test_a_run_against_generate_succeeds_and_no_request_fails(
    simulated: Service, tmp_path: Path
) -> None:
    for _ in range(3):  # PyPI or Debian's mirrors may be out of reach for a moment
        fetched = perf_analyzer("--version", timeout=150)
        if fetched.returncode == 0:
            break
    assert fetched.returncode == 0, fetched.stderr

    profile = tmp_path / "profile.json"
    load = ("--concurrency-range", "8", "--request-count", str(REQUESTS))
    target = ("-m", "generate", "-u", simulated.grpc, "--profile-export-file", str(profile))
    run = perf_analyzer(*target, *load)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "fetching" not in run.stderr
    assert re.search(rf"Client:\s+Request count: {REQUESTS}\n", run.stdout), run.stdout
    for kind in ("Throughput", "Response Throughput"):
        match = re.search(rf"^ *{kind}: ([\d.]+) infer/sec", run.stdout, re.MULTILINE)
        assert match, run.stdout
        assert float(match[1]) > 0

    (experiment,) = json.loads(profile.read_text())["experiments"]
    assert len(experiment["requests"]) == REQUESTS
    for request in experiment["requests"]:
        check_request(request)


def test_a_program_that_starts_runs_as_it_is_with_the_defaults(tmp_path: Path) -> None:
    stand_in(tmp_path, '[ "$*" = --version ] && exit 0; echo "$@"; exit 2')
    defaults = "-i grpc --streaming --async"
    run = perf_analyzer("-m", "generate", TRIDENTLM_CACHE=str(tmp_path))
    data = BENCHMARKS / "perf_analyzer_input.json"
    assert (run.returncode, run.stderr) == (2, "")
    assert run.stdout == f"{defaults} --input-data {data} -m generate\n"

    own = ("--input-data", "own.json")
    run = perf_analyzer(*own, TRIDENTLM_CACHE=str(tmp_path))
    assert run.stdout == f"{defaults} --input-data own.json\n"


def test_without_python_nothing_is_fetched_and_the_exit_code_is_69(tmp_path: Path) -> None:
    run = perf_analyzer(TRIDENTLM_CACHE=str(tmp_path), PYTHON="no-such-python")
    assert run.returncode == 69
    assert run.stderr.endswith("no-such-python is needed to fetch perf_analyzer\n")
    assert list((tmp_path / "perf_analyzer").iterdir()) == []


def test_libraries_that_cannot_be_fetched_leave_nothing_behind(tmp_path: Path) -> None:
    stand_in(tmp_path, "exit 1")  # like a binary for a newer glibc
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("apt-get", "dpkg"):
        (commands / name).write_text("#!/bin/sh\necho no route to the mirror >&2\nexit 100\n")
        (commands / name).chmod(0o755)

    path = f"{commands}:{os.environ['PATH']}"
    run = perf_analyzer(TRIDENTLM_CACHE=str(tmp_path), PATH=path)
    assert run.returncode == 69
    assert "no route to the mirror" in run.stderr
    assert run.stderr.endswith("apt could not fetch the libraries of Debian trixie\n")
    left = [path.name for path in (tmp_path / "perf_analyzer").iterdir()]
    assert left == [f"perf_analyzer-{VERSION}"]
