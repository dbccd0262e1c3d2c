"""Chats that go on: how much of each prompt the prefix cache saves, and what that does to TTFT.

    python -m benchmarks.multi_turn [--model PATH] [--dtype auto] [--threads 0] [--cpu-clock]

Eight users share a system prompt of 1,000 tokens and take six turns of 100 tokens in and 100 out,
on the CPU engine without a server. All first turns arrive together; a user's next turn follows its
answer at once. Each cache runs in a fresh engine over the same prompts, after a short warm-up.
Without --model it is a random llama, 4 layers of 256: what is saved does not depend on weights.
--model default is the bundled one. --cpu-clock, with one thread, counts the engine's CPU seconds in
place of the wall's: it needs no quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import write
from tests.factory import make_tiny_model
from tridentlm.config import EngineSettings
from tridentlm.core.request import Request
from tridentlm.engine import Engine, build_runner

SYSTEM, ASKED, ANSWERED = 1000, 100, 100
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


class Chats:
    """All users' conversations on one engine; a user's turn t has the id user * turns + t."""

    def __init__(self, engine: Engine, users: int, turns: int, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.clock = clock
        self.turns = turns
        rng, vocab = np.random.default_rng(0), engine.limits.vocab_size
        system = rng.integers(3, vocab, SYSTEM).tolist()
        self.histories: list[list[int]] = [list(system) for _ in range(users)]
        self.asked = [rng.integers(3, vocab, (turns, ASKED)) for _ in range(users)]
        self.arrived: dict[int, float] = {}
        self.ttft: dict[int, float] = {}
        self.cached: dict[int, int] = {}
        self.prompt_tokens = 0

    def ask(self, user: int, turn: int) -> None:
        history = self.histories[user]
        history += self.asked[user][turn].tolist()
        self.prompt_tokens += len(history)
        number = user * self.turns + turn
        self.arrived[number] = self.clock()
        prompt = np.array(history, np.int32)
        self.engine.add(Request(number, prompt, ANSWERED, temperature=0.0))

    def run(self) -> dict[str, Any]:
        start = self.clock()
        for user in range(len(self.histories)):
            self.ask(user, 0)
        while self.engine.has_work:
            output = self.engine.step()
            if output is None:
                continue
            now = self.clock()
            for number, cached in output.cached:
                self.cached[number] = cached
                self.ttft[number] = now - self.arrived[number]
            rows = zip(
                *(a.tolist() for a in (output.ids, output.tokens, output.finish)), strict=True
            )
            for number, token, finish in rows:
                user, turn = divmod(number, self.turns)
                self.histories[user].append(token)
                if finish and turn + 1 < self.turns:
                    self.ask(user, turn + 1)
        times = sorted(self.ttft.values())
        return {
            "seconds": round(self.clock() - start, 2),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": sum(self.cached.values()),
            "cached_ratio": round(sum(self.cached.values()) / self.prompt_tokens, 4),
            "ttft_mean_s": round(statistics.mean(times), 4),
            "ttft_p50_s": round(statistics.median(times), 4),
            "ttft_p90_s": round(times[int(0.9 * len(times))], 4),
            "preemptions": self.engine.stats().preemptions,
        }


def compare(
    settings: EngineSettings, users: int, turns: int, clock: Callable[[], float]
) -> tuple[str, dict[str, Any]]:
    """The model's name, and the result of either cache."""
    tokens = SYSTEM + turns * (ASKED + ANSWERED)
    pages = users * (tokens // 16 + 1)
    runner, name = build_runner(replace(settings, device="cpu", num_pages=pages))
    Chats(Engine(runner, prefix_cache="null"), 1, 1, clock).run()
    results = {}
    for cache in ("radix", "null"):
        results[cache] = Chats(Engine(runner, prefix_cache=cache), users, turns, clock).run()
        print(cache, json.dumps(results[cache]), flush=True)
    runner.close()
    return name, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-clock", action="store_true")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = "" if options.model == "default" else options.model
        if not options.model:
            path = str(make_tiny_model("llama", Path(folder) / "llama-256x4", **WIDE))
        settings = EngineSettings(model=path, dtype=options.dtype, threads=options.threads)
        clock = time.process_time if options.cpu_clock else time.perf_counter
        name, results = compare(settings, options.users, options.turns, clock)
    radix, null = results["radix"], results["null"]
    result = {
        "benchmark": "multi_turn",
        "model": name,
        "dtype": options.dtype,
        "clock": "CPU seconds" if options.cpu_clock else "seconds",
        "users": options.users,
        "turns": options.turns,
        **results,
        "cached_ratio": radix["cached_ratio"],
        "ttft_mean_speedup": round(null["ttft_mean_s"] / radix["ttft_mean_s"], 2),
        "ttft_p50_speedup": round(null["ttft_p50_s"] / radix["ttft_p50_s"], 2),
    }
    print(write("multi_turn" if not options.model else f"multi_turn_{name.lower()}", result))


if __name__ == "__main__":
    main()
