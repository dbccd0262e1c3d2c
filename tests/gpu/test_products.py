"""Products of few rows in FP8, and kernels that start early. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.conftest import SETTINGS, make_model
from tests.gpu.test_cuda_engine import worst_error
from tests.models.conftest import Reference
from tridentlm.backends.base import Rounded
from tridentlm.models.fp8 import quantize_rows, round_rows, scaled_product
from tridentlm.runner import ModelRunner

if TYPE_CHECKING:
    from tridentlm.backends.flashinfer_ops import FlashInferOps

pytestmark = pytest.mark.gpu

SIZES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
"""Of Qwen3-8B's layers."""
OTHERS = [(1024, 3072), (4096, 1024), (1008, 528), (2576, 4112)]
ROWS = [1, 2, 7, 16, 33, 72, 96, 130, 190, 224, 256]
BF16 = torch.bfloat16


@pytest.fixture
def ops() -> FlashInferOps:
    from tridentlm.backends.flashinfer_ops import FlashInferOps  # it is there on a GPU host alone

    return FlashInferOps()


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def inputs_of(rows: int, inputs: int) -> Rounded:
    return round_rows(torch.randn(rows, inputs, device="cuda"), None)


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("size", SIZES + OTHERS)
def test_fp8_products_are_those_of_their_numbers(ops: FlashInferOps, size: tuple[int, int]) -> None:
    from tridentlm.backends.fp8_product import _resources, few_rows_product

    weight, scale = quantize_rows(torch.randn(size, device="cuda"))
    exact_weight = weight.double() * scale[:, None]
    for rows in ROWS:
        x = inputs_of(rows, size[1])
        exact = F.linear(x.values.double() * x.scales, exact_weight)
        library = scaled_product(x, weight, scale, BF16)
        ours = few_rows_product(x, weight, scale, BF16)
        chosen = ops.scaled_linear(x, weight, scale, BF16)
        assert error(library, exact) < 1e-2
        assert error(chosen, exact) < 1e-2
        if ours is None:
            assert rows > 192
            assert torch.equal(chosen, library)
            continue
        print(f"{size} {rows}: library {error(library, exact):.5f}, ours {error(ours, exact):.5f}")
        assert error(ours, exact) < 1e-2
        assert rows == 1 or torch.equal(chosen, ours)
        counters = _resources(weight.device)[-1]
        assert not counters.any()


@pytest.mark.parametrize("rows", [2, 16, 72, 130, 256])
def test_fp8_products_in_a_graph_are_those_of_one_after_another(rows: int) -> None:
    """They share counters, and one starts while the one before it ends."""
    from tridentlm.backends.fp8_product import _resources, few_rows_product

    products = []
    for size in ((4096, 4096), (1024, 3072), (4096, 12288)):
        weight, scale = quantize_rows(torch.randn(size, device="cuda"))
        products.append((inputs_of(rows, size[1]), weight, scale))

    def call() -> torch.Tensor:
        found = [few_rows_product(*product, BF16) for product in products]
        return torch.cat([y.flatten() for y in found if y is not None])

    graph, result = captured(call)
    assert result.numel() == rows * (4096 + 1024 + 4096)
    for _ in range(100):
        for x, weight, _ in products:
            new = inputs_of(rows, weight.shape[1])
            x.values.copy_(new.values)
            x.scales.copy_(new.scales)
        expected = []
        for product in products:
            y = few_rows_product(*product, BF16)
            torch.cuda.synchronize()
            assert y is not None
            expected.append(y.flatten())
        graph.replay()
        assert torch.equal(result, torch.cat(expected))
    assert not _resources(result.device)[-1].any()


def test_what_few_rows_do_not_suit_is_the_librarys(ops: FlashInferOps) -> None:
    from tridentlm.backends.fp8_product import few_rows_product

    weight, scale = quantize_rows(torch.randn(6144, 4096, device="cuda"))
    values = inputs_of(1, 16 * 4096 + 8).values[0]
    for rows in (200, 256, 257, 512):
        x = inputs_of(rows, 4096)
        assert few_rows_product(x, weight, scale, BF16) is None
        expected = scaled_product(x, weight, scale, BF16)
        assert torch.equal(ops.scaled_linear(x, weight, scale, BF16), expected)
    scales = torch.ones(16, 1, device="cuda")
    unaligned = Rounded(values[8:].view(16, 4096), scales)
    assert few_rows_product(unaligned, weight, scale, BF16) is None


def test_an_fp8_engine_is_as_near_as_the_format_allows(dense: Reference) -> None:
    """On a CPU the error is 0.17 for Llama: rounding adds up in weights drawn at random."""
    found = worst_error(ModelRunner(replace(SETTINGS, quantize="fp8"), dense.files), dense)
    print(f"relative error {found:.4f}")
    assert found < 0.22


@pytest.mark.parametrize("size", [1024, 4096])
@pytest.mark.parametrize(
    ("kind", "rows"), [("bfloat16", 1), ("bfloat16", 16), ("fp8", 1), ("fp8", 16)]
)
def test_kernels_that_start_early_wait_for_what_they_read(
    ops: FlashInferOps, kind: str, rows: int, size: int
) -> None:
    """Many layers in a graph, without a pause, are those of one kernel after another."""
    norm = torch.ones(size, device="cuda", dtype=BF16)
    plain = [torch.randn(2 * size, size, device="cuda", dtype=BF16) for _ in range(12)]
    rounded = [quantize_rows(weight.float()) for weight in plain]

    def in_bfloat16(x: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
        x, delta = x.clone(), x.clone()
        wait()
        for weight in plain:
            x, y = ops.add_rms_norm(x, delta, norm, 1e-6)
            wait()
            y = ops.linear(y, weight, None)
            wait()
            y = ops.silu_mul(y)
            wait()
            delta = ops.linear(y, weight[:size], None)
            wait()
        return x + delta

    def in_fp8(x: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
        x, delta = x.clone(), x
        wait()
        for weight, scale in rounded:
            x, inputs = ops.add_rms_norm_rounded(x, delta, norm, 1e-6, None)
            wait()
            y = ops.scaled_linear(inputs, weight, scale, BF16)
            wait()
            inputs = ops.silu_mul_rounded(y, None)
            wait()
            delta = ops.scaled_linear(inputs, weight[:size], scale[:size], BF16)
            wait()
        return x + delta

    layers = in_fp8 if kind == "fp8" else in_bfloat16
    x = torch.randn(rows, size, device="cuda", dtype=BF16)
    graph, result = captured(lambda: layers(x, lambda: None))
    for _ in range(20):
        x.normal_()  # so that what the last replay left is wrong
        expected = layers(x, torch.cuda.synchronize)
        graph.replay()
        assert result.isfinite().all()
        assert torch.equal(result, expected)
