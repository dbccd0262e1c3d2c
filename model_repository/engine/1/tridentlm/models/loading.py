"""From a checkpoint to the weights of a `Decoder`, one tensor at a time.

Each weight is made at its final size on the device, and its parts are read straight into place:

    file        q_proj   k_proj   v_proj          (of each, this rank's rows or columns alone)
                   |        |        |
    device      [  q    |   k    |   v   ]        qkv.weight
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tridentlm.errors import InvalidRequest
from tridentlm.models.checkpoint import E4M3, Checkpoint, DummyCheckpoint
from tridentlm.models.config import ModelConfig, Shape
from tridentlm.models.fp8 import expand_blocks, has_products, quantize_rows
from tridentlm.models.inventory import Piece, find_all
from tridentlm.models.quant import Quantization
from tridentlm.models.shard import Shard, Sliceable, Split
from tridentlm.models.weights import WHOLE, Part, is_linear, layout

PROGRESS_SECONDS = 1.0

logger = logging.getLogger(__name__)


def load(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    shard: Shard = WHOLE,
    quantize: bool = False,
) -> dict[str, torch.Tensor]:
    """`shard`'s part of the weights of `weights.layout`, in `dtype` on `device`.

    A linear layer with FP8 weights and one scale per tensor or output has `<name>.weight` in e4m3,
    `<name>.scale` (float32 [out]), and with static activations `<name>.input_scale` (float32 [1]).
    Other FP8 tensors are dequantized. `quantize`: linear layers of a checkpoint without FP8 weights
    are rounded to that form as they are read, by one scale per output.

    Raises InvalidRequest as `inventory.find_all` does.
    """
    if quantize and config.experts is not None:
        raise InvalidRequest(
            "quantize is 'fp8'; a mixture of experts is not quantized as it is loaded.",
            param="quantize",
        )
    pieces = find_all(config, checkpoint)
    fill = _Filler(
        checkpoint, config.quantization, dtype, device, shard, sum(map(len, pieces.values()))
    )
    quantize = quantize and config.quantization is None
    merged: dict[str, torch.Tensor] = {}
    for name, parts in pieces.items():
        if _stays_fp8(name, parts, config.quantization, quantize):
            merged |= fill.fp8(name.removesuffix("weight"), parts)
        else:
            merged[name] = fill.plain(parts)
    fill.progress.log()
    if config.quantization or quantize:
        _tell_form(merged, dtype)
    return merged


def dummy(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DummyCheckpoint:
    """Random weights for `config`, FP8 ones where its checkpoints have them."""
    quantization = config.quantization
    tensors: dict[str, tuple[Shape, torch.dtype]] = {}
    for key, parts in layout(config).items():
        for name, shape, _ in parts:
            tensors[name] = (shape, dtype)
            module = name.removesuffix(".weight")
            if quantization and key.endswith(".weight") and not quantization.ignores(module):
                tensors[name] = (shape, E4M3)
                scales = quantization.scale_shape(shape)
                tensors[f"{module}.{quantization.scale}"] = (scales, torch.float32)
                if quantization.activations == "static":
                    tensors[f"{module}.input_scale"] = ((1,), torch.float32)
    return DummyCheckpoint(tensors, device)


def _tell_form(merged: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Logs what becomes of FP8 weights, which many devices and forms of scales do not keep."""
    linears = [tensor for name, tensor in merged.items() if is_linear(name)]
    kept = sum(tensor.dtype == E4M3 and has_products(tensor) for tensor in linears)
    name = str(dtype).removeprefix("torch.")
    logger.info(
        "FP8: %d of %d linear layers are computed in e4m3, the others' weights take their size in "
        "%s",
        kept,
        len(linears),
        name,
    )


def _stays_fp8(
    name: str, pieces: Iterable[Piece], quantization: Quantization | None, quantize: bool
) -> bool:
    """Whether a weight is kept in e4m3: if all its parts have one scale per row, or get one."""
    if not is_linear(name):
        return False
    if quantization is None:
        return quantize
    return quantization.by_row and all(piece.scale for piece in pieces)


class _Filler:
    """Makes weights and fills them with the part of their tensors that `shard` holds."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantization: Quantization | None,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        count: int,
    ) -> None:
        self._checkpoint, self._quantization = checkpoint, quantization
        self._dtype, self._device, self._shard = dtype, device, shard
        self.progress = _Progress(count)

    def plain(self, pieces: list[Piece]) -> torch.Tensor:
        """The weight stacked from `pieces`, in the compute dtype."""
        weight, places = self._make(pieces, self._dtype)
        for piece, place in zip(pieces, places, strict=True):
            weight[place].copy_(self._values(piece))
        return weight

    def fp8(self, prefix: str, pieces: list[Piece]) -> dict[str, torch.Tensor]:
        """The weight in e4m3, a scale for each of its rows, and that of its input if there is one.

        Parts that share an input have one scale for it, the largest, so that none overflows.
        """
        weight, places = self._make(pieces, E4M3)
        scale = torch.empty(len(weight), dtype=torch.float32, device=self._device)
        for piece, place in zip(pieces, places, strict=True):
            if piece.scale is None:
                rounded, scale[place] = quantize_rows(self._values(piece))
                weight[place].copy_(rounded)
            else:
                weight[place].copy_(self._take(piece))
                scale[place] = self._row_scales(piece.part, piece.scale)
        made = {prefix + "weight": weight, prefix + "scale": scale}
        inputs = [self._scales(piece.input_scale) for piece in pieces if piece.input_scale]
        if inputs:
            made[prefix + "input_scale"] = torch.cat(inputs).amax().reshape(1)
        return made

    def _make(self, pieces: list[Piece], dtype: torch.dtype) -> tuple[torch.Tensor, list[slice]]:
        """An empty weight and where in its rows each piece belongs."""
        shapes = [
            tuple(len(self._indices(piece.part, dim)) for dim in range(len(piece.part.shape)))
            for piece in pieces
        ]
        places, start = [], 0
        for rows, *_ in shapes:
            places.append(slice(start, start + rows))
            start += rows
        weight = torch.empty((start, *shapes[0][1:]), dtype=dtype, device=self._device)
        return weight, places

    def _values(self, piece: Piece) -> torch.Tensor:
        """What this rank takes of the piece, dequantized if it must be."""
        values = self._take(piece)
        if piece.scale is None:
            return values
        assert self._quantization is not None
        block = self._quantization.block
        if block is None:
            scales = self._row_scales(piece.part, piece.scale)[:, None]
        else:
            rows, columns = (self._indices(piece.part, dim) for dim in range(2))
            scales = expand_blocks(self._scales(piece.scale), block, rows, columns)
        return values.to(torch.float32).mul_(scales)

    def _take(self, piece: Piece) -> torch.Tensor:
        part, source = piece.part, self._checkpoint.open(piece.tensor)
        is_fp8 = self._checkpoint.tensors[piece.tensor].loads_as == E4M3
        if is_fp8:
            source = _Bytes(source)
        values = self._shard.take(source, part.shape, part.split)
        self.progress.add(values.nbytes)
        return (values.view(E4M3) if is_fp8 else values).to(self._device)

    def _row_scales(self, part: Part, name: str) -> torch.Tensor:
        """One scale for each row that this rank takes of the part."""
        scales, rows = self._scales(name).flatten(), self._indices(part, 0)
        return scales.expand(len(rows)) if len(scales) == 1 else scales[rows]

    def _scales(self, name: str) -> torch.Tensor:
        scales = self._checkpoint.open(name)[...].to(self._device, torch.float32)
        return scales if scales.dim() else scales.reshape(1)

    def _indices(self, part: Part, dim: int) -> torch.Tensor:
        """The rows (`dim` 0) or columns that this rank takes of the part; 0 stands for padding."""
        indices, size = torch.arange(part.shape[dim]), part.shape[dim]
        if part.split is not None and part.split.dim == dim:
            indices = self._shard.take(indices, (size,), Split(0, part.split.pieces))
        return indices.to(self._device)


class _Bytes:
    """A tensor of e4m3 numbers as bytes, which can be padded; a zero byte is 0."""

    def __init__(self, source: Sliceable) -> None:
        self._source = source

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        return self._source[index].view(torch.uint8)


class _Progress:
    """Logs how far the load has come, at most once in PROGRESS_SECONDS."""

    def __init__(self, count: int) -> None:
        self._count, self._done, self._bytes = count, 0, 0
        self._started = self._logged = time.monotonic()

    def add(self, nbytes: int) -> None:
        self._done += 1
        self._bytes += nbytes
        if time.monotonic() - self._logged >= PROGRESS_SECONDS:
            self.log()

    def log(self) -> None:
        self._logged = time.monotonic()
        logger.info(
            "Weights: %d of %d tensors, %.2f GB, %.1f s",
            self._done,
            self._count,
            self._bytes / 1e9,
            self._logged - self._started,
        )
