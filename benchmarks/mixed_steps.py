"""How many prompt tokens a step should take along while others decode.

    python -m benchmarks.mixed_steps [--model PATH] [--dtype auto]

Four streams of 60 tokens decode on the CPU engine; two prompts of 1,000 tokens come, one when
the other has its first token. Small shares keep the streams flowing, large ones compute the prompts
in fewer steps. `whole`: a prompt's chunks take all of the step's budget, 512 tokens. Times are CPU
seconds of one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from benchmarks.record import write
from tridentlm.config import EngineSettings
from tridentlm.core.request import Request
from tridentlm.core.runner import Runner
from tridentlm.engine import Engine, build_runner

STREAMS, ANSWER, PROMPTS, PROMPT = 4, 60, 2, 1000
BUDGET = 512
SHARES = (32, 64, 128, 256, BUDGET)


def measure(runner: Runner, share: int) -> dict[str, Any]:
    """Gaps are between a stream's tokens while prompts are being computed."""
    engine = Engine(runner, prefix_cache="null", max_mixed_tokens=share)
    rng, vocab = np.random.default_rng(0), engine.limits.vocab_size

    def add(number: int, prompt: int, answer: int) -> None:
        ids = rng.integers(3, vocab, prompt).astype(np.int32)
        engine.add(Request(number, ids, answer, temperature=0.0))

    for number in range(STREAMS):
        add(number, 16, ANSWER)
    while engine.stats().generation_tokens < STREAMS:
        engine.step()
    start = last = arrived = time.process_time()
    gaps: list[float] = []
    firsts: list[float] = []
    add(STREAMS, PROMPT, 1)
    while engine.has_work:
        output = engine.step()
        if output is None:
            continue
        now = time.process_time()
        ids = output.ids.tolist()
        if len(firsts) < PROMPTS and min(ids, default=STREAMS) < STREAMS:
            gaps.append(now - last)
            last = now
        if max(ids, default=0) >= STREAMS:
            firsts.append(now - arrived)
            arrived = now
            if len(firsts) < PROMPTS:
                add(STREAMS + len(firsts), PROMPT, 1)
    p50, p99, most = np.percentile(gaps, [50, 99, 100]).tolist()
    return {
        "mixed_tokens": share if share < BUDGET else "whole",
        "gap_p50_ms": round(p50 * 1e3, 1),
        "gap_p99_ms": round(p99 * 1e3, 1),
        "gap_max_ms": round(most * 1e3, 1),
        "prompt_ttft_s": round(float(np.mean(firsts)), 3),
        "seconds": round(time.process_time() - start, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    settings = EngineSettings(
        model=options.model,
        device="cpu",
        dtype=options.dtype,
        threads=1,
        num_pages=200,
        max_step_tokens=BUDGET,
    )
    runner, name = build_runner(settings)
    rows = []
    for share in SHARES:
        rows.append(measure(runner, share))
        print(json.dumps(rows[-1]), flush=True)
    runner.close()
    result = {"benchmark": "mixed_steps", "model": name, "dtype": options.dtype, "rows": rows}
    print(write("mixed_steps", result))


if __name__ == "__main__":
    main()
