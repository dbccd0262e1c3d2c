from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.conftest import PAGE, PAGES, Reference
from tests.models.plans import Chunk, PlanMaker
from tridentlm.config import EngineSettings
from tridentlm.eager import profile_plan
from tridentlm.errors import InvalidRequest
from tridentlm.hub import ModelFiles
from tridentlm.models import loading, weights
from tridentlm.models.config import ModelConfig
from tridentlm.models.rotary import rotary_frequencies, rotary_table
from tridentlm.runner import ModelRunner

SETTINGS = EngineSettings(
    device="cpu", page_size=PAGE, num_pages=PAGES, max_running=8, load_format="dummy"
)
CPU = torch.device("cpu")


@pytest.fixture
def bare(tiny: Reference, tmp_path: Path) -> ModelFiles:
    """A folder that holds a config.json and nothing else."""
    shutil.copy(tiny.folder / "config.json", tmp_path)
    return ModelFiles("hf", tmp_path, "bare", tmp_path)


def test_dummy_weights_need_a_config_alone_and_are_the_same_each_time(bare: ModelFiles) -> None:
    tokens = []
    for _ in range(2):
        runner = ModelRunner(SETTINGS, bare)
        chunks = [Chunk(slot, [5 + slot, 9, 7]) for slot in range(8)]
        plan = PlanMaker(PAGES, PAGE).step(chunks, temperature=[1.0] * 8, seeds=range(8))
        tokens.append(runner.launch(plan).collect().tolist())
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 2


def test_dummy_weights_have_the_layout_of_real_ones_and_are_finite(bare: ModelFiles) -> None:
    config = ModelConfig.from_folder(bare.path)
    dummy = loading.dummy(config, torch.bfloat16, CPU)
    assert {name: stored.shape for name, stored in dummy.tensors.items()} == {
        part.name: part.shape for parts in weights.layout(config).values() for part in parts
    }
    made = loading.load(config, dummy, torch.bfloat16, CPU)
    assert all(tensor.isfinite().all() for tensor in made.values())
    assert made["norm"].eq(1).all()
    assert made["layers.0.down.weight"].float().std() == pytest.approx(0.02, rel=0.1)


def test_dummy_weights_for_a_gguf_file_are_refused(bare: ModelFiles) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.json") as caught:
        ModelRunner(SETTINGS, replace(bare, kind="gguf"))
    assert caught.value.param == "load_format"


@pytest.mark.parametrize(("name", "value"), [("backend", "flashinfer"), ("kv_dtype", "fp8")])
def test_what_needs_a_cuda_device_is_refused_on_a_cpu(
    bare: ModelFiles, name: str, value: str
) -> None:
    with pytest.raises(InvalidRequest, match=value) as caught:
        ModelRunner(replace(SETTINGS, **{name: value}), bare)
    assert caught.value.param == name


def test_start_up_is_reported_by_stage(bare: ModelFiles) -> None:
    stages = ModelRunner(SETTINGS, bare).startup_seconds
    assert list(stages) == ["weights", "profile", "cache"]
    assert all(spent >= 0 for spent in stages.values())


@pytest.mark.parametrize(("tokens", "longest"), [(8192, 100), (8192, 8192), (1, 1), (70, 64)])
def test_the_profiled_step_fits_the_model_and_its_own_pages(tokens: int, longest: int) -> None:
    plan = profile_plan(tokens, longest, 16, 256)
    assert plan.num_tokens == tokens == plan.query_starts[-1]
    assert plan.context_lens.max() <= longest
    assert plan.positions.max() < longest
    assert len(np.unique(plan.kv_slots)) == tokens  # no token overwrites another's
    assert plan.kv_slots.max() < 16 * plan.block_tables.size


def test_the_rotary_table_holds_the_angles_of_each_position(tiny: Reference) -> None:
    config = ModelConfig.from_folder(tiny.folder)
    angles = 7 * rotary_frequencies(config)
    torch.testing.assert_close(
        rotary_table(config, 9, CPU)[7], torch.cat((angles.cos(), angles.sin()))
    )
