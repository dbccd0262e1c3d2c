"""The sessions' promise: streams through proxy and Triton at the pace of the engine's steps.

    python -m benchmarks.transport [--runs 5] [--frames 100000]

Starts `tridentlm serve` with the simulated engine (5 ms steps), streams 200 tokens to 64 and to 256
clients at once, and takes the median run of each. Proxy CPU is the worker's own user + system time
over the run, divided by the tokens. With --frames it then streams, at 1 ms steps, until that many
frames have passed and compares the memory of Triton, the stub and the proxy before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.record import write
from tests.server.service import Service
from tridentlm_client.load import run_load

TOKENS = 200
STEP_MS = 5.0
FIELDS = ("tok_s", "gap_p50_ms", "gap_p99_ms", "ttft_p50_ms", "ttft_p99_ms", "proxy_us_a_token")


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def one_run(service: Service, streams: int) -> dict[str, Any]:
    proxy = service.find("openai_proxy.cli", "proxy")
    before = cpu_seconds(proxy)
    steps = service.status()["steps"]
    result = asyncio.run(run_load(service.url, streams, TOKENS)).to_dict()
    if result.pop("failures"):
        raise SystemExit("a stream failed")
    result["proxy_us_a_token"] = round((cpu_seconds(proxy) - before) / result["tokens"] * 1e6, 2)
    result["engine_steps"] = service.status()["steps"] - steps
    result["share_of_ideal"] = round(result["tok_s"] / (streams * 1e3 / STEP_MS), 4)
    return result


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    fields = [*FIELDS, "share_of_ideal"]
    return {name: round(statistics.median(run[name] for run in runs), 4) for name in fields}


def memory(service: Service) -> dict[str, int]:
    """Resident MB of Triton, the engine's stub and the proxy."""
    processes = {
        "triton": service.tritonserver(),
        "engine_stub": service.engine_stub(),
        "proxy": service.find("openai_proxy.cli", "proxy"),
    }
    return {name: p.memory_info().rss >> 20 for name, p in processes.items()}


def hold_frames(service: Service, frames: int) -> dict[str, Any]:
    """Streams to 16 clients, again and again, until `frames` engine steps have passed."""
    asyncio.run(run_load(service.url, 16, 6000))
    start = service.status()["steps"]
    samples = [memory(service)]
    while (done := service.status()["steps"] - start) < frames:
        asyncio.run(run_load(service.url, 16, 6000))
        samples.append(memory(service))
        print(json.dumps({"frames": done, **samples[-1]}), flush=True)
    return {"frames": done, "rss_mb_first": samples[0], "rss_mb_last": samples[-1]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--frames", type=int, default=0)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "transport", "model": "simulated", "step_ms": STEP_MS}
    with simulated(STEP_MS) as service:
        one_run(service, 256)
        for streams in arguments.streams:
            runs = [one_run(service, streams) for _ in range(arguments.runs)]
            result[f"streams_{streams}"] = {"median": medians(runs), "runs": runs}
            print(streams, json.dumps(medians(runs)), flush=True)
    if arguments.frames:
        with simulated(1.0) as service:
            result["memory"] = hold_frames(service, arguments.frames)
    print(write("transport", result))


@contextmanager
def simulated(step_ms: float, *more: str) -> Iterator[Service]:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--runner", "simulated", "--step-ms", str(step_ms), *more]
        with Service(Path(folder), *flags) as service:
            yield service


if __name__ == "__main__":
    main()
