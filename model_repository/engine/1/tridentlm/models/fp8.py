"""Products with FP8 (e4m3) weights: one scale per output, one per row of the input.

x [T, in] -> x8 = round(x / xs), xs [T, 1]          weight ~ w8 * ws, w8 [out, in], ws [out]
y = (x8 @ w8.T) * xs * ws
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from tridentlm.backends.base import Ops, Rounded
from tridentlm.models.linear import Linear

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SMALLEST_SCALE = 1e-12
MULTIPLE = 16
CAPABILITY = (8, 9)
"""The first CUDA architecture with FP8 products; their sizes are multiples of `MULTIPLE`."""


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each row of `values` [n, m] by a scale of its own: e4m3 [n, m] and float32 [n]."""
    rounded = round_rows(values, None)
    return rounded.values, rounded.scales[:, 0]


def round_rows(x: torch.Tensor, input_scale: torch.Tensor | None) -> Rounded:
    """See `Ops.round_rows`. What is too large becomes the largest number, not nan."""
    x = x.float()
    if input_scale is None:
        # torch multiplies by the inverse of a divisor on some devices, and divides on others.
        scales = x.abs().amax(1, keepdim=True).mul_(1 / LARGEST).clamp_(min=SMALLEST_SCALE)
    else:
        scales = input_scale.expand(len(x), 1).contiguous()
    return Rounded((x / scales).clamp_(-LARGEST, LARGEST).to(E4M3), scales)


class Fp8Linear:
    """`x @ weight.T + bias` for x [T, in]: both rounded to e4m3, the sum in float32.

    weight e4m3 [out, in], scale float32 [out], input_scale float32 [1] or None: one for each row,
    from its largest value. x and the result are in `dtype`. A device without such products has the
    weight dequantized to `dtype`, and multiplies the same numbers in it.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        ops: Ops,
    ) -> None:
        self.input_scale = input_scale
        self._bias, self._dtype, self._ops = bias, dtype, ops
        self._plain: Linear | None = None
        if has_products(weight):
            self._weight, self._scale = weight.contiguous(), scale
        else:
            self._plain = Linear((weight.float() * scale[:, None]).to(dtype), bias, ops.linear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_rounded(self._ops.round_rows(x, self.input_scale))

    def of_rounded(self, x: Rounded) -> torch.Tensor:
        """For x that is rounded already, by `input_scale`."""
        if self._plain is not None:
            return self._plain((x.values.float() * x.scales).to(self._dtype))
        y = self._ops.scaled_linear(x, self._weight, self._scale, self._dtype)
        return y if self._bias is None else y + self._bias


def after_norm(
    linear: Linear | Fp8Linear,
    ops: Ops,
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + delta, and `linear` of its norm."""
    if isinstance(linear, Fp8Linear):
        x, rounded = ops.add_rms_norm_rounded(x, delta, weight, eps, linear.input_scale)
        return x, linear.of_rounded(rounded)
    x, normed = ops.add_rms_norm(x, delta, weight, eps)
    return x, linear(normed)


def after_silu(linear: Linear | Fp8Linear, ops: Ops, gate_up: torch.Tensor) -> torch.Tensor:
    """`linear` of silu(gate) * up."""
    if isinstance(linear, Fp8Linear):
        return linear.of_rounded(ops.silu_mul_rounded(gate_up, linear.input_scale))
    return linear(ops.silu_mul(gate_up))


def scaled_product(
    x: Rounded, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See `Ops.scaled_linear`."""
    # Products by row and column scales are given in bfloat16 alone on a GPU. Hopper's fast sums
    # keep 14 bits: an error of a thousandth, where e4m3 itself rounds by a fortieth.
    y = torch._scaled_mm(
        x.values,
        weight.t(),
        scale_a=x.scales,
        scale_b=scale[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return y.to(dtype)


def has_products(weight: torch.Tensor) -> bool:
    """Whether the weight's device multiplies e4m3 numbers of its sizes."""
    return has_units(weight.device) and not any(size % MULTIPLE for size in weight.shape)


def has_units(device: torch.device) -> bool:
    """Whether the device multiplies e4m3 numbers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def held_bytes(weight: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes that a loaded weight takes once it is part of a model that computes in `dtype`."""
    is_dequantized = weight.dtype == E4M3 and not has_products(weight)
    return weight.numel() * dtype.itemsize if is_dequantized else weight.nbytes


def expand_blocks(
    scales: torch.Tensor, block: tuple[int, int], rows: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """The scale of each number at `rows` x `columns` of a weight whose blocks have `scales`."""
    return scales[rows // block[0]][:, columns // block[1]]


def make_linear(
    weights: MutableMapping[str, torch.Tensor],
    prefix: str,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    ops: Ops,
) -> Linear | Fp8Linear:
    """The linear layer of `<prefix>weight`, and `<prefix>scale` and `input_scale` if there are any,
    which are taken out of `weights`. Its result is in `dtype`."""
    weight, scale = weights.pop(prefix + "weight"), weights.pop(prefix + "scale", None)
    if scale is None:
        return Linear(weight, bias, ops.linear)
    input_scale = weights.pop(prefix + "input_scale", None)
    return Fp8Linear(weight, scale, input_scale, bias, dtype, ops)
