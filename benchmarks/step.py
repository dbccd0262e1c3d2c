"""What one decode step launches: each kernel's count, its time, and how long the device idles.

    python -m benchmarks.step --model benchmarks/models/qwen3-8b --load-format dummy [--batch 256]

All requests have the same context. Profiling adds a little to each kernel, so the sum is more than
a step takes; its parts are in proportion. Any other setting of the engine follows as `name=value`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import DeviceType, ProfilerActivity

from benchmarks.offline import engine_parser, engine_settings, gpu_name
from benchmarks.record import write
from tridentlm.core.request import Request
from tridentlm.engine import Engine, build_runner

STEPS, WARM_STEPS = 10, 5
NAME_LENGTH = 90


def decoding(engine: Engine, batch: int, context: int) -> None:
    """Brings `batch` requests to where all of them decode."""
    rng = np.random.default_rng(0)
    answer = STEPS + 2 * WARM_STEPS + batch  # the first ones decode while the last ones prefill
    for index in range(batch):
        prompt = rng.integers(0, min(10_000, engine.limits.vocab_size), context).astype(np.int32)
        engine.add(Request(index, prompt, answer, temperature=0.6, seed=index))
    seen: set[int] = set()
    while len(seen) < batch:
        output = engine.step()
        seen |= set() if output is None else set(output.ids.tolist())
    for _ in range(WARM_STEPS):
        engine.step()


def profiled(engine: Engine, device: str) -> list[FunctionEvent]:
    """The device's events of STEPS steps, by their start."""
    on_gpu = device == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(STEPS):
            engine.step()
        if on_gpu:
            torch.cuda.synchronize()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in profiler.events() or [] if event.device_type == kind]
    return sorted(events, key=lambda event: event.time_range.start)


def busy_share(events: Iterable[FunctionEvent]) -> float:
    """Of the time from the first start to the last end, how much some kernel ran."""
    busy = start = end = 0.0
    first: float | None = None
    for event in events:
        span = event.time_range
        first = span.start if first is None else first
        busy += max(0.0, span.end - max(end, span.start))
        start, end = span.start, max(end, span.end)
    return busy / (end - first) if first is not None and start > first else 0.0


def main() -> None:
    parser = engine_parser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--context", type=int, default=850)
    arguments = parser.parse_args()
    settings = engine_settings(parser, arguments)
    runner, model = build_runner(settings)
    engine = Engine.from_settings(runner, settings)
    decoding(engine, arguments.batch, arguments.context)
    events = profiled(engine, runner.device)
    spent: dict[str, list[float]] = defaultdict(list)
    for event in events:
        spent[event.name].append(event.time_range.elapsed_us())
    kernels = [
        {"name": name[:NAME_LENGTH], "count": len(times) / STEPS, "us": sum(times) / STEPS}
        for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))
    ]
    for kernel in kernels[:40]:
        print(f"{kernel['us']:>10.1f} us in {kernel['count']:>6.1f}  {kernel['name']}")
    result = {
        "benchmark": "step",
        "model": model,
        "dtype": runner.dtype,
        "gpu": gpu_name(runner.device),
        "batch": arguments.batch,
        "context": arguments.context,
        "settings": arguments.settings,
        "us": sum(sum(times) for times in spent.values()) / STEPS,
        "idle_share": round(1 - busy_share(events), 4),
    }
    print(json.dumps(result))
    if runner.device == "cuda":
        print(write(f"step_{model.lower()}_{arguments.batch}", result | {"kernels": kernels}))


if __name__ == "__main__":
    main()
