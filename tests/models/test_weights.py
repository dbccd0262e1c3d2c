from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.conftest import Reference, load
from tests.models.plans import Chunk
from tridentlm.errors import InvalidRequest, ModelNotFound
from tridentlm.models import checkpoint, inventory, loading, weights
from tridentlm.models.checkpoint import SafetensorsFolder
from tridentlm.models.config import ModelConfig
from tridentlm.models.linear import Linear
from tridentlm.models.shard import Shard

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors(tiny: Reference) -> Tensors:
    return load_file(tiny.folder / "model.safetensors")


def write(folder: Path, like: Path, *files: Tensors, index: bool = False) -> Path:
    """A folder with `like`'s config.json and one safetensors file of each group of tensors."""
    folder.mkdir(exist_ok=True)
    shutil.copy(like / "config.json", folder)
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"{number}.safetensors")
    if index:
        places = {name: f"{n}.safetensors" for n, tensors in enumerate(files) for name in tensors}
        (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


def read(folder: Path, dtype: torch.dtype = torch.float32, shard: Shard = weights.WHOLE) -> Tensors:
    config = ModelConfig.from_folder(folder)
    return loading.load(config, SafetensorsFolder(folder), dtype, CPU, shard=shard)


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = sorted(tensors)
    return {n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}


@pytest.mark.parametrize("index", [True, False], ids=["index", "no-index"])
def test_shards_load_like_one_file(
    tiny: Reference, tensors: Tensors, tmp_path: Path, index: bool
) -> None:
    folder = write(tmp_path / "shards", tiny.folder, *halves(tensors), index=index)
    if index:
        save_file({"stray": torch.zeros(1)}, folder / "9.safetensors")  # not in the index
    chunk = Chunk(0, [5, 6, 7])
    sharded = type(tiny)(folder, tiny.model).engine().logits(chunk)
    assert torch.equal(sharded, tiny.engine().logits(chunk))


def test_every_weight_is_stacked_from_its_parts(tiny: Reference, tensors: Tensors) -> None:
    config = ModelConfig.from_folder(tiny.folder)
    made = read(tiny.folder)
    for key, parts in weights.layout(config).items():
        assert torch.equal(made.pop(key), torch.cat([tensors[part.name] for part in parts]))
    assert not made


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_parts_that_make_the_whole(tiny: Reference, size: int) -> None:
    whole = read(tiny.folder)
    ranks = [read(tiny.folder, shard=Shard(rank, size)) for rank in range(size)]
    rows = torch.cat([rank["embedding"] for rank in ranks])[: len(whole["embedding"])]
    assert torch.equal(rows, whole["embedding"])
    down = torch.cat([rank["layers.1.down.weight"] for rank in ranks], 1)
    assert torch.equal(down, whole["layers.1.down.weight"])
    gates = [rank["layers.0.gate_up.weight"].chunk(2) for rank in ranks]
    assert torch.equal(
        torch.cat([side[n] for n in (0, 1) for side in gates]), whole["layers.0.gate_up.weight"]
    )


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_dtype_asked_for(
    tiny: Reference, tensors: Tensors, tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    folder = write(tmp_path, tiny.folder, {n: t.to(stored) for n, t in tensors.items()})
    made = read(folder, dtype)
    assert {tensor.dtype for tensor in made.values()} == {dtype}
    expected = tensors["model.layers.0.mlp.down_proj.weight"].to(stored).to(dtype)
    assert torch.equal(made["layers.0.down.weight"], expected)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lacks 1 .*layers.1.mlp.up_proj"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"norm.weight.*0\.safe.*\(3,\)"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}),
            r"norm.weight.*0\.safetensors is of type I32",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
            r"norm.weight.*0\.safetensors.*no quantization_config",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.bias": torch.ones(96)}),
            r"1 tensors in its layers .*first 'model.layers.1.mlp.up_proj.bias'",
        ),
    ],
    ids=["missing", "misshapen", "integers", "unscaled-fp8", "undeclared-bias"],
)
def test_a_wrong_tensor_is_named(
    tiny: Reference,
    tensors: Tensors,
    tmp_path: Path,
    damage: Callable[[Tensors], None],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage(tensors)
    folder = write(tmp_path, tiny.folder, tensors)
    monkeypatch.setattr(SafetensorsFolder, "open", pytest.fail)  # found before anything is read
    with pytest.raises(InvalidRequest, match=named):
        read(folder)


def test_a_tensor_that_nothing_needs_is_warned_of(
    tiny: Reference, tensors: Tensors, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(12)
        assert set(read(write(tmp_path / "quiet", tiny.folder, tensors))) == set(
            weights.layout(ModelConfig.from_folder(tiny.folder))
        )
        assert not caplog.messages
        for layer in range(inventory.SHOWN + 1):
            tensors[f"model.layers.{90 + layer}.odd.weight"] = torch.ones(3)
        read(write(tmp_path / "loud", tiny.folder, tensors))
    (message,) = caplog.messages
    assert "4 tensors" in message
    assert str(tmp_path / "loud") in message
    assert "model.layers.90.odd.weight" in message


def test_the_language_model_is_found_in_a_larger_one(
    tiny: Reference, tensors: Tensors, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = json.loads((tiny.folder / "config.json").read_text())
    expected = read(tiny.folder)
    with caplog.at_level(logging.WARNING):
        for number, prefix in enumerate(("model.language_model.", "language_model.model.")):
            named = {n.replace("model.", prefix, 1): t for n, t in tensors.items()}
            named["model.visual.patch.weight"] = torch.ones(3)
            folder = write(tmp_path / str(number), tiny.folder, named)
            outer = {"text_config": values, "tie_word_embeddings": values["tie_word_embeddings"]}
            (folder / "config.json").write_text(json.dumps(outer))
            made = read(folder)
            assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    assert not caplog.messages


def test_folders_without_readable_safetensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no \.safetensors files\.$"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"pytorch_model\.bin is not read.*convert"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InvalidRequest, match=r"model\.safetensors cannot be read"):
        SafetensorsFolder(tmp_path)


def test_a_damaged_file_is_named(tiny: Reference, tmp_path: Path) -> None:
    data = (tiny.folder / "model.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(data[:-100])
    with pytest.raises(InvalidRequest, match=r"a\.safetensors is truncated"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(data.replace(b'"F32"', b'"F31"', 1))
    with pytest.raises(InvalidRequest, match=r"a\.safetensors cannot be read.*F31"):
        SafetensorsFolder(tmp_path)


def test_an_index_that_does_not_fit_the_files_is_refused(
    tiny: Reference, tensors: Tensors, tmp_path: Path
) -> None:
    folder = write(tmp_path, tiny.folder, *halves(tensors), index=True)
    index = folder / checkpoint.INDEX
    places = json.loads(index.read_text())["weight_map"]
    name = next(iter(halves(tensors)[1]))
    index.write_text(json.dumps({"weight_map": places | {name: "0.safetensors"}}))
    with pytest.raises(InvalidRequest, match=rf"0\.safetensors lacks tensor '{name}'"):
        SafetensorsFolder(folder)
    index.write_text(json.dumps({"weight_map": places | {name: "7.safetensors"}}))
    with pytest.raises(ModelNotFound, match=r"lacks 7\.safetensors, named by its index"):
        load(folder)
    index.write_text('{"weights": 1}')
    with pytest.raises(InvalidRequest, match="is no index"):
        SafetensorsFolder(folder)
    index.unlink()
    save_file({name: tensors[name]}, folder / "2.safetensors")
    with pytest.raises(InvalidRequest, match=rf"'{name}' is in .*1\.safe.* and in .*2\.safe"):
        SafetensorsFolder(folder)


def test_files_are_opened_anew_as_they_are_read(
    tiny: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what was read does not stay in memory; and not for every tensor."""
    expected, opened = read(tiny.folder), []
    real = checkpoint._open
    monkeypatch.setattr(checkpoint, "_open", lambda path: opened.append(path) or real(path))
    for limit in (10**12, 0, 50_000):
        monkeypatch.setattr(checkpoint, "MAPPED_BYTES", limit)
        made = read(tiny.folder)
        assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    layout = weights.layout(ModelConfig.from_folder(tiny.folder))
    once, each = 2, 1 + sum(map(len, layout.values()))
    assert once + each < len(opened) < once + 2 * each


def test_progress_is_told_once_a_second_and_at_the_end(
    tiny: Reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tridentlm.models.loading"):
        monkeypatch.setattr(loading, "PROGRESS_SECONDS", 3600.0)
        read(tiny.folder)
        monkeypatch.setattr(loading, "PROGRESS_SECONDS", 0.0)
        read(tiny.folder)
    count = len(SafetensorsFolder(tiny.folder).tensors)
    assert f"{count} of {count} tensors, 0.00 GB" in caplog.messages[0]
    assert len(caplog.messages) == 1 + count + 1


@pytest.mark.parametrize("shape", [(7, 5), (64, 48), (960, 576)])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 63, 64, 65, 300])
def test_a_packed_product_equals_the_plain_one(shape: tuple[int, int], rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator)
    x = torch.randn(rows, shape[1], generator=generator)
    exact = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(Linear(weight)(x), exact, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(Linear(weight, bias)(x), exact + bias, atol=1e-4, rtol=1e-4)
