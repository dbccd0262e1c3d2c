"""Kernels of a mixture of experts against their definitions. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.gpu.test_products import captured, error
from tridentlm.backends.torch import TorchOps
from tridentlm.models.config import Experts

if TYPE_CHECKING:
    from tridentlm.backends.flashinfer_ops import FlashInferOps

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
QWEN = (128, 8, 2048, 768)
"""Experts, those of a token, hidden and inner size: of Qwen3-30B-A3B."""
SHAPES = [QWEN, (8, 3, 128, 48), (60, 4, 208, 144), (16, 1, 64, 80)]
TOKENS = [1, 7, 16, 33, 130, 256]
ROUTINGS = ["even", "same", "skewed"]


@pytest.fixture
def ops() -> FlashInferOps:
    from tridentlm.backends.flashinfer_ops import FlashInferOps  # it is there on a GPU host alone

    return FlashInferOps()


def logits_of(routing: str, tokens: int, experts: int) -> torch.Tensor:
    """All tokens choose the same experts with "same", and few choose most with "skewed"."""
    logits = torch.randn(tokens, experts, device="cuda")
    slope = {"even": 0.0, "same": 9.0, "skewed": 0.1}[routing]
    return (logits + slope * torch.randperm(experts, device="cuda")).to(BF16)


def choices_of(routing: str, tokens: int, experts: int, per_token: int) -> torch.Tensor:
    return logits_of(routing, tokens, experts).topk(per_token).indices.int().contiguous()


def weights_of(experts: int, hidden: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.randn(experts, 2 * inner, hidden, device="cuda", dtype=BF16) / hidden**0.5
    down = torch.randn(experts, hidden, inner, device="cuda", dtype=BF16) / inner**0.5
    return gate_up, down


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_chooses_the_experts_with_the_highest_scores(
    ops: FlashInferOps, shape: tuple[int, int, int, int], normalized: bool
) -> None:
    from tridentlm.backends.expert_kernels import route

    experts, per_token = shape[:2]
    for tokens in (*TOKENS, 8192):
        logits = torch.randn(tokens, experts, device="cuda")
        scores = logits.softmax(-1)
        expected, numbers = scores.topk(per_token)
        if normalized:
            expected = expected / expected.sum(-1, keepdim=True)
        weights, chosen = route(logits, per_token, normalized, torch.float32)
        torch.testing.assert_close(weights, expected)
        assert chosen.dtype == torch.int32
        # The softmax is summed in another order, so that nearly equal scores may change places.
        torch.testing.assert_close(scores.gather(1, chosen.long()), scores.gather(1, numbers))
        assert len(chosen[0].unique()) == per_token
        rounded = route(logits, per_token, normalized, BF16)[0]
        assert torch.equal(rounded, weights.to(BF16))


def test_of_equal_scores_the_lower_expert_comes_first(ops: FlashInferOps) -> None:
    from tridentlm.backends.expert_kernels import route

    logits = torch.zeros(3, 60, device="cuda", dtype=BF16)
    logits[1, 40:] = 1
    logits[2] = torch.nan
    weights, chosen = route(logits, 4, True, BF16)
    assert chosen[:2].tolist() == [[0, 1, 2, 3], [40, 41, 42, 43]]
    assert weights[:2].tolist() == [[0.25] * 4] * 2
    assert chosen[2].max() < 60
    assert weights[2].isnan().all()


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_choices_are_sorted_by_expert_and_then_by_token(
    ops: FlashInferOps, shape: tuple[int, int, int, int], routing: str
) -> None:
    from tridentlm.backends.expert_kernels import sort_choices

    experts, per_token = shape[:2]
    for count in (*TOKENS, 257, 8192, 9001):
        chosen = choices_of(routing, count, experts, per_token)
        tokens, places, ends = sort_choices(chosen, experts)
        ranked, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(experts, device="cuda", dtype=torch.int32)
        assert torch.equal(ends, torch.searchsorted(ranked, numbers, right=True, out_int32=True))
        assert torch.equal(tokens.long(), order // per_token)
        assert torch.equal(places.flatten()[order].long(), torch.arange(len(order), device="cuda"))
        assert tokens.dtype == places.dtype == ends.dtype == torch.int32


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_gets_the_weighted_sum_of_the_rows_at_its_places(
    ops: FlashInferOps, shape: tuple[int, int, int, int]
) -> None:
    from tridentlm.backends.expert_kernels import combine

    _, per_token, hidden, _ = shape
    for tokens in (*TOKENS, 8192):
        out = torch.randn(tokens * per_token, hidden, device="cuda", dtype=BF16)
        weights = torch.rand(tokens, per_token, device="cuda", dtype=BF16)
        places = torch.randperm(len(out), device="cuda").int().view(tokens, per_token)
        total = combine(out, weights, places)
        rows = out[places.long()].float()
        expected = torch.einsum("tk,tkh->th", weights.float(), rows)
        torch.testing.assert_close(total.float(), expected, rtol=1e-2, atol=1e-5)
        assert torch.equal(total[-1:], combine(out, weights[-1:], places[-1:]))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_few_rows_are_those_of_each_expert(
    ops: FlashInferOps, shape: tuple[int, int, int, int], routing: str
) -> None:
    from tridentlm.backends.expert_kernels import sort_choices
    from tridentlm.backends.expert_product import MOST_ROWS, few_rows_experts

    experts, per_token, hidden, inner = shape
    gate_up, down = weights_of(experts, hidden, inner)
    for count in TOKENS:
        x = torch.randn(count, hidden, device="cuda", dtype=BF16)
        chosen = choices_of(routing, count, experts, per_token)
        tokens, _, ends = sort_choices(chosen, experts)
        ours = few_rows_experts(x, tokens, ends, gate_up, down)
        if ours is None:
            assert count * per_token > MOST_ROWS * experts
            continue
        start = 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                rows = x[tokens[start:end]].double()
                product = TorchOps().silu_mul(rows @ gate_up[expert].double().T)
                exact = product @ down[expert].double().T
                assert error(ours[start:end], exact) < 1e-2
            start = end


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_in_a_graph_are_those_of_torch(
    ops: FlashInferOps, shape: tuple[int, int, int, int], routing: str
) -> None:
    """Three layers, so that each starts while the one before it ends."""
    count, per_token, hidden, inner = shape
    experts = Experts(count, per_token, inner, True, frozenset())
    layers = [weights_of(count, hidden, inner) for _ in range(3)]
    for tokens in (*TOKENS, 300, 2048):
        x = torch.randn(tokens, hidden, device="cuda", dtype=BF16)
        logits = logits_of(routing, tokens, count)

        def call(x: torch.Tensor = x, logits: torch.Tensor = logits) -> torch.Tensor:
            return torch.stack([ops.mix_experts(x, logits, experts, *layer) for layer in layers])

        graph, result = captured(call)
        for _ in range(5):
            x.normal_()
            logits.copy_(logits_of(routing, tokens, count))
            graph.replay()
            assert torch.equal(result, call())
            expected = [TorchOps().mix_experts(x, logits, experts, *layer) for layer in layers]
            # Where scores are equal torch may choose other experts.
            apart = logits.topk(per_token + 1).values.diff().ne(0).all(-1)
            if apart.any():
                assert error(result[:, apart], torch.stack(expected)[:, apart].double()) < 2e-2
