"""Norm and SiLU of few rows against their definitions in torch. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tridentlm.backends.torch import TorchOps

pytestmark = pytest.mark.gpu

SHAPES = [(1, 4096), (7, 576), (64, 2560), (256, 1024)]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from tridentlm.backends import norm_silu  # the language Triton is there on a GPU host alone

    return norm_silu


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sum_and_its_norm_are_those_of_torch(kernels: ModuleType, shape: tuple[int, int]) -> None:
    x, delta, weight = numbers(*shape), numbers(*shape), torch.rand(shape[1], device="cuda")
    total, expected = TorchOps().add_rms_norm(x, delta, weight.bfloat16(), 1e-6)
    ours = kernels.add_rms_norm(x, delta, weight.bfloat16(), 1e-6)
    assert torch.equal(ours[0], total)
    # The squares are summed in another order, so that some numbers are rounded the other way.
    torch.testing.assert_close(ours[1], expected, rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_silu_is_that_of_torch(kernels: ModuleType, shape: tuple[int, int]) -> None:
    gate_up = 3 * numbers(shape[0], 2 * shape[1])
    expected = TorchOps().silu_mul(gate_up.float())
    torch.testing.assert_close(kernels.silu_mul(gate_up).float(), expected, rtol=1e-2, atol=1e-6)
