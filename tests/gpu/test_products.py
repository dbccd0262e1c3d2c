"""Products in FP8 and by timed algorithms, alone and in the engine. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.conftest import SETTINGS, make_model
from tests.gpu.test_cuda_engine import worst_error
from tests.models.conftest import Reference
from tridentlm.backends.cublaslt import Scales
from tridentlm.backends.tuned import TunedProducts
from tridentlm.models.fp8 import quantize_rows, round_rows, scaled_product
from tridentlm.runner import ModelRunner

pytestmark = pytest.mark.gpu

SIZES = [(6144, 4096), (4096, 12288), (1000, 512)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("size", SIZES)
def test_timed_products_are_right_alone_and_in_a_graph(size: tuple[int, int]) -> None:
    tuned = TunedProducts([8, 190])
    weight = torch.randn(size, device="cuda").bfloat16()
    for rows in (8, 190):
        x = torch.randn(rows, size[1], device="cuda").bfloat16()
        first = tuned.product(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = tuned.product(x, weight)
        assert first is not None
        assert y is not None
        x.normal_()
        graph.replay()
        exact = F.linear(x.double(), weight.double())
        assert error(y, exact) < 6e-3
        assert error(first, exact) > 1  # it was of other numbers


def test_other_sizes_have_no_timed_product_and_a_capture_times_none() -> None:
    tuned = TunedProducts([8])
    weight, x = (torch.randn(n, 512, device="cuda").bfloat16() for n in (64, 9))
    assert tuned.product(x, weight) is None
    assert tuned.product(x[1:], weight) is not None  # a row of 1,024 bytes is aligned
    assert tuned.product(x.flatten()[1 : 8 * 512 + 1].view(8, 512), weight) is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(1)
        assert TunedProducts([8]).product(x[1:], weight) is None


@pytest.mark.parametrize("size", [(6144, 4096), (4096, 12288), (1008, 512)])
@pytest.mark.parametrize("rows", [1, 7, 16, 190, 256])
def test_fp8_products_are_those_of_their_numbers(size: tuple[int, int], rows: int) -> None:
    weight, scale = quantize_rows(torch.randn(size, device="cuda"))
    x = round_rows(torch.randn(rows, size[1], device="cuda"), None)
    exact = F.linear(x.values.double() * x.scales, weight.double() * scale[:, None])
    library = error(scaled_product(x, weight, scale, torch.bfloat16), exact)
    timed = TunedProducts([rows]).product(x.values, weight, Scales(x.scales, scale))
    assert timed is not None
    print(f"{size} {rows}: library {library:.5f}, timed {error(timed, exact):.5f}")
    assert max(library, error(timed, exact)) < 1e-2


@pytest.mark.parametrize("products", ["library", "timed"])
def test_an_fp8_engine_is_as_near_as_the_format_allows(dense: Reference, products: str) -> None:
    """On a CPU the error is 0.17 for Llama: rounding adds up in weights drawn at random."""
    settings = replace(SETTINGS, quantize="fp8", products=products)
    found = worst_error(ModelRunner(settings, dense.files), dense)
    print(f"relative error {found:.4f}")
    assert found < 0.22


def test_an_engine_with_timed_products_is_as_near_as_one_without(dense: Reference) -> None:
    runner = ModelRunner(replace(SETTINGS, products="timed"), dense.files)
    assert worst_error(runner, dense) < 2e-2
