"""A matrix product with a constant weight, in the fastest form the device has."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

PACKED_ROWS = 64
"""Rows of input that MKL lays a packed weight out for. Measured on AVX-512 for 1 to 256 rows: 64 is
the fastest choice at every size (a pass over a 135M model at 8 rows: 30 ms against 44 unpacked)."""


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Linear:
    """`x @ weight.T + bias` for x [T, in], weight [out, in]; the result is [T, out].

    `product` computes that from x, weight and bias. On a CPU in float32 the weight is kept only in
    MKL's packed layout, so that a decode step streams it from memory in the order in which the
    kernel consumes it.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, product: Product = F.linear
    ) -> None:
        self.bias, self._product = bias, product
        self.weight = weight.contiguous()
        self._packed = _pack(self.weight)
        if self._packed is not None:
            # The operator asks this tensor for its shape alone; it needs no memory of its own.
            self.weight = weight.new_zeros(()).expand(weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return self._product(x, self.weight, self.bias)
        return _packed_linear(x, self._packed, self.weight, self.bias)


def _packed_linear(
    x: torch.Tensor, packed: torch.Tensor, shape: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkl._mkl_linear(x, packed, shape, bias, x.shape[0])
    return result


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """The packed weight, or None where the device, the dtype or the torch build has none."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    return _mkl_pack(weight) if _packing_works(*weight.shape) else None


def _mkl_pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_ROWS)
    return packed


@functools.cache
def _packing_works(outputs: int, inputs: int) -> bool:
    """Whether a packed weight of this shape gives right products for any number of rows.

    MKL does not promise that one layout serves every number, so each shape is tried once.
    """
    # The C++ names of the two libraries; torch builds for other processors lack them.
    if not (torch._C.has_mkl and torch._C._has_mkldnn):
        return False
    weight = torch.linspace(-1, 1, outputs * inputs).view(outputs, inputs).sin_()
    packed = _mkl_pack(weight)
    rows = torch.linspace(-1, 1, 3 * inputs).view(3, inputs)
    return all(
        torch.allclose(_packed_linear(x, packed, weight, None), F.linear(x, weight), 1e-3, 1e-3)
        for x in (rows[:1], rows)
    )
