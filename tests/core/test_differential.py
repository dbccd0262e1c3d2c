"""Any schedule gives the tokens of the naive run: one request at a time, alone.

The fake model's next token is a hash of the whole prefix as it lies in the paged memory, so a wrong
page, a wrong position or stale KV changes the text. The real model's part compares greedy tokens on
the CPU engine, where a difference counts unless the reference's two best logits are within 1e-4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tridentlm.config import EngineSettings
from tridentlm.core.expect import ExpectedLength
from tridentlm.core.request import Request
from tridentlm.engine import Engine, build_runner

from tests.core.driver import Reckless
from tests.core.traffic import World
from tests.factory import make_tiny_model

SCHEDULES = 1000
TIE = 1e-4


def test_a_thousand_random_schedules_give_the_tokens_of_the_naive_run() -> None:
    """`World.run` ends with `Driver.check_end`, which compares every text with `answer`."""
    preemptions = hits = ended = 0
    for seed in range(SCHEDULES):
        world = World(50_000 + seed, checked=False)
        _, preempted = world.run(turns=6)
        preemptions += preempted
        hits += world.driver.scheduler.stats().prefix_hit_tokens
        ended += len(world.driver.finish)
    print(f"{preemptions} preemptions, {hits} tokens from the cache, {ended} requests")
    assert preemptions > 20
    assert hits > 1000
    assert ended > SCHEDULES


def draw_requests(rng: np.random.Generator, vocab: int) -> list[Request]:
    """Some go on from a common beginning."""
    common = rng.integers(3, vocab, 40)
    requests = []
    for i in range(7):
        own = rng.integers(3, vocab, int(rng.integers(1, 40)))
        prompt = np.concatenate([common[: int(rng.integers(0, 41))], own]).astype(np.int32)
        requests.append(Request(i, prompt, int(rng.integers(1, 24)), temperature=0.0))
    return requests


def run_engine(engine: Engine, requests: list[Request]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    waiting = list(requests)
    while waiting or engine.has_work:
        for request in waiting[:2]:
            engine.add(request)
        waiting = waiting[2:]
        output = engine.step()
        engine.check_integrity()
        if output is not None:
            for request_id, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
                tokens[request_id].append(token)
    return tokens


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_real_engine_gives_the_tokens_of_running_alone(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / family)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    settings = EngineSettings(
        model=str(folder),
        device="cpu",
        page_size=8,
        num_pages=20,
        max_running=6,
        max_step_tokens=24,
    )
    runner, _ = build_runner(settings)
    rng = np.random.default_rng(3)
    ties = preemptions = hits = 0
    for steps_in_flight, prefix_cache in ((1, "radix"), (2, "radix"), (2, "null")):
        engine = Engine(runner, steps_in_flight=steps_in_flight, prefix_cache=prefix_cache)
        expect(engine, Reckless())
        requests = draw_requests(rng, reference.config.vocab_size)
        tokens = run_engine(engine, requests)
        ties += sum(differs(reference, r, tokens[r.id]) for r in requests)
        stats = engine.stats()
        preemptions += stats.preemptions
        hits += stats.prefix_hit_tokens
    runner.close()
    print(f"{family}: {ties} ties, {preemptions} preemptions, {hits} tokens from the cache")
    assert preemptions > 0
    assert hits > 0
    assert ties <= 4, "more near-ties than a random model has"


def expect(engine: Engine, expected: ExpectedLength) -> None:
    engine.scheduler._expected = engine.scheduler._admission._expected = expected


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
