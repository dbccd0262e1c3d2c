from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.models.conftest import Reference
from tests.models.test_gguf import write_gguf
from tridentlm.errors import InvalidRequest, ModelNotFound
from tridentlm.models import loading
from tridentlm.models.gguf import GGUFModel
from tridentlm.models.gguf_header import read_header

Q8 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """One value of each type, arrays among them, and tensors in three forms."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"x.{kind}", 100)
    writer.add_float32("x.float32", 0.5)
    writer.add_float64("x.float64", 0.25)
    writer.add_bool("x.bool", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "日本", "d" * 300])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5, 2.5])
    writer.add_array("tokenizer.ggml.merges", ["a b"] * 40)
    writer.add_string("x.last", "Größe")
    rng = np.random.default_rng(0)
    writer.add_tensor("plain", rng.normal(size=(3, 5)).astype(np.float32))
    writer.add_tensor("half", rng.normal(size=7).astype(np.float16))
    values = gguf.quants.quantize(rng.normal(size=(2, 4, 64)).astype(np.float32), Q8)
    writer.add_tensor("eight", values, raw_dtype=Q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_header_says_what_the_gguf_package_says(path: Path) -> None:
    header, reader = read_header(path), gguf.GGUFReader(path)
    scalars = {
        name: field.contents()
        for name, field in reader.fields.items()
        if gguf.GGUFValueType.ARRAY not in field.types and not name.startswith("GGUF.")
    }
    assert header.metadata == scalars
    assert {
        name: (tensor.shape, tensor.kind, tensor.offset, tensor.end)
        for name, tensor in header.tensors.items()
    } == {
        tensor.name: (
            tuple(tensor.shape[::-1].tolist()),
            tensor.tensor_type,
            tensor.data_offset,
            tensor.data_offset + tensor.n_bytes,
        )
        for tensor in reader.tensors
    }


def test_a_truncated_file_is_named_wherever_it_ends(path: Path) -> None:
    data = path.read_bytes()
    header_size = min(tensor.offset for tensor in read_header(path).tensors.values())
    for size in (*range(4, header_size, 97), header_size + 1, len(data) - 200):
        path.write_bytes(data[:size])
        with pytest.raises(InvalidRequest, match=r"m\.gguf is truncated"):
            read_header(path)
    path.write_bytes(data[:-200])
    with pytest.raises(InvalidRequest, match=r"tensor 'eight' ends at byte \d+, the file has \d+"):
        read_header(path)


def test_what_is_no_gguf_file_is_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    for change, reason in (
        (b"NOPE" + data[4:], "does not begin with GGUF"),
        (data[:4] + b"\x01\0\0\0" + data[8:], "version 1"),
        (data[:4] + b"\0\0\0\x03" + data[8:], "version 50331648"),  # big-endian
        (b"", "empty"),
    ):
        path.write_bytes(change)
        with pytest.raises(InvalidRequest, match=rf"m\.gguf is not a readable GGUF.*{reason}"):
            read_header(path)
    with pytest.raises(ModelNotFound):
        read_header(tmp_path / "none.gguf")


def test_types_that_are_not_known_are_named(path: Path) -> None:
    data = path.read_bytes()
    kind = int(Q8).to_bytes(4, "little")
    at = data.index(kind, data.index(b"eight") + 5 + 4 + 3 * 8)
    path.write_bytes(data[:at] + (77).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(InvalidRequest, match="tensor 'eight' has the unknown type 77"):
        read_header(path)
    at = data.index(b"x.bool") + 6
    path.write_bytes(data[:at] + (55).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(InvalidRequest, match="a value has the unknown type 55"):
        read_header(path)


def test_a_tensor_of_a_form_that_cannot_be_dequantized_is_named(
    tiny: Reference, tmp_path: Path
) -> None:
    path = write_gguf(tiny, tmp_path / "m.gguf")
    data = path.read_bytes()
    at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    path.write_bytes(data[:at] + (26).to_bytes(4, "little") + data[at + 4 :])
    model = GGUFModel(path)
    with pytest.raises(InvalidRequest, match=r"'model\.norm\.weight' in .*m\.gguf is of type I32"):
        loading.load(model.config, model, torch.float32, torch.device("cpu"))


def test_a_file_without_an_embedding_is_no_model(path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no token embedding"):
        GGUFModel(path)
