"""The FP8 kernels against their definitions in torch. Run with `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tridentlm.backends.base import Rounded
from tridentlm.backends.torch import TorchOps
from tridentlm.models import fp8

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from tridentlm.backends import fp8_kernels  # the language Triton is there on a GPU host alone

    return fp8_kernels


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """bfloat16 of many magnitudes, and if there is room a row of zeros and an infinity."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp(4 * torch.randn(shape[0], 1, generator=generator))
    if shape[0] > 4:
        x[1], x[2, 3] = 0, torch.inf
    return x.bfloat16().to(DEVICE)


def assert_same(ours: Rounded, expected: Rounded) -> None:
    for one, other in ((ours.values, expected.values), (ours.scales, expected.scales)):
        torch.testing.assert_close(
            one.cpu().float(), other.cpu().float(), rtol=0, atol=0, equal_nan=True
        )


def assert_near(ours: Rounded, expected: Rounded) -> None:
    """But for what lies on an edge of bfloat16: sums and functions have their own last bits."""
    torch.testing.assert_close(ours.scales, expected.scales, rtol=2**-7, atol=0)
    numbers, others = (x.values.float() * x.scales for x in (ours, expected))
    assert ours.values.float().abs().mean() > 1
    assert (numbers - others).norm() < 0.01 * others.norm()


@pytest.mark.parametrize("input_scale", [None, 0.02, 1e-4])
@pytest.mark.parametrize("shape", [(1, 4096), (7, 64), (9, 12288), (256, 4096), (5, 2560)])
def test_rows_are_rounded_bit_for_bit(
    kernels: ModuleType, shape: tuple[int, int], input_scale: float | None
) -> None:
    x = numbers(*shape)
    scale = None if input_scale is None else torch.tensor([input_scale], device=DEVICE)
    expected = fp8.round_rows(x.cpu(), None if scale is None else scale.cpu())
    assert_same(kernels.round_rows(x, scale), expected)


@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_what_is_no_number_stays_none(kernels: ModuleType, input_scale: float | None) -> None:
    x = numbers(2, 64)
    x[0, 5] = torch.nan
    scale = None if input_scale is None else torch.tensor([input_scale], device=DEVICE)
    rounded = kernels.round_rows(x, scale).values.float()
    assert rounded[0, 5].isnan()
    assert rounded[1].isfinite().all()


@pytest.mark.parametrize("shape", [(6144, 2048), (301, 4096), (200, 12288)])
def test_a_product_of_one_row_is_that_of_its_numbers(
    kernels: ModuleType, shape: tuple[int, int]
) -> None:
    x = fp8.round_rows(numbers(1, shape[1]), None)
    weight, scale = fp8.quantize_rows(numbers(*shape, seed=1).nan_to_num(0, 1, 1))
    y = kernels.scaled_vector_product(x, weight, scale, torch.bfloat16)
    exact = (x.values.double() * x.scales) @ (weight.double() * scale[:, None]).T
    torch.testing.assert_close(y, exact.bfloat16(), rtol=1e-2, atol=1e-3 * float(exact.std()))


@pytest.mark.parametrize("input_scale", [None, 0.02])
@pytest.mark.parametrize("shape", [(1, 4096), (7, 512), (64, 2560)])
def test_a_norm_is_rounded_as_it_is_made(
    kernels: ModuleType, shape: tuple[int, int], input_scale: float | None
) -> None:
    x, delta = (torch.randn(shape, device=DEVICE).bfloat16() for _ in range(2))
    weight = torch.rand(shape[1], device=DEVICE).bfloat16()
    scale = None if input_scale is None else torch.tensor([input_scale], device=DEVICE)
    total, expected = TorchOps().add_rms_norm_rounded(x, delta, weight, 1e-6, scale)
    ours = kernels.add_rms_norm_rounded(x, delta, weight, 1e-6, scale)
    assert torch.equal(ours[0], total)
    assert_near(ours[1], expected)


@pytest.mark.parametrize("input_scale", [None, 0.02])
@pytest.mark.parametrize("shape", [(1, 8192), (7, 1024), (64, 24576)])
def test_silu_is_rounded_as_it_is_made(
    kernels: ModuleType, shape: tuple[int, int], input_scale: float | None
) -> None:
    gate_up = 3 * torch.randn(shape, device=DEVICE).bfloat16()
    scale = None if input_scale is None else torch.tensor([input_scale], device=DEVICE)
    product = TorchOps().silu_mul(gate_up.float()).bfloat16()
    expected = fp8.round_rows(product, scale)
    assert_near(kernels.silu_mul_rounded(gate_up, scale), expected)
