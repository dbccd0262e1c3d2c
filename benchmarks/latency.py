"""One request alone: the time of a token, in ms, from a context of 512.

    python -m benchmarks.latency --model benchmarks/models/qwen3-0.6b --load-format dummy

Greedy, 256 tokens, EOS ignored, the median of the runs' means; the first token, which is the
prompt's, does not count. Any other setting of the engine follows as `name=value`. --profile tells
what the GPU's time goes to.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels import profiled
from benchmarks.offline import (
    DECODE_STEPS,
    engine_parser,
    engine_settings,
    gpu_name,
    result_name,
)
from benchmarks.record import write
from tridentlm.core.request import Request
from tridentlm.engine import Engine, build_runner
from tridentlm.startup import settle

CONTEXT, TOKENS = 512, 256
WARM_STEPS = 16
"""Before those that are profiled; the prompt's are among them."""


def add(engine: Engine, request_id: int) -> None:
    engine.flush_cache()
    rng = np.random.default_rng(request_id)
    prompt = rng.integers(0, min(10_000, engine.limits.vocab_size), CONTEXT).astype(np.int32)
    engine.add(Request(request_id, prompt, TOKENS, temperature=0.0))


def token_seconds(engine: Engine, request_id: int) -> float:
    add(engine, request_id)
    arrivals: list[float] = []
    while engine.has_work:
        output = engine.step()
        if output is not None and len(output.ids):
            arrivals.append(time.perf_counter())
    assert len(arrivals) == TOKENS
    return (arrivals[-1] - arrivals[0]) / (TOKENS - 1)


def profile(engine: Engine, device: str, folder: Path) -> dict[str, Any]:
    """The decode steps of one more answer."""
    add(engine, 10**6)
    for _ in range(WARM_STEPS):
        engine.step()
    told = profiled(engine, DECODE_STEPS, device, folder / "latency.json.gz")
    engine.shut_down()
    return told


def main() -> None:
    parser = engine_parser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="a folder: profiles more steps into it")
    arguments = parser.parse_args()
    settings = engine_settings(parser, arguments)
    runner, model = build_runner(settings)
    engine = Engine.from_settings(runner, settings)
    settle()
    token_seconds(engine, 0)
    runs = [round(1e3 * token_seconds(engine, 1 + i), 4) for i in range(arguments.runs)]
    median = statistics.median(runs)
    result: dict[str, Any] = {
        "benchmark": "latency",
        "model": model,
        "load_format": settings.load_format,
        "dtype": runner.dtype,
        "kv_dtype": runner.dtype if settings.kv_dtype == "auto" else settings.kv_dtype,
        "gpu": gpu_name(runner.device),
        "tp": settings.tp,
        "context": CONTEXT,
        "token_ms": median,
        "tok_s": round(1e3 / median, 1),
        "settings": arguments.settings,
        "runs": runs,
    }
    print(json.dumps({name: result[name] for name in ("token_ms", "runs")}))
    name = result_name("latency", model, settings)
    print(write(name, result))
    if arguments.profile:
        result["profile"] = profile(engine, runner.device, arguments.profile)
        print(json.dumps({"profile": result["profile"]}))
        write(name, result)
    engine.close()


if __name__ == "__main__":
    main()
