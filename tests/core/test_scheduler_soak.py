"""A busy engine, many requests at once: what single rules in random order seldom reach."""

from __future__ import annotations

import pytest

from tests.core.traffic import SeededWorld


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_every_promise_holds_under_load(seed: int) -> None:
    steps, _ = SeededWorld(seed).run(turns=100)
    assert steps > 5


def test_the_traffic_preempts() -> None:
    assert sum(SeededWorld(seed).run(turns=100)[1] for seed in range(10)) > 0
