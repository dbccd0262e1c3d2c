"""FP8 weights on two ranks: each scales its part of a checkpoint as the whole is scaled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.models.test_quant import FORMATS, quantized_pair
from tests.parallel.conftest import settings_of
from tridentlm.config import EngineSettings
from tridentlm.core.request import Request
from tridentlm.engine import Engine, build_runner

REQUESTS = 12


def answers(settings: EngineSettings) -> list[list[int]]:
    runner, _ = build_runner(settings)
    engine = Engine(runner)
    rng, tokens = np.random.default_rng(3), [[] for _ in range(REQUESTS)]
    for i in range(REQUESTS):
        prompt = rng.integers(3, 380, int(rng.integers(3, 30))).astype(np.int32)
        engine.add(Request(i, prompt, 4, temperature=0.0))
    try:
        while engine.has_work:
            if (output := engine.step()) is not None:
                for i, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
                    tokens[i] += [token] if token >= 0 else []
    finally:
        runner.close()
    return tokens


@pytest.mark.parametrize("name", ["fp8-block", "fp8-tensor-static"])
def test_two_ranks_give_the_tokens_of_one(llama: Path, tmp_path: Path, name: str) -> None:
    """Exactly: their weights are the whole's, and static scales round inputs alike."""
    folder = quantized_pair(llama, tmp_path, FORMATS[name]).quantized
    one, two = (answers(settings_of(folder, tp)) for tp in (1, 2))
    assert one == two
    assert len({token for row in one for token in row}) > 2


def test_parts_that_are_quantized_at_load_give_almost_the_same(llama: Path) -> None:
    """Each rank has scales of its own for its part of a row, so rounding differs."""
    one, two = (answers(replace(settings_of(llama, tp), quantize="fp8")) for tp in (1, 2))
    same = sum(a[0] == b[0] for a, b in zip(one, two, strict=True))
    assert same > 0.6 * REQUESTS
