from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.factory import FAMILIES, make_tiny_model
from tests.models.conftest import Reference, reference
from tridentlm.config import EngineSettings
from tridentlm.runner import ModelRunner

DENSE = [family for family in FAMILIES if family != "qwen3_moe"]
"""Those that CUDA computes in float32, too."""

PAGE, PAGES = 64, 64
SETTINGS = EngineSettings(device="cuda", num_pages=PAGES, max_running=32, cuda_graph_max_batch=32)


@pytest.fixture(scope="session", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def runner(model: Reference) -> Iterator[ModelRunner]:
    made = ModelRunner(SETTINGS, model.files)
    yield made
    made.close()


@pytest.fixture(scope="session")
def eager(model: Reference) -> Iterator[ModelRunner]:
    """Without graphs."""
    made = ModelRunner(replace(SETTINGS, cuda_graph_max_batch=0), model.files)
    yield made
    made.close()


def make_model(family: str, folder: Path, **overrides: int) -> Reference:
    """A tiny model whose heads have a size that the kernels are built for."""
    shape = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    # With the factory's larger weights, transformers' own bfloat16 is 5% from its float32.
    weights = {"hidden_size": 512, "initializer_range": 0.05}
    return reference(make_tiny_model(family, folder, **{**shape, **weights, **overrides}))
