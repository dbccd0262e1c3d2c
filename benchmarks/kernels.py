"""What the time of some steps goes to on rank 0: kernels by name, and what ranks exchange.

From torch's profiler. A kernel of NCCL runs until its peers have come, so its time holds their
lateness. On a CPU only what gloo exchanges is told, by the time that rank 0 waits for it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tridentlm.engine import Engine

EXCHANGES = {"allreduce": "all_reduce", "allgather": "all_gather", "broadcast": "broadcast"}
MOST_KERNELS, LONGEST_NAME = 12, 90


@dataclass(frozen=True)
class Spent:
    """`count` runs of one kernel, `ms` all together."""

    name: str
    ms: float
    count: int


def exchange(name: str) -> str:
    """What ranks exchange by the kernel or, on a CPU, the operation of that name; "": nothing."""
    if not re.match(r"nccl\w*DevKernel|gloo:", name):
        return ""
    plain = name.lower().replace("_", "")
    return next((told for word, told in EXCHANGES.items() if word in plain), "other")


def summary(spent: Iterable[Spent], steps: int, wall_ms: float, device: str) -> dict[str, Any]:
    """Per step, in ms. Shares are of the device's time: of the wall's on a CPU."""
    spent = sorted(spent, key=lambda kernel: -kernel.ms)
    total = sum(kernel.ms for kernel in spent) if device == "cuda" else wall_ms
    assert total, "the profiler has seen no kernel"
    exchanged: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for kernel in spent:
        if kind := exchange(kernel.name):
            exchanged[kind] += kernel.ms
            counts[kind] += kernel.count
    return {
        "steps": steps,
        "wall_ms": round(wall_ms / steps, 4),
        "device_ms": round(total / steps, 4),
        "exchange_share": round(sum(exchanged.values()) / total, 4),
        "exchanges": {
            kind: {
                "ms": round(ms / steps, 4),
                "count": round(counts[kind] / steps, 2),
                "us_each": round(1e3 * ms / counts[kind], 2),
                "share": round(ms / total, 4),
            }
            for kind, ms in exchanged.items()
        },
        "kernels": [
            {
                "name": kernel.name[:LONGEST_NAME],
                "ms": round(kernel.ms / steps, 4),
                "count": round(kernel.count / steps, 2),
                "share": round(kernel.ms / total, 4),
            }
            for kernel in spent[:MOST_KERNELS]
        ],
    }


def profiled(engine: Engine, steps: int, device: str, trace: Path) -> dict[str, Any]:
    """The `summary` of the next `steps` steps; the profiler's trace goes to the file `trace`."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        if device == "cuda":
            torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - started)
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    return summary(_spent(profiler, device), steps, wall_ms, device)


def _spent(profiler: Any, device: str) -> list[Spent]:
    from torch.autograd import DeviceType

    events = profiler.key_averages()
    if device == "cpu":
        # Those of gloo have run in its own threads: torch calls that no time of the caller's.
        return [Spent(e.key, e.cpu_time_total / 1e3, e.count) for e in events if exchange(e.key)]
    return [
        Spent(e.key, e.self_device_time_total / 1e3, e.count)
        for e in events
        if e.device_type == DeviceType.CUDA and not e.is_user_annotation
    ]
