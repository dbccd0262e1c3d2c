"""How a checkpoint's linear layers are quantized, from config.json's `quantization_config`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tridentlm.errors import InvalidRequest

WORKS = (
    "quant_method 'fp8' (e4m3; one scale per tensor, or weight_block_size), 'compressed-tensors' "
    "in format 'float-quantized' (8 bits; one scale per tensor, channel or block), and "
    "quantize=fp8 for checkpoints that are not quantized"
)

Strategy = Literal["tensor", "channel", "block"]
Activations = Literal["dynamic", "static", "none"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """FP8 (e4m3) linear layers. `module.weight` has its scales in `module.<scale>`:

    strategy "tensor": one; "channel": one per output, [out, 1]; "block": one per `block` of
    outputs x inputs, [ceil(out / block[0]), ceil(in / block[1])]. A weight is value * scale.

    `activations`: rounded to e4m3 too, by one scale per token ("dynamic") or by the layer's
    `input_scale` ("static"), or kept as they are. Blocks' are kept. `ignored` modules are not
    quantized.
    """

    strategy: Strategy
    scale: str
    block: tuple[int, int] | None = None
    activations: Activations = "dynamic"
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_hf(cls, values: Mapping[str, Any] | None) -> Quantization | None:
        """From `quantization_config`; None without one.

        Raises InvalidRequest, naming what works, for any other method.
        """
        if not values:
            return None
        method = values.get("quant_method")
        if method == "fp8":
            return cls._from_fp8(values)
        if method == "compressed-tensors":
            return cls._from_compressed_tensors(values)
        raise _unsupported(f"quant_method {method!r}")

    @classmethod
    def _from_fp8(cls, values: Mapping[str, Any]) -> Quantization:
        if values.get("fmt", "e4m3") != "e4m3":
            raise _unsupported(f"fmt {values['fmt']!r}")
        ignored = values.get("modules_to_not_convert") or values.get("ignored_layers") or ()
        activations = values.get("activation_scheme", "dynamic")
        if activations not in ("dynamic", "static"):
            raise _unsupported(f"activation_scheme {activations!r}")
        if (size := values.get("weight_block_size")) is None:
            return cls("tensor", "weight_scale", None, activations, tuple(ignored))
        return cls("block", "weight_scale_inv", _block(size), "none", tuple(ignored))

    @classmethod
    def _from_compressed_tensors(cls, values: Mapping[str, Any]) -> Quantization:
        groups = list((values.get("config_groups") or {}).values())
        if values.get("format") != "float-quantized" or len(groups) != 1:
            raise _unsupported(f"{len(groups)} groups in format {values.get('format')!r}")
        weights = groups[0].get("weights") or {}
        kind = (weights.get("type"), weights.get("num_bits"))
        strategy = weights.get("strategy")
        if kind != ("float", 8) or strategy not in ("tensor", "channel", "block"):
            raise _unsupported(f"weights of type {kind[0]}{kind[1]} by {strategy}")
        ignored = tuple(values.get("ignore") or ())
        if strategy == "block":
            size = _block(weights.get("block_structure"))
            return cls(strategy, "weight_scale", size, "none", ignored)
        activations = _activations(groups[0].get("input_activations"))
        return cls(strategy, "weight_scale", None, activations, ignored)

    @property
    def by_row(self) -> bool:
        """Whether a layer can be computed in e4m3 with one scale per row; others are dequantized
        as they are loaded."""
        return self.block is None and self.activations != "none"

    def ignores(self, module: str) -> bool:
        """Whether `module` (a dotted name) or what it is part of is in the ignore list, which may
        hold last names alone, and patterns after `re:`."""
        for entry in self.ignored:
            if entry.startswith("re:"):
                if re.match(entry[3:], module):
                    return True
            elif f".{module}.".startswith(f".{entry}.") or module.endswith("." + entry):
                return True
        return False

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a weight of `shape` [out, in]."""
        if self.strategy == "tensor":
            return (1,)
        if self.block is None:
            return (shape[0], 1)
        return (-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1]))


def _activations(values: Mapping[str, Any] | None) -> Activations:
    if not values:
        return "none"
    kind = (values.get("type"), values.get("num_bits"))
    strategy, is_dynamic = values.get("strategy"), values.get("dynamic")
    if kind == ("float", 8) and strategy in ("token", "tensor"):
        if is_dynamic is True:
            return "dynamic"
        if is_dynamic is False and strategy == "tensor":
            return "static"
    raise _unsupported(f"input_activations of type {kind[0]}{kind[1]} by {strategy}")


def _block(size: Any) -> tuple[int, int]:
    if not (
        isinstance(size, (list, tuple))
        and len(size) == 2
        and all(isinstance(n, int) and n > 0 for n in size)
    ):
        raise _unsupported(f"block size {size!r}")
    return size[0], size[1]


def _unsupported(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"quantization_config: {what} is not supported. What works: {WORKS}.", param="model"
    )
