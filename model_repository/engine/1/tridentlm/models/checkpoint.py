"""Where weights come from: tensors by their Hugging Face names, read piece by piece."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tridentlm.errors import InvalidRequest, ModelNotFound
from tridentlm.models.shard import Sliceable

INDEX = "model.safetensors.index.json"
MAPPED_BYTES = 256 * 2**20
"""A shard is opened anew after so many bytes: what was read of a mapped file stays resident."""

E4M3 = torch.float8_e4m3fn
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": E4M3,
}
"""The tensors that can be loaded, by safetensors' name of their dtype."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in `file`; `dtype` is the format's own name of it.

    `loads_as`: what reading it gives, None: it cannot be read.
    """

    shape: tuple[int, ...]
    dtype: str
    loads_as: torch.dtype | None
    file: Path


class Checkpoint(Protocol):
    """Every tensor's place is known before the first is read."""

    @property
    def tensors(self) -> Mapping[str, Stored]: ...

    @property
    def where(self) -> Path:
        """What error messages call it."""
        ...

    def open(self, name: str) -> Sliceable:
        """The tensor, of which only what is sliced out is read. Slices may be views of a file."""
        ...


class SafetensorsFolder:
    """The .safetensors files of a Hugging Face folder: those that its index names, else all.

    Raises ModelNotFound for a missing file, InvalidRequest for one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        self.where = index if index.is_file() else folder
        self.tensors: dict[str, Stored] = {}
        self._file: Any = None
        self._path, self._mapped = Path(), 0
        if index.is_file():
            self._add_indexed(folder, _read_index(index))
        else:
            self._add_all(_shards(folder))

    def open(self, name: str) -> Sliceable:
        stored = self.tensors[name]
        if stored.file != self._path or self._mapped > MAPPED_BYTES:
            self._file = None  # unmaps the last one first
            self._file = _open(stored.file)
            self._path, self._mapped = stored.file, 0
        assert stored.loads_as is not None
        size = stored.loads_as.itemsize
        for length in stored.shape:
            size *= length
        self._mapped += size
        piece: Sliceable = self._file.get_slice(name)
        return piece

    def _add_all(self, paths: Iterable[Path]) -> None:
        for path in paths:
            for name, stored in _contents(path).items():
                if name in self.tensors:
                    raise InvalidRequest(
                        f"Tensor {name!r} is in {self.tensors[name].file} and in {path}, and no "
                        f"{INDEX} says which one counts.",
                        param="model",
                    )
                self.tensors[name] = stored

    def _add_indexed(self, folder: Path, weight_map: Mapping[str, str]) -> None:
        contents: dict[str, dict[str, Stored]] = {}
        for file in sorted(set(weight_map.values())):
            if not (folder / file).is_file():
                raise ModelNotFound(f"{folder} lacks {file}, named by its index.", param="model")
            contents[file] = _contents(folder / file)
        for name, file in weight_map.items():
            if name not in contents[file]:
                raise InvalidRequest(
                    f"{folder / file} lacks tensor {name!r}, which {INDEX} places there.",
                    param="model",
                )
            self.tensors[name] = contents[file][name]


class DummyCheckpoint:
    """Random weights in place of a file's: each depends on its name and the device alone.

    Norms are 1, biases 0 and matrices small, so that activations neither vanish nor overflow.
    `tensors` says which there are.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        self.where = Path("dummy weights")
        self._device = device
        self.tensors = {
            name: Stored(shape, str(dtype), dtype, self.where)
            for name, (shape, dtype) in tensors.items()
        }

    def open(self, name: str) -> Sliceable:
        stored = self.tensors[name]
        assert stored.loads_as is not None
        is_fp8 = stored.loads_as == E4M3
        dtype = torch.bfloat16 if is_fp8 else stored.loads_as
        tensor = torch.empty(stored.shape, dtype=dtype, device=self._device)
        if "_scale" in name:
            return tensor.fill_(0.02)
        if len(stored.shape) < 2:
            return tensor.fill_(0 if name.endswith("bias") else 1)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        tensor.normal_(0, 1 if is_fp8 else 0.02, generator=generator)
        return tensor.to(stored.loads_as)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{path} is no index: {error!r}.", param="model") from None


def _shards(folder: Path) -> list[Path]:
    if shards := sorted(folder.glob("*.safetensors")):
        return shards
    pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    hint = (
        f" {pickled[0].name} is not read, because a pickled file can run code as it is loaded: "
        "convert it to safetensors (save_pretrained of transformers writes them)."
        if pickled
        else ""
    )
    raise ModelNotFound(f"{folder} holds no .safetensors files.{hint}", param="model")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        damage = "is truncated" if "not fully covered" in str(error) else "cannot be read"
        raise InvalidRequest(f"{path} {damage}: {error}.", param="model") from error


def _contents(path: Path) -> dict[str, Stored]:
    shard = _open(path)
    found = {}
    for name in shard.keys():  # noqa: SIM118 (not a mapping)
        piece = shard.get_slice(name)
        dtype = piece.get_dtype()
        found[name] = Stored(tuple(piece.get_shape()), dtype, DTYPES.get(dtype), path)
    return found
