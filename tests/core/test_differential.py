"""Any schedule gives the tokens of the naive run: one request at a time, alone.

The fake model's next token is a hash of the whole prefix as it lies in the paged memory, so a wrong
page, a wrong position or stale KV changes the text. The real model's part compares greedy tokens on
the CPU engine, where a difference counts unless the reference's two best logits are within 1e-4.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.real_schedules import RealSchedules
from tests.core.traffic import SeededWorld

SCHEDULES = 1000
REAL_SCHEDULES = 12


def test_a_thousand_random_schedules_give_the_tokens_of_the_naive_run() -> None:
    """`SeededWorld.run` ends with `Driver.check_end`, which compares every text with `answer`."""
    preemptions = hits = ended = 0
    for seed in range(SCHEDULES):
        world = SeededWorld(50_000 + seed, checked=False)
        _, preempted = world.run(turns=6)
        preemptions += preempted
        hits += world.driver.scheduler.stats().prefix_hit_tokens
        ended += len(world.driver.finish)
    print(f"{preemptions} preemptions, {hits} tokens from the cache, {ended} requests")
    assert preemptions > 20
    assert hits > 1000
    assert ended > SCHEDULES


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen3_moe"])
def test_the_real_engine_gives_the_tokens_of_running_alone(family: str, tmp_path: Path) -> None:
    """tests/core/real_schedules.py runs more of them."""
    schedules = RealSchedules(family, tmp_path)
    for seed in range(REAL_SCHEDULES):
        schedules.run(seed)
    print(family, dict(schedules.counts))
    assert schedules.counts["preemptions"] > 0
    assert schedules.counts["hits"] > 0
    assert schedules.counts["ties"] <= 4, "more near-ties than a random model has"
