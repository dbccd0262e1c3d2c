"""Finds every tensor that a model needs in its checkpoint, before the first is read."""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

from tridentlm.errors import InvalidRequest
from tridentlm.models.checkpoint import E4M3, Checkpoint, Stored
from tridentlm.models.config import ModelConfig, Shape
from tridentlm.models.weights import Part, layout

SHOWN = 3
"""Unused tensors that a warning names."""

_WRAPPED = re.compile(r"(?:model\.language_model|language_model\.model|language_model)\.(.+)")
_IN_LAYER = re.compile(r"\blayers\.(\d+)\..*\.(?:weight|bias)$")
_REDUNDANT = re.compile(r"lm_head\.weight|.*rotary_emb\.inv_freq")
"""Tied checkpoints may hold the head a second time; old ones keep the rotary frequencies."""

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """A part with the names in the checkpoint of its tensor and of its scales, if it has any."""

    part: Part
    tensor: str
    scale: str | None = None
    input_scale: str | None = None


def find_all(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, list[Piece]]:
    """The pieces of every weight of `weights.layout`.

    Raises InvalidRequest naming file and tensor for one that is missing, misshapen or of a dtype
    that can't be read, and for a weight or bias in a layer that the configuration does not have.
    Other tensors that nothing needs are warned of.
    """
    finder = _Finder(config, checkpoint)
    pieces = {key: [finder.piece(part) for part in parts] for key, parts in layout(config).items()}
    finder.conclude()
    return pieces


class _Finder:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self._config, self._checkpoint = config, checkpoint
        self._unused = {
            _plain_name(name) if config.is_wrapped else name: name for name in checkpoint.tensors
        }
        self._missing: list[str] = []

    def piece(self, part: Part) -> Piece:
        tensor, stored = self._take(part.name)
        if stored is None:
            return Piece(part, tensor)
        self._check_shape(tensor, stored, part.shape)
        return (
            self._quantized(part, tensor, stored)
            if stored.loads_as == E4M3
            else Piece(part, tensor)
        )

    def conclude(self) -> None:
        if self._missing:
            raise InvalidRequest(
                f"{self._checkpoint.where} lacks {len(self._missing)} tensors of the model, first "
                f"{self._missing[0]!r}.",
                param="model",
            )
        unused = [name for plain, name in self._unused.items() if self._is_surplus(plain)]
        strange = [name for name in unused if self._changes_output(name)]
        if strange:
            raise InvalidRequest(
                f"{self._checkpoint.where} has {len(strange)} tensors in its layers that the "
                f"configuration does not account for, first {strange[0]!r}; without them the "
                "model's answers would be wrong.",
                param="model",
            )
        if unused:
            logger.warning(
                "%d tensors of %s are not used: %s%s",
                len(unused),
                self._checkpoint.where,
                ", ".join(unused[:SHOWN]),
                ", .." if len(unused) > SHOWN else "",
            )

    def _quantized(self, part: Part, tensor: str, stored: Stored) -> Piece:
        quantization = self._config.quantization
        if quantization is None:
            raise InvalidRequest(
                f"Tensor {tensor!r} in {stored.file} is of type {stored.dtype}, and config.json "
                "has no quantization_config that says how it is scaled.",
                param="model",
            )
        module = part.name.removesuffix(".weight")
        scale, where = self._take(f"{module}.{quantization.scale}")
        if where is not None:
            expected = quantization.scale_shape(part.shape)
            is_one = quantization.strategy == "tensor" and where.shape in ((), (1,), (1, 1))
            is_flat = quantization.strategy == "channel" and where.shape == expected[:1]
            if not (is_one or is_flat):
                self._check_shape(scale, where, expected)
        if quantization.activations != "static":
            return Piece(part, tensor, scale)
        input_scale, where = self._take(module + ".input_scale")
        if where is not None and where.shape != ():
            self._check_shape(input_scale, where, (1,))
        return Piece(part, tensor, scale, input_scale)

    def _take(self, name: str) -> tuple[str, Stored | None]:
        """The tensor's name in the checkpoint, and what it is there; missing ones are noted."""
        found = self._unused.pop(name, None)
        if found is None:
            self._missing.append(name)
            return name, None
        stored = self._checkpoint.tensors[found]
        if stored.loads_as is None:
            raise InvalidRequest(
                f"Tensor {found!r} in {stored.file} is of type {stored.dtype}, which is not "
                "supported.",
                param="model",
            )
        return found, stored

    def _check_shape(self, name: str, stored: Stored, expected: Shape) -> None:
        if stored.shape != expected:
            raise InvalidRequest(
                f"Tensor {name!r} in {stored.file} has shape {stored.shape}; the model's "
                f"configuration makes it {expected}.",
                param="model",
            )

    def _changes_output(self, name: str) -> bool:
        """Whether it is a weight or a bias of a layer that is computed."""
        layer = _IN_LAYER.search(name)
        return layer is not None and int(layer[1]) < self._config.num_layers

    def _is_surplus(self, name: str) -> bool:
        # A model that wraps a language model has others beside it.
        is_ours = not self._config.is_wrapped or name.startswith("model.layers.")
        return is_ours and not _REDUNDANT.fullmatch(name)


def _plain_name(name: str) -> str:
    """The name in the language model alone of a tensor of a model that wraps one."""
    match = _WRAPPED.fullmatch(name)
    if match is None:
        return name
    rest = match[1]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"
