"""The CUDA engine against the reference. Run with `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.conftest import Reference
from tests.models.plans import Chunk, PlanMaker
from tests.models.test_sampling import plan as sampling_plan
from tridentlm.config import EngineSettings
from tridentlm.core.plan import FROM_DEVICE, StepPlan
from tridentlm.core.request import Request
from tridentlm.engine import Engine
from tridentlm.runner import ModelRunner
from tridentlm.sampling import sample, uniforms

pytestmark = pytest.mark.gpu

PAGE, PAGES = 64, 64
SETTINGS = EngineSettings(device="cuda", num_pages=PAGES, max_running=32, cuda_graph_max_batch=32)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 384, n).tolist() for n in rng.integers(2, 150, count)]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float().cpu() - theirs).norm() / theirs.norm())


def logits(runner: ModelRunner, plan: StepPlan) -> torch.Tensor:
    with torch.inference_mode():
        return runner._executor.compute(plan)[0].clone()


def worst_error(runner: ModelRunner, model: Reference) -> float:
    """Over a prefill, a chunk beside decodes, and decodes in graphs of several sizes."""
    plans, texts = PlanMaker(PAGES, PAGE), prompts(9)
    errors = []
    for size in (1, 4, 8):
        long = prompts(1, size)[0] * 2
        steps = [[Chunk(i, texts[i]) for i in range(size)]]
        steps.append([Chunk(i, [7 + i]) for i in range(size)] + [Chunk(20, long[:50], False)])
        steps.append([Chunk(i, [9 + i]) for i in range(size)] + [Chunk(20, long[50:])])
        steps.append([Chunk(i, [11 + i]) for i in range(size)])
        steps.append([Chunk(i, [13 + i]) for i in range(size)])
        tokens: dict[int, list[int]] = {}
        for step in steps:
            got = logits(runner, plans.step(step))
            for chunk in step:
                tokens.setdefault(chunk.slot, []).extend(chunk.tokens)
            rows = [c.slot for c in step if c.samples]
            expected = torch.stack([model.logits(tokens[slot])[-1] for slot in rows])
            errors.append(relative_error(got, expected))
        plans = PlanMaker(PAGES, PAGE)
    return max(errors)


def test_bfloat16_logits_are_near_those_of_transformers_in_float32(model: Reference) -> None:
    runner = ModelRunner(SETTINGS, model.files)
    assert runner.backend == "flashinfer"
    error = worst_error(runner, model)
    print(f"relative error {error:.4f}")
    assert error < 2e-2


def test_without_graphs_too(model: Reference) -> None:
    assert (
        worst_error(ModelRunner(replace(SETTINGS, cuda_graph_max_batch=0), model.files), model)
        < 2e-2
    )


def test_with_an_fp8_cache_logits_stay_near(model: Reference) -> None:
    error = worst_error(ModelRunner(replace(SETTINGS, kv_dtype="fp8"), model.files), model)
    print(f"relative error with fp8 {error:.4f}")
    assert error < 0.1


def answers(runner: ModelRunner, steps_in_flight: int, **sampling: float) -> list[list[int]]:
    engine = Engine(runner, steps_in_flight=steps_in_flight)
    tokens: list[list[int]] = [[] for _ in range(12)]
    for index, prompt in enumerate(prompts(12, 5)):
        engine.add(
            Request(
                id=index,
                prompt=np.array(prompt, np.int32),
                max_tokens=10 + 5 * index,
                temperature=sampling.get("temperature", 0.8 * (index % 2)),
                top_p=0.9 if index % 4 == 3 else 1.0,
                seed=index,
            )
        )
    while engine.has_work:
        output = engine.step()
        if output is not None:
            for request, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
                tokens[request].append(token)
    engine.check_integrity()
    return tokens


def test_overlap_changes_no_token(model: Reference) -> None:
    runner = ModelRunner(SETTINGS, model.files)
    together = answers(runner, 2)
    assert [len(tokens) for tokens in together] == [10 + 5 * index for index in range(12)]
    assert together == answers(runner, 1)


def test_a_graph_computes_what_its_kernels_compute_one_by_one(model: Reference) -> None:
    graphs = ModelRunner(SETTINGS, model.files)
    eager = ModelRunner(replace(SETTINGS, cuda_graph_max_batch=0), model.files)
    tokens = []
    for runner in (graphs, eager):
        plans = PlanMaker(PAGES, PAGE)
        chunks = [Chunk(i, prompt) for i, prompt in enumerate(prompts(4, 9))]
        pending = [runner.launch(plans.step(chunks))]
        decodes = [Chunk(i, [FROM_DEVICE]) for i in range(4)]
        pending += [runner.launch(plans.step(decodes)) for _ in range(40)]
        tokens.append([step.collect().tolist() for step in pending])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("vocab", [2000, 151_936])
def test_the_kernel_draws_what_a_cpu_draws(vocab: int) -> None:
    from tridentlm.backends.kernels import choose_tokens

    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(size=(64, vocab)).astype(np.float32)) * 3
    values[5, 1000] = values[5, 77] = 50.0
    asked = sampling_plan(
        64,
        rng.integers(0, 9000, 64),
        temperature=[0.0, 0.6, 1.3, 0.0] * 16,
        seeds=np.arange(64),
    )
    choice = (
        asked.temperature,
        uniforms(asked.seeds, asked.sample_positions),
        np.zeros(64, np.int32),
    )
    on_device = (torch.from_numpy(array.copy()).cuda() for array in choice)
    last = torch.zeros(2, dtype=torch.int32, device="cuda")
    tokens = choose_tokens(values.cuda(), *on_device, last).cpu()
    same = tokens == sample(values, asked)
    assert same[asked.temperature == 0].all()
    assert same.sum() >= 63  # sums are rounded differently: a number on an edge may fall aside


def test_filters_on_the_device_draw_what_a_cpu_draws() -> None:
    from tridentlm.backends.flashinfer import cut_tail

    rng = np.random.default_rng(1)
    values = torch.from_numpy(rng.normal(size=(96, 30_000)).astype(np.float32)) * 3
    asked = sampling_plan(
        96,
        rng.integers(0, 9000, 96),
        temperature=[0.7, 1.2, 0.0] * 32,
        top_k=[0, 20, 900, 5] * 24,
        top_p=[1.0, 0.8, 0.95] * 32,
        min_p=[0.0, 0.0, 0.0, 0.02] * 24,
        seeds=np.arange(96),
    )
    same = sample(values.cuda(), asked, cut_tail).cpu() == sample(values, asked)
    assert same.sum() >= 94
