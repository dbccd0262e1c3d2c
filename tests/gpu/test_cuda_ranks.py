"""Two ranks on two GPUs, over NCCL. Run with `pytest -m gpus tests/gpu`.

Sums over ranks are rounded in another order than those of one rank, so answers are compared up to
a near-tie of the reference, as in test_cuda_greedy.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import torch

from tests.gpu.conftest import make_model
from tests.gpu.test_cuda_engine import PAGE, PAGES, SETTINGS, answers, assert_near, prompts
from tests.gpu.test_cuda_greedy import TOKENS, greedy, ties
from tests.models.conftest import Reference
from tests.models.plans import Chunk, PlanMaker
from tests.parallel.test_death import Owner, ranks_of, request
from tests.waiting import wait_until_gone
from tridentlm.config import EngineSettings
from tridentlm.core.plan import FROM_DEVICE, StepPlan
from tridentlm.engine import build_runner
from tridentlm.parallel.leader import ParallelRunner

pytestmark = pytest.mark.gpus

END_SECONDS = 10.0


class Ranks:
    """Several ranks as `assert_near` sees a runner: the leader's logits, computed by all."""

    def __init__(self, runner: ParallelRunner) -> None:
        self.runner = runner
        self._executor = self

    def compute(self, plan: StepPlan) -> tuple[torch.Tensor, ...]:
        self.runner._followers.send(plan)
        return self.runner._runner._executor.compute(plan)


def start(settings: EngineSettings, model: Reference, tp: int = 2) -> ParallelRunner:
    runner, _ = build_runner(replace(settings, model=str(model.folder), tp=tp))
    assert isinstance(runner, ParallelRunner)
    return runner


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Reference, ParallelRunner]]:
    """A model, and two ranks that serve it in bfloat16 with CUDA Graphs."""
    model = make_model(request.param, tmp_path_factory.mktemp(request.param))
    runner = start(SETTINGS, model)
    yield model, runner
    runner.close()


def test_logits_of_two_ranks_are_near_those_of_transformers(
    pair: tuple[Reference, ParallelRunner],
) -> None:
    """Over a prefill, a chunk beside decodes, and decodes in graphs of several sizes."""
    model, runner = pair
    assert (runner.device, runner._runner.backend) == ("cuda", "flashinfer")
    assert_near(Ranks(runner), model, 2e-2)


def test_overlap_changes_no_token_of_two_ranks(pair: tuple[Reference, ParallelRunner]) -> None:
    """Greedy and sampled, with and without filters, which the leader alone applies."""
    _, runner = pair
    together = answers(runner, 2)
    assert [len(tokens) for tokens in together] == [10 + 5 * index for index in range(12)]
    assert together == answers(runner, 1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


def test_greedy_answers_in_float32_are_those_of_one_rank(llama: Reference) -> None:
    expected = greedy(llama, "cuda", together=True)
    found = ties(llama, expected, greedy(llama, "cuda", together=True, tp=2))
    print(f"{found} near-ties in {TOKENS * len(expected)} tokens")
    assert found <= 2, "more near-ties than a random model has"


def test_graphs_of_two_ranks_compute_what_their_kernels_compute_one_by_one(
    llama: Reference,
) -> None:
    """The second start in one process, and the end of both: graphs go before NCCL does."""
    tokens = []
    for largest in (SETTINGS.cuda_graph_max_batch, 0):
        runner = start(replace(SETTINGS, cuda_graph_max_batch=largest), llama)
        assert bool(runner._runner._executor._graphs) == bool(largest)
        plans = PlanMaker(PAGES, PAGE)
        chunks = [Chunk(i, prompt) for i, prompt in enumerate(prompts(4, 9))]
        pending = [runner.launch(plans.step(chunks))]
        decodes = [Chunk(i, [FROM_DEVICE]) for i in range(4)]
        pending += [runner.launch(plans.step(decodes)) for _ in range(40)]
        tokens.append([step.collect().tolist() for step in pending])
        followers = [psutil.Process(child.pid) for child in runner._followers._processes]
        began = time.monotonic()
        runner.close()
        assert time.monotonic() - began < END_SECONDS
        wait_until_gone(followers)
    assert tokens[0] == tokens[1]


def test_a_killed_rank_ends_the_engine_process_which_comes_back(llama: Reference) -> None:
    owner = Owner(replace(SETTINGS, model=str(llama.folder), tp=2))
    owner.engine.start()
    try:
        owner.engine.add([request(0)])
        owner.receive_until_ended(0)
        for victim in (1, 0):  # the follower, then the leader
            ranks = [owner.leader, *ranks_of(owner.leader)]
            assert len(ranks) == 2
            owner.engine.add([request(1, max_tokens=1500)])
            owner.tokens.pop(1, None)
            owner.receive_until(lambda: len(owner.tokens.get(1, [])) >= 5)
            ranks[victim].kill()
            wait_until_gone(ranks)
            owner.receive_until(lambda: not owner.engine.up)
            owner.receive_until(lambda: owner.engine.up)
            owner.engine.add([request(2)])
            owner.tokens.pop(2, None)
            owner.finish.pop(2, None)
            owner.receive_until_ended(2)
            assert owner.tokens[2] == owner.tokens[0]
        ranks = [owner.leader, *ranks_of(owner.leader)]
    finally:
        owner.engine.close()
    wait_until_gone(ranks)
