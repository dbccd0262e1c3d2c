"""GGUF files as checkpoints: tensors dequantized and renamed to the Hugging Face layout."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tridentlm.models.checkpoint import Stored
from tridentlm.models.config import ModelConfig
from tridentlm.models.gguf_header import GGUFTensor, read_header
from tridentlm.models.shard import Sliceable

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class GGUFModel:
    """A .gguf file: its `config`, and a `Checkpoint` of its tensors, in float32 as they are read.

    Raises ModelNotFound or InvalidRequest when it can't be read.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.where = path
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        factors = header.tensors.pop(_ROPE_FACTORS, None)
        self.config = ModelConfig.from_gguf(
            header.metadata,
            shapes,
            tuple(_InFile(path, factors)[:].tolist()) if factors else None,
        )
        self._pieces: dict[str, _InFile] = {}
        for tensor in header.tensors.values():
            for name, piece in _by_expert(tensor):
                self._pieces[name] = _InFile(path, piece, self._paired_rows(tensor.name))
        self.tensors = {
            name: Stored(
                piece.tensor.shape,
                piece.tensor.kind.name,
                torch.float32 if _can_dequantize(piece.tensor.kind) else None,
                path,
            )
            for name, piece in self._pieces.items()
        }

    def open(self, name: str) -> Sliceable:
        return self._pieces[name]

    def _paired_rows(self, name: str) -> int:
        """Rows of a head where the file keeps rotary pairs side by side, else 0."""
        is_rotated = name.split(".")[-2] in ("attn_q", "attn_k")
        return self.config.head_dim if self.config.family.gguf_permuted and is_rotated else 0


@dataclass(frozen=True, slots=True)
class _InFile:
    """A tensor that is read and dequantized as it is sliced; row slices read these rows alone.

    With `paired_rows` = d, rows 2i and 2i + 1 of each d, which form a rotary pair, are put where
    Hugging Face has them: i and i + d / 2. Slices are of whole heads then.
    """

    path: Path
    tensor: GGUFTensor
    paired_rows: int = 0

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        tensor = self.tensor
        if len(tensor.shape) == 1:
            return torch.from_numpy(self._read(0, 1)[0])[rows]
        start, stop, _ = rows.indices(tensor.shape[0])
        values = torch.from_numpy(self._read(start, stop - start))
        if self.paired_rows:
            pairs = values.view(-1, self.paired_rows // 2, 2, tensor.shape[1])
            values = pairs.transpose(1, 2).reshape(values.shape)
        return values[:, columns[0]] if columns else values

    def _read(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        size = self.tensor.row_bytes
        data = np.fromfile(
            self.path, np.uint8, count * size, offset=self.tensor.offset + start * size
        )
        values = gguf.quants.dequantize(data.reshape(count, size), self.tensor.kind)
        return np.ascontiguousarray(values, np.float32)


def _by_expert(tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
    """The tensor under its Hugging Face name; one of all experts falls into each expert's."""
    match = _TENSOR.fullmatch(tensor.name)
    layer, stem, kind = match.groups() if match else (None, tensor.name, None)
    if layer is None:
        yield f"{_GLOBAL_NAMES.get(stem, stem)}{f'.{kind}' if kind else ''}", tensor
        return
    name = f"model.layers.{layer}.{_LAYER_NAMES.get(stem, stem)}.{kind}"
    if "{}" not in name:
        yield name, tensor
        return
    experts, *shape = tensor.shape
    size = (tensor.end - tensor.offset) // experts
    for expert in range(experts):
        offset = tensor.offset + expert * size
        yield name.format(expert), GGUFTensor(tensor.name, tuple(shape), tensor.kind, offset)


@functools.cache
def _can_dequantize(kind: gguf.GGMLQuantizationType) -> bool:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    try:
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
