"""Three times what the KV cache holds: what preemption costs in throughput.

    python -m benchmarks.overload [--model PATH]

Unfinished requests always ask for 3 times the cache. Optimistic admission against reserving every
request's max_tokens, in simulated time: a step takes

    3.8 ms + 23 us for each token computed + 34 ns for each token of context read,

which is an 8B model in bfloat16 by one H200's memory bandwidth and matrix rate, and not a
measurement. Then on the CPU engine with one thread, in its CPU seconds, with a random llama of 4
layers of 256 or --model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.multi_turn import WIDE
from benchmarks.record import write
from tests.factory import make_tiny_model
from tridentlm.config import EngineSettings
from tridentlm.core.plan import I32, StepPlan
from tridentlm.core.request import Limits, Request
from tridentlm.core.runner import Runner
from tridentlm.engine import Engine, build_runner
from tridentlm.simulated import next_tokens

PAGE, DEMAND, END, VOCAB = 16, 3.0, 1, 50_000
ANSWERS = ("full", "early", "turn")
POOLS, ADMISSIONS = (0.5, 0.75, 1.0, 3.0), ("optimistic", "reserve")
STEP_S, TOKEN_S, CONTEXT_S = 3.8e-3, 23e-6, 34e-9


class TimedStep:
    def __init__(self, tokens: I32) -> None:
        self._tokens = tokens

    def collect(self) -> I32:
        return self._tokens

    def logprobs(self) -> None:
        return None


class TimedRunner:
    """Counts the time that steps would take. An answer ends where its request's seed says."""

    device, dtype = "simulated", "none"
    eos_token_ids = frozenset({END})

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.seconds = 0.0

    def launch(self, plan: StepPlan) -> TimedStep:
        context = int(plan.context_lens.sum())
        self.seconds += STEP_S + TOKEN_S * plan.num_tokens + CONTEXT_S * context
        ends = plan.sample_positions + 1 >= plan.seeds.astype(np.int64)
        tokens = next_tokens(plan.sampled, plan.sample_positions, plan.seeds)
        return TimedStep(np.where(ends, np.int32(END), tokens))

    def close(self) -> None:
        pass


class Demand:
    """Requests until `total` have ended; those unfinished may come to hold `tokens` tokens.

    Answers are `full`, of max_tokens, or end `early`, anywhere; or they `turn`: half of them end
    after a twentieth, which makes admission bold, and then the others are full.
    """

    def __init__(self, total: int, tokens: int, longest: int, answers: str, vocab: int) -> None:
        rng = np.random.default_rng(0)
        shortest = longest // 10
        self._tokens = tokens
        self._held: dict[int, int] = {}
        self._waiting: list[Request] = []
        for number in range(total):
            prompt_len, most = rng.integers(shortest, longest, 2).tolist()
            share = rng.uniform(0.05, 1.0)
            if answers == "full":
                share = 1.0
            elif answers == "turn":
                share = 0.05 if number < total // 2 else 1.0
            prompt = rng.integers(3, vocab, prompt_len).astype(np.int32)
            ends_at = prompt_len + max(1, int(most * share))
            stops = frozenset({END}) if share < 1 else frozenset()
            self._waiting.append(Request(number, prompt, most, seed=ends_at, stop_token_ids=stops))
        self._waiting.reverse()

    def arrive(self, engine: Engine) -> None:
        while self._waiting and sum(self._held.values()) < self._tokens:
            request = self._waiting.pop()
            self._held[request.id] = len(request.prompt) + request.max_tokens
            engine.add(request)

    def end(self, request_id: int) -> None:
        del self._held[request_id]


def drive(
    runner: Runner, admission: str, demand: Demand, clock: Callable[[], float]
) -> dict[str, Any]:
    """Tokens a second over the whole run, by `clock`."""
    engine = Engine(runner, admission=admission, steps_in_flight=1)
    tokens, start = 0, clock()
    demand.arrive(engine)
    while engine.has_work:
        output = engine.step()
        if output is None:
            continue
        tokens += int((output.tokens >= 0).sum())
        for request_id in output.ids[output.finish > 0].tolist():
            demand.end(request_id)
        demand.arrive(engine)
    seconds = clock() - start
    engine.check_integrity()
    return {
        "tok_s": round(tokens / seconds, 2),
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "preemptions": engine.stats().preemptions,
    }


def simulated(capacity: int, total: int) -> list[dict[str, Any]]:
    """Both policies with pools of parts and multiples of `capacity` tokens, at the same demand."""
    rows = []
    for answers, share, admission in itertools.product(ANSWERS, POOLS, ADMISSIONS):
        pages = int(capacity * share) // PAGE
        limits = Limits(4096, pages, PAGE, 256, 4096, 8192, VOCAB)
        runner = TimedRunner(limits)
        demand = Demand(total, int(DEMAND * capacity), 1024, answers, VOCAB)
        result = drive(runner, admission, demand, lambda runner=runner: runner.seconds)
        rows.append({"answers": answers, "pool": share, "admission": admission, **result})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def real(model: str, capacity: int, total: int) -> list[dict[str, Any]]:
    """Both policies on the CPU engine, every answer in full."""
    rows = []
    for share, admission in itertools.product((0.75, 1.0), ADMISSIONS):
        settings = EngineSettings(
            model=model, device="cpu", page_size=PAGE, max_running=64, threads=1
        )
        settings = replace(settings, num_pages=int(capacity * share) // PAGE)
        runner, name = build_runner(settings)
        demand = Demand(total, int(DEMAND * capacity), 128, "full", runner.limits.vocab_size)
        result = drive(runner, admission, demand, time.process_time)
        rows.append({"model": name, "pool": share, "admission": admission, **result})
        print(json.dumps(rows[-1]), flush=True)
        runner.close()
    return rows


def ratio(rows: list[dict[str, Any]]) -> float:
    """Optimistic admission with the whole pool, to the best that reserving reaches within it."""
    rows = [row for row in rows if row["pool"] <= 1]
    rate = {kind: [r["tok_s"] for r in rows if r["admission"] == kind] for kind in ADMISSIONS}
    [whole] = [r["tok_s"] for r in rows if r["admission"] == "optimistic" and r["pool"] == 1]
    return round(float(whole / max(rate["reserve"])), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    rows = simulated(capacity=20 * 1124, total=300)
    result: dict[str, Any] = {"benchmark": "overload", "throughput": rows}
    result["ratios"] = {
        answers: ratio([row for row in rows if row["answers"] == answers]) for answers in ANSWERS
    }
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(make_tiny_model("llama", Path(folder) / "llama-256x4", **WIDE))
        result["cpu_engine"] = real(model, capacity=20 * 140, total=90)
    result["ratios"]["cpu_engine"] = ratio(result["cpu_engine"])
    print(json.dumps(result["ratios"]), write("overload", result))


if __name__ == "__main__":
    main()
