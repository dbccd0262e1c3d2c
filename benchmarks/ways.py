"""The ways of computing a matrix product that `benchmarks.products` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tridentlm.backends.base import Rounded
from tridentlm.models.fp8 import quantize_rows, round_rows, scaled_product

PREFILL_ROWS = 8192

Call = Callable[[], torch.Tensor]


class Plain:
    """x @ weight.T for distinct weights, in bfloat16 (on a CPU in float32)."""

    itemsize = 2

    def __init__(self, outputs: int, inputs: int, copies: int, device: torch.device) -> None:
        self._device = device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = (outputs, inputs)
        self._weights = [
            torch.randn(size, device=device, dtype=self._dtype) / inputs**0.5 for _ in range(copies)
        ]

    def ways(self, rows: int) -> Iterator[tuple[str, list[Call]]]:
        """Calls of each way, the library's own choice first."""
        inputs = self._weights[0].shape[1]
        x = torch.randn(rows, inputs, device=self._device, dtype=self._dtype)
        yield "library", [partial(F.linear, x, weight) for weight in self._weights]
        for multiple in (16, 64, 128, 256):
            if rows % multiple and rows < PREFILL_ROWS:
                more = F.pad(x, (0, 0, 0, -rows % multiple))
                yield f"padded to {multiple}", [partial(F.linear, more, w) for w in self._weights]
        if self._device.type == "cpu":
            return
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        yield "cublaslt", [partial(F.linear, x, weight) for weight in self._weights]
        torch.backends.cuda.preferred_blas_library(before)
        sums = torch.backends.cuda.matmul
        sums.allow_bf16_reduced_precision_reduction = False
        yield "exact sums", [partial(F.linear, x, weight) for weight in self._weights]
        sums.allow_bf16_reduced_precision_reduction = True
        from tridentlm.backends.kernels import INPUT_BLOCK, vector_product

        if rows == 1 and inputs % INPUT_BLOCK == 0:
            yield "vector", [partial(vector_product, x, weight) for weight in self._weights]


class Fp8:
    """The same with e4m3 weights and inputs that are rounded already."""

    itemsize = 1

    def __init__(self, outputs: int, inputs: int, copies: int, device: torch.device) -> None:
        self._device = device
        size = (outputs, inputs)
        self._weights = [
            quantize_rows(torch.randn(size, device=device) / inputs**0.5) for _ in range(copies)
        ]

    def ways(self, rows: int) -> Iterator[tuple[str, list[Call]]]:
        inputs = self._weights[0][0].shape[1]
        numbers = torch.randn(rows, inputs, device=self._device)
        x = round_rows(numbers, None)
        yield "library", self._calls(scaled_product, x)
        for multiple in (32, 64, 128, 256):
            if rows % multiple and rows < PREFILL_ROWS:
                more = round_rows(F.pad(numbers, (0, 0, 0, -rows % multiple)), None)
                yield f"padded to {multiple}", self._calls(scaled_product, more)
        if self._device.type == "cpu":
            return
        yield "exact sums", self._calls(exact_sums, x)
        from tridentlm.backends.fp8_kernels import INPUT_BLOCK, scaled_vector_product
        from tridentlm.backends.fp8_product import few_rows_product

        if few_rows_product(x, *self._weights[0], torch.bfloat16) is not None:
            yield "ours", self._calls(few_rows_product, x)
        if rows == 1 and inputs % INPUT_BLOCK == 0:
            yield "vector", self._calls(scaled_vector_product, x)

    def _calls(self, way: Callable[..., Any], x: Rounded) -> list[Call]:
        return [partial(way, x, w, scale, torch.bfloat16) for w, scale in self._weights]


def exact_sums(
    x: Rounded, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    y: torch.Tensor = torch._scaled_mm(
        x.values, weight.t(), scale_a=x.scales, scale_b=scale[None], out_dtype=dtype
    )
    return y
