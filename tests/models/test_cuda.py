"""The same code on a CUDA device. Run with `pytest -m gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.factory import FAMILIES, make_tiny_model
from tests.models.conftest import PAGE, PAGES, Reference, reference
from tests.models.plans import Chunk, PlanMaker
from tests.models.test_sampling import plan
from tridentlm.backends.torch import TorchOps
from tridentlm.config import EngineSettings
from tridentlm.core.plan import FROM_DEVICE
from tridentlm.models.fp8 import Fp8Linear, held_bytes, quantize_rows
from tridentlm.runner import ModelRunner
from tridentlm.sampling import sample

pytestmark = pytest.mark.gpu

SETTINGS = EngineSettings(device="cuda", dtype="float32", page_size=PAGE, num_pages=PAGES)


@pytest.fixture(scope="module", params=[f for f in FAMILIES if f != "qwen3_moe"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Experts are computed in bfloat16 alone there."""
    return reference(make_tiny_model(request.param, tmp_path_factory.mktemp(request.param)))


def test_greedy_tokens_on_cuda_equal_transformers_on_a_cpu(dense: Reference) -> None:
    runner = ModelRunner(SETTINGS, dense.files)
    plans = PlanMaker(PAGES, PAGE)
    prompts = [list(range(20, 20 + n)) for n in (1, 4, 5, 9, 60)]
    pending = [runner.launch(plans.step([Chunk(i, p[:1]) for i, p in enumerate(prompts[:1])]))]
    chunks = [Chunk(0, [FROM_DEVICE])]
    chunks += [Chunk(i, p[:3], samples=False) for i, p in enumerate(prompts) if i]
    pending.append(runner.launch(plans.step(chunks)))
    chunks = [Chunk(0, [FROM_DEVICE])] + [Chunk(i, p[3:]) for i, p in enumerate(prompts) if i]
    pending.append(runner.launch(plans.step(chunks)))
    for _ in range(6):
        pending.append(runner.launch(plans.step([Chunk(i, [FROM_DEVICE]) for i in range(5)])))
    tokens = [step.collect().tolist() for step in pending]
    answers = [[row[0] for row in tokens]]
    answers += [[row[i] for row in tokens[2:]] for i in range(1, 5)]
    assert answers == [dense.greedy(p, len(a)) for p, a in zip(prompts, answers, strict=True)]


def test_the_pool_fills_the_free_memory_in_bfloat16_by_default(tiny: Reference) -> None:
    runner = ModelRunner(EngineSettings(max_running=10**6), tiny.files)
    assert (runner.device, runner.dtype) == ("cuda", "bfloat16")
    assert runner.limits.max_step_tokens == 8192
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < 0.2 * total  # a tenth is the reserve, less what the process itself takes
    runner.close()
    assert torch.cuda.mem_get_info()[0] > 0.9 * total


def test_a_token_is_the_same_on_both_devices() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(200, 2000)).astype(np.float32)) * 3
    asked = plan(
        200,
        rng.integers(0, 9000, 200),
        temperature=rng.choice([0, 0.7, 1.2], 200),
        top_k=rng.choice([0, 20, 900], 200),
        top_p=rng.choice([1, 0.8], 200),
        min_p=rng.choice([0, 0.02], 200),
        seeds=np.arange(200),
    )
    same = sample(logits, asked) == sample(logits.cuda(), asked).cpu()
    assert same.sum() >= 199  # sums are rounded differently: a number on an edge may fall aside


def test_fp8_products_are_those_of_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x, bias = (torch.randn(n, generator=generator) for n in ((96, 64), (7, 64), (96,)))
    values, scale = quantize_rows(weight)
    for input_scale in (None, torch.tensor([0.01])):
        answers = []
        for device in ("cpu", "cuda"):
            layer = Fp8Linear(
                values.to(device),
                scale.to(device),
                None if input_scale is None else input_scale.to(device),
                bias.bfloat16().to(device),
                torch.bfloat16,
                TorchOps(),
            )
            answers.append(layer(x.bfloat16().to(device)).float().cpu())
        torch.testing.assert_close(*answers, atol=0.1, rtol=0.02)


def test_weights_of_other_sizes_than_multiples_of_16_are_dequantized() -> None:
    weight = torch.zeros(96, 64, device="cuda").to(torch.float8_e4m3fn)
    assert held_bytes(weight, torch.bfloat16) == 96 * 64
    assert held_bytes(weight[:90], torch.bfloat16) == 2 * 90 * 64
