"""GGUF files: metadata, and tensors dequantized and renamed to the Hugging Face layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tridentlm.errors import InvalidRequest, ModelNotFound
from tridentlm.models.config import ModelConfig

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
}
_ROPE_FACTORS = "rope_freqs.weight"
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class GGUFModel:
    """An open .gguf file. Raises ModelNotFound or InvalidRequest when it can't be read."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ModelNotFound(f"{path} does not exist.", param="model")
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, OSError) as error:
            raise InvalidRequest(
                f"{path} is not a readable GGUF file: {error}.", param="model"
            ) from error
        metadata: dict[str, Any] = {
            name: field.contents()
            for name, field in self._reader.fields.items()
            if gguf.GGUFValueType.ARRAY not in field.types  # the vocabulary: large, not needed
        }
        shapes = {t.name: tuple(map(int, reversed(t.shape))) for t in self._reader.tensors}
        if "token_embd.weight" not in shapes:
            raise InvalidRequest(f"{path} holds no token embedding.", param="model")
        factors = next(
            (tuple(map(float, t.data)) for t in self._reader.tensors if t.name == _ROPE_FACTORS),
            None,
        )
        self.config = ModelConfig.from_gguf(metadata, shapes, factors)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor in float32 under its Hugging Face name."""
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_FACTORS:
                continue
            try:
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                raise InvalidRequest(
                    f"Quantization {tensor.tensor_type.name} of GGUF tensor {tensor.name!r} is not "
                    "supported.",
                    param="model",
                ) from None
            # Copies what is not quantized: the file is mapped read-only.
            values = np.require(values, np.float32, ("C", "W"))
            yield self._hf_name(tensor.name), torch.from_numpy(self._unpermute(tensor.name, values))

    def _hf_name(self, name: str) -> str:
        match = _TENSOR.fullmatch(name)
        if match is None:
            return name
        layer, stem, kind = match.groups()
        if layer is None:
            return f"{_GLOBAL_NAMES.get(stem, stem)}.{kind}"
        return f"model.layers.{layer}.{_LAYER_NAMES.get(stem, stem)}.{kind}"

    def _unpermute(self, name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Puts the rows of Llama's q and k back in the order of Hugging Face's rotary halves.

        In the file, rows 2i and 2i + 1 of a head form a rotary pair; here rows i and i + d / 2 do.
        """
        config = self.config
        stem = name.split(".")[-2]
        if not config.family.gguf_permuted or stem not in ("attn_q", "attn_k"):
            return values
        heads = config.num_heads if stem == "attn_q" else config.num_kv_heads
        pairs = values.reshape(heads, config.head_dim // 2, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
