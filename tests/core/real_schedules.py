"""Random schedules on the CPU engine with a tiny model, against transformers on each text alone.

    python -m tests.core.real_schedules [--schedules 1000] [--seed 0]

A schedule draws pool, step budget, cache, admission, policy, steps in flight and requests, which
share beginnings. A difference counts unless the reference's two best logits are within TIE.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.core.driver import Reckless
from tests.factory import make_tiny_model
from tridentlm.config import EngineSettings
from tridentlm.core.plan import StepPlan
from tridentlm.core.policy import POLICIES
from tridentlm.core.request import Limits, Request
from tridentlm.core.runner import PendingStep, Runner
from tridentlm.engine import Engine, build_runner

TIE = 1e-4
MOST = Limits(128, 40, 8, 6, 100, 64, 1)  # vocab_size: the model's


class Narrow:
    """A runner with smaller limits than those it was built for."""

    device, dtype = "cpu", "float32"

    def __init__(self, runner: Runner, limits: Limits) -> None:
        self._runner = runner
        self.limits = limits

    def launch(self, plan: StepPlan) -> PendingStep:
        return self._runner.launch(plan)

    def close(self) -> None:
        pass


class RealSchedules:
    """`counts`: schedules, requests, tokens, ties, preemptions and hits (tokens from the cache)."""

    def __init__(self, family: str, folder: Path) -> None:
        path = make_tiny_model(family, folder / family)
        self.reference = transformers.AutoModelForCausalLM.from_pretrained(path).float().eval()
        settings = EngineSettings(
            model=str(path),
            device="cpu",
            max_model_len=MOST.max_model_len,
            page_size=MOST.page_size,
            num_pages=MOST.num_pages,
            max_running=MOST.max_running,
            max_step_tokens=MOST.max_step_tokens,
            threads=1,
        )
        self.runner, _ = build_runner(settings)
        self.counts: Counter[str] = Counter()

    def run(self, seed: int) -> None:
        """One schedule. Raises AssertionError for a token that no near-tie explains."""
        rng = np.random.default_rng(seed)
        engine = self._engine(rng)
        requests = self._requests(rng)
        tokens = self._drive(engine, requests, rng)
        for request in requests:
            self.counts["ties"] += differs(self.reference, request, tokens[request.id])
            self.counts["tokens"] += len(tokens[request.id])
        stats = engine.stats()
        self.counts.update(
            schedules=1,
            requests=len(requests),
            preemptions=stats.preemptions,
            hits=stats.prefix_hit_tokens,
        )

    def _engine(self, rng: np.random.Generator) -> Engine:
        limits = replace(
            self.runner.limits,
            num_pages=int(rng.integers(13, rng.choice([16, 24, MOST.num_pages]))),
            max_running=int(rng.integers(1, MOST.max_running + 1)),
            max_step_tokens=int(rng.integers(4, MOST.max_step_tokens + 1)),
        )
        engine = Engine(
            Narrow(self.runner, limits),
            steps_in_flight=int(rng.integers(1, 3)),
            prefix_cache=str(rng.choice(["radix", "radix", "null"])),
            admission=str(rng.choice(["optimistic", "optimistic", "reserve"])),
            policy=str(rng.choice(list(POLICIES))),
            max_mixed_tokens=int(rng.choice([1, 7, 1000])),
        )
        if rng.random() < 0.7:
            scheduler = engine.scheduler
            scheduler._admission.expected = Reckless()
        return engine

    def _requests(self, rng: np.random.Generator) -> list[Request]:
        """Some go on from a common beginning."""
        vocab = self.runner.limits.vocab_size
        common = rng.integers(3, vocab, 40)
        requests = []
        for i in range(7):
            own = rng.integers(3, vocab, int(rng.integers(1, 40)))
            prompt = np.concatenate([common[: int(rng.integers(0, 41))], own]).astype(np.int32)
            length, priority = int(rng.integers(1, 24)), int(rng.integers(3))
            requests.append(Request(i, prompt, length, temperature=0.0, priority=priority))
        return requests

    def _drive(
        self, engine: Engine, requests: list[Request], rng: np.random.Generator
    ) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {request.id: [] for request in requests}
        waiting = list(requests)
        while waiting or engine.has_work:
            count = int(rng.integers(0, 4))
            for request in waiting[:count]:
                engine.add(request)
            waiting = waiting[count:]
            output = engine.step()
            engine.check_integrity()
            if output is not None:
                for i, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
                    tokens[i].append(token)
        return tokens


def differs(reference: torch.nn.Module, request: Request, got: list[int]) -> bool:
    """Whether the answer leaves the reference's at a near-tie; anywhere else it fails."""
    ids = torch.tensor([[*request.prompt.tolist(), *got]])
    with torch.inference_mode():
        logits = reference(ids).logits[0, len(request.prompt) - 1 : -1]
    assert len(logits) == request.max_tokens
    best = logits.topk(2).values
    wrong = logits.argmax(-1) != torch.tensor(got)
    assert not (wrong & (best[:, 0] - best[:, 1] > TIE)).any()
    return bool(wrong.any())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        families = [RealSchedules(family, Path(folder)) for family in ("llama", "qwen3")]
        for number in range(options.schedules):
            families[number % 2].run(options.seed + number)
    counts = families[0].counts + families[1].counts
    counts["ties"] += 0
    print(f"{dict(counts)} in {time.monotonic() - start:.0f} s: no other difference")


if __name__ == "__main__":
    main()
