"""The FP8 kernels against their definitions in torch. Run with `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import pytest
import torch

from tridentlm.backends import fp8_kernels
from tridentlm.backends.base import Rounded
from tridentlm.models import fp8

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


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


@pytest.mark.parametrize("input_scale", [None, 0.02, 1e-4])
@pytest.mark.parametrize("shape", [(1, 4096), (7, 64), (9, 12288), (256, 4096), (5, 2560)])
def test_rows_are_rounded_bit_for_bit(shape: tuple[int, int], input_scale: float | None) -> None:
    x = numbers(*shape)
    scale = None if input_scale is None else torch.tensor([input_scale], device=DEVICE)
    expected = fp8.round_rows(x.cpu(), None if scale is None else scale.cpu())
    assert_same(fp8_kernels.round_rows(x, scale), expected)


@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_what_is_no_number_stays_none(input_scale: float | None) -> None:
    x = numbers(2, 64)
    x[0, 5] = torch.nan
    scale = None if input_scale is None else torch.tensor([input_scale], device=DEVICE)
    rounded = fp8_kernels.round_rows(x, scale).values.float()
    assert rounded[0, 5].isnan()
    assert rounded[1].isfinite().all()


@pytest.mark.parametrize("shape", [(6144, 2048), (301, 4096), (200, 12288)])
def test_a_product_of_one_row_is_that_of_its_numbers(shape: tuple[int, int]) -> None:
    x = fp8.round_rows(numbers(1, shape[1]), None)
    weight, scale = fp8.quantize_rows(numbers(*shape, seed=1).nan_to_num(0, 1, 1))
    y = fp8_kernels.scaled_vector_product(x, weight, scale, torch.bfloat16)
    exact = (x.values.double() * x.scales) @ (weight.double() * scale[:, None]).T
    torch.testing.assert_close(y, exact.bfloat16(), rtol=1e-2, atol=1e-3 * float(exact.std()))
