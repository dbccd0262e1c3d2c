"""Norm and SiLU of few rows, and the fetching beside them. Run with `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tridentlm.backends.torch import TorchOps

pytestmark = pytest.mark.gpu

SHAPES = [(1, 4096), (7, 576), (64, 2560), (256, 1024)]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from tridentlm.backends import fetch_ahead  # the language Triton is there on a GPU host alone

    return fetch_ahead


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


@pytest.mark.parametrize("outputs", [0, 100, 40_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sum_and_its_norm_are_those_of_torch(
    kernels: ModuleType, shape: tuple[int, int], outputs: int
) -> None:
    """Whatever is fetched: nothing, a few rows, or more than there is room for."""
    x, delta, weight = numbers(*shape), numbers(*shape), torch.rand(shape[1], device="cuda")
    weight, upcoming = weight.bfloat16(), numbers(outputs, shape[1]) if outputs else None
    total, expected = TorchOps().add_rms_norm(x, delta, weight, 1e-6)
    ours = kernels.add_rms_norm(x, delta, weight, 1e-6, upcoming)
    torch.cuda.synchronize()
    assert torch.equal(ours[0], total)
    # The sum of squares is taken in another order.
    torch.testing.assert_close(ours[1], expected, rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("outputs", [0, 100, 40_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_is_that_of_torch(kernels: ModuleType, shape: tuple[int, int], outputs: int) -> None:
    gate_up = 3 * numbers(shape[0], 2 * shape[1])
    upcoming = numbers(outputs, shape[1]) if outputs else None
    product = kernels.silu_mul(gate_up, upcoming)
    torch.cuda.synchronize()
    expected = TorchOps().silu_mul(gate_up.float())
    torch.testing.assert_close(product.float(), expected, rtol=1e-2, atol=1e-6)


def test_rows_that_are_no_whole_pieces_or_not_aligned_are_left_alone(kernels: ModuleType) -> None:
    storage = numbers(65, 4096)
    whole = kernels.Fetch.of(storage[1:], storage)
    assert (whole.outputs, whole.row_bytes, whole.pieces) == (64, 8192, 8)
    assert kernels.Fetch.of(storage.view(-1)[1:4097].view(1, 4096), storage).pieces == 0
    assert kernels.Fetch.of(storage[:, :4].contiguous(), storage).pieces == 0
    assert kernels.Fetch.of(None, storage).pieces == 0
