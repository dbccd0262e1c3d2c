"""Chats that go on: how much of each prompt the prefix cache saves, and what that does to TTFT.

    python -m benchmarks.multi_turn [--model PATH] [--users 8] [--turns 6]

Eight users share a system prompt of 1,000 tokens and take six turns of 100 tokens in and 100 out,
on the CPU engine without a server. All first turns arrive together; a user's next turn follows its
answer at once. Each cache runs in a fresh engine over the same prompts, after a short warm-up.
Without --model it is a random llama, 4 layers of 256: what is saved does not depend on weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tridentlm.config import EngineSettings
from tridentlm.core.request import Request
from tridentlm.engine import Engine, build_runner

from benchmarks.record import write
from tests.factory import make_tiny_model

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

    def __init__(self, engine: Engine, users: int, turns: int) -> None:
        self.engine = engine
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
        self.arrived[number] = time.perf_counter()
        prompt = np.array(history, np.int32)
        self.engine.add(Request(number, prompt, ANSWERED, temperature=0.0))

    def run(self) -> dict[str, Any]:
        start = time.perf_counter()
        for user in range(len(self.histories)):
            self.ask(user, 0)
        while self.engine.has_work:
            output = self.engine.step()
            if output is None:
                continue
            now = time.perf_counter()
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
            "seconds": round(time.perf_counter() - start, 2),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": sum(self.cached.values()),
            "cached_ratio": round(sum(self.cached.values()) / self.prompt_tokens, 4),
            "ttft_mean_s": round(statistics.mean(times), 4),
            "ttft_p50_s": round(statistics.median(times), 4),
            "ttft_p90_s": round(times[int(0.9 * len(times))], 4),
            "preemptions": self.engine.stats().preemptions,
        }


def compare(path: str, users: int, turns: int) -> tuple[str, dict[str, Any]]:
    """The model's name, and the result of either cache."""
    tokens = SYSTEM + turns * (ASKED + ANSWERED)
    pages = users * (tokens // 16 + 1)
    runner, name = build_runner(EngineSettings(model=path, device="cpu", num_pages=pages))
    Chats(Engine(runner, prefix_cache="null"), 1, 1).run()
    results = {}
    for cache in ("radix", "null"):
        results[cache] = Chats(Engine(runner, prefix_cache=cache), users, turns).run()
        print(cache, json.dumps(results[cache]), flush=True)
    runner.close()
    return name, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or str(make_tiny_model("llama", Path(folder) / "llama-256x4", **WIDE))
        name, results = compare(path, options.users, options.turns)
    radix, null = results["radix"], results["null"]
    result = {
        "benchmark": "multi_turn",
        "model": name,
        "users": options.users,
        "turns": options.turns,
        **results,
        "cached_ratio": radix["cached_ratio"],
        "ttft_mean_speedup": round(null["ttft_mean_s"] / radix["ttft_mean_s"], 2),
        "ttft_p50_speedup": round(null["ttft_p50_s"] / radix["ttft_p50_s"], 2),
    }
    print(write("multi_turn", result))


if __name__ == "__main__":
    main()
