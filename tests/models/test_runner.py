from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.conftest import PAGE, PAGES, Reference
from tests.models.plans import Chunk, PlanMaker
from tridentlm.config import EngineSettings
from tridentlm.core.plan import FROM_DEVICE
from tridentlm.core.runner import Runner
from tridentlm.errors import InvalidRequest
from tridentlm.runner import ModelRunner

SETTINGS = EngineSettings(device="cpu", page_size=PAGE, num_pages=PAGES, max_running=64)
DECODE = [FROM_DEVICE]


@pytest.fixture
def runner(tiny: Reference) -> Runner:
    return ModelRunner(SETTINGS, tiny.files)


@pytest.fixture
def plans() -> PlanMaker:
    return PlanMaker(PAGES, PAGE)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 384, n).tolist() for n in range(PAGE - 1, PAGE - 1 + count)]


def test_greedy_tokens_equal_transformers_alone_and_in_a_batch(
    tiny: Reference, runner: Runner, plans: PlanMaker
) -> None:
    asked = prompts(7)
    expected = [tiny.greedy(prompt, 12) for prompt in asked]
    answers: list[list[int]] = [[] for _ in asked]
    chunks = [Chunk(slot, prompt) for slot, prompt in enumerate(asked)]
    for _ in range(12):
        tokens = runner.launch(plans.step(chunks)).collect()
        assert tokens.dtype == np.int32
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(int(token))
        chunks = [Chunk(slot, DECODE) for slot in range(len(asked))]
    assert answers == expected
    alone = PlanMaker(PAGES, PAGE)
    answer = [int(runner.launch(alone.step([Chunk(9, asked[0])])).collect()[0])]
    for _ in range(11):
        answer.append(int(runner.launch(alone.step([Chunk(9, DECODE)])).collect()[0]))
    assert answer == expected[0]


def test_steps_may_be_launched_before_their_inputs_are_read(
    tiny: Reference, runner: Runner, plans: PlanMaker
) -> None:
    prompt = prompts(1)[0]
    pending = [runner.launch(plans.step([Chunk(0, prompt)]))]
    pending += [runner.launch(plans.step([Chunk(0, DECODE)])) for _ in range(5)]
    assert [int(step.collect()[0]) for step in pending] == tiny.greedy(prompt, 6)


def test_only_rows_that_sample_answer_and_keep_their_slot_s_token(
    tiny: Reference, runner: Runner, plans: PlanMaker
) -> None:
    first, second = prompts(2)
    start = runner.launch(plans.step([Chunk(0, first)])).collect()
    nothing = runner.launch(plans.step([Chunk(1, second[:2], samples=False)])).collect()
    assert (len(start), len(nothing)) == (1, 0)
    mixed = runner.launch(plans.step([Chunk(0, DECODE), Chunk(1, second[2:])])).collect()
    assert [*start, mixed[0]] == tiny.greedy(first, 2)
    assert [mixed[1]] == tiny.greedy(second, 1)


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch(
    runner: Runner, plans: PlanMaker
) -> None:
    prompt = prompts(1)[0]
    rows, seeds = range(30), np.arange(30, dtype=np.uint64) // 2
    plan = plans.step([Chunk(row, prompt) for row in rows], temperature=[1.5] * 30, seeds=seeds)
    together = runner.launch(plan).collect().reshape(-1, 2)
    assert (together[:, 0] == together[:, 1]).all()
    assert len(set(together[:, 0].tolist())) > 5
    alone = PlanMaker(PAGES, PAGE).step([Chunk(0, prompt)], temperature=[1.5], seeds=[7])
    assert runner.launch(alone).collect()[0] == together[7, 0]


def test_limits_and_names_come_from_settings_and_model(tiny: Reference, runner: Runner) -> None:
    limits = runner.limits
    assert (limits.num_pages, limits.page_size, limits.max_running) == (PAGES, PAGE, 64)
    assert (limits.max_model_len, limits.vocab_size) == (2048, 384)
    assert (runner.device, runner.dtype) == ("cpu", "float32")


def test_bfloat16_runs_on_request_and_stays_close(tiny: Reference) -> None:
    runner = ModelRunner(replace(SETTINGS, dtype="bfloat16"), tiny.files)
    assert runner.dtype == "bfloat16"
    prompt = prompts(1)[0]
    logits = tiny.logits(prompt)[-1]
    token = runner.launch(PlanMaker(PAGES, PAGE).step([Chunk(0, prompt)])).collect()[0]
    assert logits.max() - logits[token] < 0.2


def test_a_missing_cuda_device_is_said(tiny: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match="no CUDA device"):
        ModelRunner(replace(SETTINGS, device="cuda"), tiny.files)
    assert ModelRunner(replace(SETTINGS, device="auto"), tiny.files).device == "cpu"


def test_a_page_too_small_for_the_kernels_is_refused_before_weights_are_loaded(
    tiny: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tridentlm.runner._backend", lambda *_: "flashinfer")
    monkeypatch.setattr("tridentlm.runner.loading.load", None)
    with pytest.raises(InvalidRequest, match="16 tokens at least, not 8") as caught:
        ModelRunner(replace(SETTINGS, page_size=8), tiny.files)
    assert caught.value.param == "page_size"
