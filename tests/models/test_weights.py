from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tridentlm.errors import InvalidRequest, ModelNotFound
from tridentlm.models import weights
from tridentlm.models.config import ModelConfig
from tridentlm.models.linear import Linear

from tests.models.conftest import Reference, load
from tests.models.plans import Chunk

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors(tiny: Reference) -> Tensors:
    return load_file(tiny.folder / "model.safetensors")


def merge(tiny: Reference, tensors: Tensors) -> Tensors:
    config = ModelConfig.from_folder(tiny.folder)
    return weights.merge(config, tensors.items(), torch.float32, CPU)


def test_shards_named_by_an_index_load_like_one_file(tiny: Reference, tensors: Tensors) -> None:
    folder = tiny.folder / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text((tiny.folder / "config.json").read_text())
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {name: file for file, part in shards.items() for name in part}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    save_file({"stray": torch.zeros(1)}, folder / "c.safetensors")  # not in the index
    chunk = Chunk(0, [5, 6, 7])
    sharded = type(tiny)(folder, tiny.model).engine().logits(chunk)
    assert torch.equal(sharded, tiny.engine().logits(chunk))
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"b\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lack 1 .*layers.1.mlp.up_proj"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight.*\(3,\)"),
        (lambda t: t.update({"model.layers.0.x.weight": torch.ones(3)}), "unknown.*layers.0.x"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(3)}), "unknown"),
    ],
    ids=["missing", "misshapen", "unknown", "layer-too-many"],
)
def test_a_wrong_tensor_is_named(
    tiny: Reference, tensors: Tensors, damage: Callable[[Tensors], None], named: str
) -> None:
    damage(tensors)
    with pytest.raises(InvalidRequest, match=named):
        merge(tiny, tensors)


def test_tensors_that_add_nothing_are_passed_over(tiny: Reference, tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(12)
    expected = set(weights.layout(ModelConfig.from_folder(tiny.folder)))
    assert set(merge(tiny, tensors)) == expected


def test_folders_without_readable_safetensors_are_refused(tiny: Reference, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="safetensors"):
        list(weights.safetensors(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        list(weights.safetensors(tmp_path))


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
