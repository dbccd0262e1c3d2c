"""One request alone: the time of a token, in ms, from a context of 512, and of a first one.

    python -m benchmarks.latency --model benchmarks/models/qwen3-0.6b --load-format dummy

Greedy, 256 tokens, EOS ignored, the median of the runs' means; the first token, which is the
prompt's, does not count. It is timed by itself, for prompts of several lengths that no cache holds:
the median from `add` on. Any other setting of the engine follows as `name=value`. --profile tells
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
PROMPTS, FIRST_TOKENS = (16, 128, 512, 2048), 15
"""Lengths, and how often each is timed."""
WARM_STEPS = 16
"""Before those that are profiled; the prompt's are among them."""


def add(engine: Engine, request_id: int, length: int = CONTEXT, tokens: int = TOKENS) -> None:
    engine.flush_cache()
    rng = np.random.default_rng(request_id)
    prompt = rng.integers(0, min(10_000, engine.limits.vocab_size), length).astype(np.int32)
    engine.add(Request(request_id, prompt, tokens, temperature=0.0))


def arrivals(engine: Engine) -> list[float]:
    """When the tokens of the requests came."""
    times: list[float] = []
    while engine.has_work:
        output = engine.step()
        if output is not None and len(output.ids):
            times.append(time.perf_counter())
    return times


def token_seconds(engine: Engine, request_id: int) -> float:
    add(engine, request_id)
    times = arrivals(engine)
    assert len(times) == TOKENS
    return (times[-1] - times[0]) / (TOKENS - 1)


def first_token_ms(engine: Engine, length: int) -> float:
    spent = []
    for index in range(FIRST_TOKENS):
        started = time.perf_counter()
        add(engine, 10**5 * length + index, length, 1)
        spent.append(1e3 * (arrivals(engine)[0] - started))
    return round(statistics.median(spent), 2)


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
        "first_token_ms": {
            length: first_token_ms(engine, length)
            for length in PROMPTS
            if length <= engine.limits.max_tokens_held
        },
        "settings": arguments.settings,
        "runs": runs,
    }
    print(json.dumps({name: result[name] for name in ("token_ms", "runs", "first_token_ms")}))
    name = result_name("latency", model, settings)
    print(write(name, result))
    if arguments.profile:
        result["profile"] = profile(engine, runner.device, arguments.profile)
        print(json.dumps({"profile": result["profile"]}))
        write(name, result)
    engine.close()


if __name__ == "__main__":
    main()
