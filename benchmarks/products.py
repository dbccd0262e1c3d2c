"""Every matrix product of a model, by each way of computing it: its time, and what the job takes.

    python -m benchmarks.products --model benchmarks/models/qwen3-8b [--dtype fp8] [--rows 1,8,256]

Each is timed in a CUDA Graph over distinct weights that together exceed the cache several times.
The floor is the slower of reading the weights and of the arithmetic, at the rates of
`benchmarks.offline`; the job is that benchmark's: its prefill in full steps, and a decode step for
each length of answer, at the rows that are alive then. `--device cpu` tries the program out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.offline import BYTES_PER_SECOND, FLOPS, Job, gpu_name
from benchmarks.record import write
from benchmarks.ways import PREFILL_ROWS, Call, Fp8, Plain
from tridentlm.models.config import ModelConfig
from tridentlm.models.fp8 import E4M3

ROWS = "1,2,4,8,16,24,32,48,64,96,128,160,192,224,256,8192"
CACHE_BYTES = 60 * 2**20
REPLAYS = 5
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Shape:
    """A product of the model, and how many of it a pass has."""

    outputs: int
    inputs: int
    times: int
    of_prompts: bool = True
    """Whether all tokens of a prompt take it."""

    def floor(self, rows: int, itemsize: int) -> float:
        """Seconds of one product; FP8 has twice the arithmetic."""
        size = self.outputs * self.inputs
        return max(size * itemsize / BYTES_PER_SECOND, rows * size * itemsize / FLOPS)


def shapes(config: ModelConfig, is_fp8: bool) -> dict[str, Shape]:
    """All products, the head last; an FP8 model's head is in bfloat16."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    heads, kv = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    found = {
        "qkv": Shape(heads + 2 * kv, hidden, layers),
        "output": Shape(hidden, heads, layers),
        "gate_up": Shape(2 * inner, hidden, layers),
        "down": Shape(hidden, inner, layers),
    }
    return found if is_fp8 else found | {"head": Shape(config.vocab_size, hidden, 1, False)}


def seconds(calls: list[Call], device: torch.device) -> float:
    """Of one call, when all follow one another; the median of several rounds."""
    for call in calls:
        call()
    if device.type == "cpu":
        started = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - started) / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    spent = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        spent.append(start.elapsed_time(stop) / 1e3 / len(calls))
    return statistics.median(spent)


def measure(
    shape: Shape,
    kind: type[Plain | Fp8],
    rows: list[int],
    device: torch.device,
    wanted: set[str],
) -> dict[str, list[float]]:
    """Seconds of each way at each number of rows, nan where it is none; `wanted` empty: of all."""
    copies = max(2, -(-4 * CACHE_BYTES // (shape.outputs * shape.inputs * kind.itemsize)))
    copies = copies if device.type == "cuda" else 1
    product = kind(shape.outputs, shape.inputs, copies, device)
    found: dict[str, list[float]] = {}
    for place, count in enumerate(rows):
        reference: torch.Tensor | None = None
        for way, calls in product.ways(count):
            if wanted and way not in wanted and way != "library":
                continue
            try:
                result = calls[0]()[:count].float()
                spent = seconds(calls, device)
            except RuntimeError as refusal:
                print(f"  {way} at {count} rows: {refusal}", flush=True)
                continue
            reference = result if reference is None else reference
            error = float((result - reference).norm() / reference.norm())
            if not error < TOLERANCE:
                print(f"  {way} at {count} rows is wrong by {error:.3f} and left out", flush=True)
                continue
            found.setdefault(way, [float("nan")] * len(rows))[place] = spent
    return found


def job_seconds(shape: Shape, times: list[float], rows: list[int]) -> float:
    """What the product takes in the job, between the measured rows by interpolation."""
    job = Job.make()
    lengths = np.array(job.lengths)
    live = [int((lengths > step).sum()) for step in range(1, int(lengths.max()))]
    total = float(np.interp(live, rows, times).sum())
    if PREFILL_ROWS in rows and shape.of_prompts:
        total += job.tokens_in / PREFILL_ROWS * times[rows.index(PREFILL_ROWS)]
    return shape.times * total


def table(name: str, times: dict[str, list[float]], rows: list[int], floors: list[float]) -> None:
    print(f"\n{name}, us{'':8}" + "".join(f"{way:>15}" for way in times) + f"{'best/floor':>15}")
    for place, count in enumerate(rows):
        cells = [spent[place] for spent in times.values()]
        best = min(cell for cell in cells if cell == cell)
        marked = (
            f"{1e6 * cell:.1f}{'*' if cell == best else ' '}" if cell == cell else "- "
            for cell in cells
        )
        share = f"{floors[place] / best:.0%}"
        print(
            f"{count:>8} rows   " + "".join(f"{cell:>15}" for cell in marked) + f"{share:>15}",
            flush=True,
        )


def whole_job(
    found: dict[str, dict[str, list[float]]], sizes: dict[str, Shape], rows: list[int]
) -> dict[str, float]:
    """Seconds of all products by each way, by the library's where there is no such way."""
    ways = list(dict.fromkeys(way for times in found.values() for way in times))
    totals = dict.fromkeys([*ways, "best"], 0.0)
    for name, times in found.items():
        library = times["library"]
        best = np.nanmin(list(times.values()), axis=0).tolist()
        for way in totals:
            own = best if way == "best" else times.get(way, library)
            filled = [y if x != x else x for x, y in zip(own, library, strict=True)]
            totals[way] += job_seconds(sizes[name], filled, rows)
    return {way: round(total, 3) for way, total in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "fp8"), default="bfloat16")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--ways", default="", help="only these beside the library's, by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    rows = sorted({int(count) for count in arguments.rows.split(",")})
    wanted = set(filter(None, arguments.ways.split(",")))
    is_fp8, device = arguments.dtype == "fp8", torch.device(arguments.device)
    kind: type[Plain | Fp8] = Fp8 if is_fp8 else Plain
    config = ModelConfig.from_folder(arguments.model)
    if config.experts is not None:
        parser.error("experts are multiplied in groups, which this does not time")
    sizes = shapes(config, is_fp8)
    found: dict[str, dict[str, list[float]]] = {}
    floors = {
        name: [shape.floor(count, kind.itemsize) for count in rows] for name, shape in sizes.items()
    }
    with torch.inference_mode():
        for name, shape in sizes.items():
            found[name] = measure(shape, kind, rows, device, wanted)
            table(name, found[name], rows, floors[name])
    totals = whole_job(found, sizes, rows)
    floor = sum(job_seconds(shape, floors[name], rows) for name, shape in sizes.items())
    print("\nseconds of the job's products:", totals | {"floor": round(floor, 3)})
    result: dict[str, Any] = {
        "benchmark": "products",
        "model": arguments.model.name,
        "dtype": str(E4M3 if is_fp8 else torch.bfloat16).removeprefix("torch."),
        "gpu": gpu_name(arguments.device),
        "rows": rows,
        "microseconds": {
            name: {
                way: [round(1e6 * x, 2) if x == x else None for x in spent]
                for way, spent in times.items()
            }
            for name, times in found.items()
        },
        "floor_microseconds": {n: [round(1e6 * x, 2) for x in f] for n, f in floors.items()},
        "job_seconds": totals | {"floor": round(floor, 3)},
    }
    if device.type == "cuda":
        print(write(f"products_{arguments.model.name}_{arguments.dtype}", result))


if __name__ == "__main__":
    main()
