"""The floor of `benchmarks.offline` counts the weights that the loader loads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.offline import Job, Sizes, floor_seconds
from tridentlm.models.config import ModelConfig
from tridentlm.models.weights import layout

MODELS = sorted((Path(__file__).parents[1] / "benchmarks" / "models").glob("*/config.json"))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.parent.name)
def test_the_floor_counts_every_product_of_the_layers(path: Path) -> None:
    config = ModelConfig.from_folder(path.parent)
    weights = sum(
        math.prod(part.shape)
        for name, parts in layout(config).items()
        for part in parts
        if name.startswith("layers.") and len(part.shape) == 2
    )
    sizes = Sizes.of(config)
    assert sizes.shared + sizes.count * sizes.expert == weights
    assert sizes.read(10**6) == pytest.approx(weights)
    assert sizes.read(1) == pytest.approx(sizes.of_a_token)
    assert sizes.of_a_token <= weights


def test_few_experts_of_many_make_a_lower_floor() -> None:
    sparse, dense = (
        ModelConfig.from_folder(path.parent)
        for name in ("qwen3-30b-a3b", "qwen3-8b")
        for path in MODELS
        if path.parent.name == name
    )
    assert Sizes.of(sparse).of_a_token < Sizes.of(dense).of_a_token
    job = Job.make()
    # All 30 billion weights are read by a full batch: slower than 8 billion, but not 3.7 times.
    ratio = floor_seconds(sparse, job, 2) / floor_seconds(dense, job, 2)
    assert 1 < ratio < 2


def test_the_job_is_the_one_that_others_were_measured_on() -> None:
    job = Job.make()
    assert (len(job.prompts), job.tokens_in, job.tokens_out) == (256, 142_827, 133_966)
