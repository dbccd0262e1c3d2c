"""The header of a GGUF file: scalar metadata and where each tensor lies.

    "GGUF" version  counts | key type value .. | name dims type offset .. | padding | tensors

Arrays, the vocabulary above all, are passed over: reading a vocabulary takes seconds.
Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from tridentlm.errors import InvalidRequest, ModelNotFound

MAGIC, VERSIONS = b"GGUF", (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""How `struct` reads a value, by its type's number."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of `shape` (rows first, as in torch) that begins at byte `offset` of the file."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, along the last dimension."""
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // int(block) * int(size)

    @property
    def end(self) -> int:
        rows = 1
        for length in self.shape[:-1]:
            rows *= length
        return self.offset + rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFHeader:
    """Raises ModelNotFound without a file, InvalidRequest for one that is damaged or no GGUF."""
    if not path.is_file():
        raise ModelNotFound(f"{path} does not exist.", param="model")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            return _Reader(data, path).header()
    except struct.error:
        raise InvalidRequest(f"{path} is truncated: its header goes on.", param="model") from None
    except (ValueError, OSError) as error:
        raise InvalidRequest(
            f"{path} is not a readable GGUF file: {error}.", param="model"
        ) from error


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 4

    def header(self) -> GGUFHeader:
        version = self._one("I") if self._data[:4] == MAGIC else None
        if version not in VERSIONS:
            found = "it does not begin with GGUF" if version is None else f"version {version}"
            raise ValueError(found)
        tensor_count, key_count = self._one("Q"), self._one("Q")
        metadata = {}
        for _ in range(key_count):
            key, kind = self._string(), self._one("I")
            if kind == ARRAY:
                self._skip_array()
            else:
                metadata[key] = self._value(kind)
        listed = [self._tensor() for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT)) or DEFAULT_ALIGNMENT
        start = -(-self._at // alignment) * alignment
        placed = [self._placed(start, *tensor) for tensor in listed]
        return GGUFHeader(metadata, {tensor.name: tensor for tensor in placed})

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._one("I")
        lengths = tuple(self._one("Q") for _ in range(dimensions))
        return name, lengths[::-1], self._one("I"), self._one("Q")

    def _placed(
        self, start: int, name: str, shape: tuple[int, ...], number: int, offset: int
    ) -> GGUFTensor:
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"tensor {name!r} has the unknown type {number}") from None
        tensor = GGUFTensor(name, shape, kind, start + offset)
        if tensor.end > len(self._data):
            raise InvalidRequest(
                f"{self._path} is truncated: tensor {name!r} ends at byte {tensor.end}, the file "
                f"has {len(self._data)}.",
                param="model",
            )
        return tensor

    def _one(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._one("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode(errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind not in SCALARS:
            raise ValueError(f"a value has the unknown type {kind}")
        return self._one(SCALARS[kind])

    def _skip_array(self) -> None:
        kind, count = self._one("I"), self._one("Q")
        if kind == STRING:
            data, at, read = self._data, self._at, struct.Struct("<Q").unpack_from
            for _ in range(count):
                at += 8 + read(data, at)[0]
            self._at = at
        elif kind == ARRAY:
            for _ in range(count):
                self._skip_array()
        elif kind in SCALARS:
            self._at += count * struct.calcsize("<" + SCALARS[kind])
        else:
            raise ValueError(f"an array has the unknown type {kind}")
