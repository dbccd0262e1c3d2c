"""Traffic of requests that ask for everything, on the CUDA engine. `pytest -m gpu tests/gpu`.

What the device makes of a step's logits is computed again on a CPU, step by step, from the same
logits: penalties, biases, masks, filters and log-probabilities, with two steps in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.core.driver import Reckless
from tests.gpu.conftest import SETTINGS, make_model
from tests.models.conftest import Reference
from tridentlm.adjust import LogitAdjuster
from tridentlm.core.extras import RequestExtras
from tridentlm.core.plan import StepPlan
from tridentlm.core.request import Request
from tridentlm.engine import Engine
from tridentlm.logprobs import of_rows
from tridentlm.runner import ModelRunner
from tridentlm.sampling import sample, uniforms

pytestmark = pytest.mark.gpu

COUNT = 30
Step = tuple[StepPlan, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def runner(model: Reference) -> Iterator[ModelRunner]:
    """Its graphs and its pool are too small for all requests, its steps for a prompt."""
    settings = replace(
        SETTINGS, num_pages=20, max_running=10, cuda_graph_max_batch=6, max_step_tokens=64
    )
    made = ModelRunner(settings, model.files)
    yield made
    made.close()


def requests(*, plain: bool = False) -> list[Request]:
    """Half of them greedy; `plain`: without filters and extras."""
    rng = np.random.default_rng(3)
    made = []
    for index in range(COUNT):
        prompt = rng.integers(3, 384, rng.integers(1, 200)).astype(np.int32)
        fields: dict[str, float | None] = {}
        if index % 2:
            signs = rng.uniform(-1, 1, 2).tolist()
            fields |= {"presence_penalty": signs[0], "frequency_penalty": signs[1]}
            fields["repetition_penalty"] = float(rng.uniform(0.8, 1.3))
        if index % 3 == 0:
            fields |= {"logprobs": index % 5, "prompt_logprobs": index % 4}
        bias = ((int(rng.integers(384)), 4.0), (5, -3.0)) if index % 4 == 0 else ()
        extras = RequestExtras(**fields, logit_bias=bias)  # type: ignore[arg-type]
        filters = {"top_p": 0.9, "top_k": 20 * (index % 2)} if index % 5 < 2 else {}
        made.append(
            Request(
                id=index,
                prompt=prompt,
                max_tokens=int(rng.integers(1, 150)),
                temperature=0.9 * (index % 4 > 1),
                seed=index,
                **({} if plain else {**filters, "extras": extras}),
            )
        )
    return made


class Recorder:
    """The runner; every third row with extras may draw half of the vocabulary alone."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self._runner, self._rng = runner, np.random.default_rng(0)
        self.limits, self.device, self.dtype = runner.limits, runner.device, runner.dtype
        self.steps: list[Step] = []
        compute = runner._executor.compute

        def recorded(plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, tokens, hidden = compute(plan)
            self.steps.append((plan, logits.clone(), tokens.clone()))
            return logits, tokens, hidden

        monkeypatch.setattr(runner._executor, "compute", recorded)

    def launch(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        if plan.extras is not None:
            rows = np.flatnonzero(plan.extras.request_ids % 3 == 0).astype(np.int32)
            bits = self._rng.integers(
                0, 2**32, (len(rows), self.limits.vocab_size // 32), np.uint32
            )
            masks = {"constrained": rows, "allowed": bits} if len(rows) else {}
            plan = replace(plan, extras=replace(plan.extras, **masks))
        return self._runner.launch(plan)


def run(engine: Engine, asked: list[Request]) -> tuple[dict[int, list[int]], list[tuple]]:
    """Tokens by request, and log-probabilities as (id, position, tokens, values, rank)."""
    answers: dict[int, list[int]] = {request.id: [] for request in asked}
    told = []
    for request in asked:
        engine.add(request)
    while engine.has_work:
        output = engine.step()
        if output is None:
            continue
        assert not output.errors
        for request_id, token in zip(output.ids.tolist(), output.tokens.tolist(), strict=True):
            answers[request_id].append(token)
        if (table := output.logprobs) is not None:
            told += zip(
                *(table.ids.tolist(), table.positions.tolist()),
                *(table.tokens, table.values, table.ranks),
                strict=True,
            )
    engine.check_integrity()
    return answers, told


def check_tokens(runner: ModelRunner, steps: list[Step]) -> None:
    adjuster = LogitAdjuster(torch.device("cpu"), runner.limits)
    drawn, same = 0, 0
    for plan, logits, tokens in steps:
        logits, tokens = logits.cpu(), tokens.cpu()
        if not len(tokens):
            continue
        asked = adjuster.adjust(logits, plan) if adjuster.adjusts(plan) else logits
        expected = sample(asked.float(), plan)
        greedy = plan.temperature == 0
        assert torch.equal(expected[greedy], tokens[greedy].long())
        drawn, same = drawn + len(tokens), same + int((expected == tokens).sum())
        adjuster.count(tokens, plan)
    assert same >= 0.995 * drawn  # sums are rounded differently: a number on an edge may fall aside


def check_logprobs(model: Reference, steps: list[Step], told: list[tuple]) -> None:
    entries = {(entry[0], entry[1]): entry[2:] for entry in told}
    assert len(entries) == len(told)
    for plan, logits, tokens in steps:
        measured = plan.extras and plan.extras.measured
        if not measured or not len(measured.rows):
            continue
        rows, first = torch.from_numpy(measured.rows).long(), len(measured.places)
        table = of_rows(logits.cpu()[rows], tokens.cpu()[rows], measured.top)
        keys = zip(measured.ids[first:].tolist(), measured.positions[first:].tolist(), strict=True)
        for key, chosen, values, rank in zip(keys, *table, strict=True):
            ours = entries.pop(key)
            assert (ours[0][0], ours[2]) == (chosen[0], rank)
            np.testing.assert_allclose(ours[1], values[: len(ours[1])], atol=1e-4)
    off = []  # what is left are the prompts'
    for request in requests():
        expected = model.logits(request.prompt.tolist()).log_softmax(-1)
        for position, token in enumerate(request.prompt.tolist()):
            if (ours := entries.pop((request.id, position), None)) is not None:
                assert ours[0][0] == token
                off.append(abs(float(ours[1][0]) - float(expected[position - 1, token])))
    assert not entries
    assert len(off) > 300
    assert np.mean(off) < 0.03
    assert np.max(off) < 0.2


def test_the_device_makes_of_its_logits_what_a_cpu_makes_of_them(
    runner: ModelRunner, model: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(runner, monkeypatch)
    engine = Engine(recorder, steps_in_flight=2)
    engine.scheduler._admission.expected = Reckless()
    answers, told = run(engine, requests())
    assert {i: len(answer) for i, answer in answers.items()} == {
        request.id: request.max_tokens for request in requests()
    }
    assert engine.stats().preemptions > 0
    check_tokens(runner, recorder.steps)
    check_logprobs(model, recorder.steps, told)


def is_edge(model: Reference, request: Request, common: list[int], one: int, other: int) -> bool:
    """Whether rounding may decide between two tokens, by the reference's float32 logits."""
    ids = request.prompt.tolist() + common
    logits = model.logits(ids)[-1]
    low, high = sorted((one, other))
    if request.temperature == 0:
        best = min(logits[low], logits[high])
        return bool(logits.max() - best < 0.1 * logits.std())
    mass = (logits / request.temperature).softmax(-1).cumsum(-1)
    number = uniforms(np.array([request.seed], np.uint64), np.array([len(ids)], np.int64))[0]
    return bool(mass[high - 1] - 0.02 < number < mass[low] + 0.02)


def test_a_request_draws_alone_what_it_draws_in_a_crowd_but_for_edges(
    runner: ModelRunner, model: Reference
) -> None:
    together, _ = run(Engine(runner, steps_in_flight=2), requests(plain=True))
    parted = 0
    for request in requests(plain=True)[:12]:
        alone = run(Engine(runner), [request])[0][request.id]
        crowd = together[request.id]
        pairs = enumerate(zip(alone, crowd, strict=True))
        first = next((i for i, (one, other) in pairs if one != other), None)
        if first is not None:
            parted += 1
            assert is_edge(model, request, alone[:first], alone[first], crowd[first])
    print(f"{parted} of 12 answers part at an edge")
