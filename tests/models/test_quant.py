"""FP8 weights: every format on tiny checkpoints made here, and the product itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.factory import make_tiny_model
from tests.models.conftest import PAGE, PAGES, Engine, load
from tests.models.plans import Chunk, PlanMaker
from tridentlm.backends.torch import TorchOps
from tridentlm.config import EngineSettings
from tridentlm.errors import InvalidRequest
from tridentlm.hub import ModelFiles
from tridentlm.models import loading
from tridentlm.models.checkpoint import SafetensorsFolder
from tridentlm.models.config import ModelConfig
from tridentlm.models.fp8 import E4M3, Fp8Linear, quantize_rows, round_rows, scaled_product
from tridentlm.models.quant import Quantization
from tridentlm.models.shard import Shard
from tridentlm.runner import ModelRunner

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
PROMPT = list(range(40, 60))
IGNORED = "model.layers.0.mlp.down_proj"

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [16, 32]}
STATIC = FP8 | {"activation_scheme": "static"}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, **extra: Any) -> Any:
    eight = {"num_bits": 8, "type": "float"}
    group = {"weights": eight | weights, "input_activations": inputs and eight | inputs}
    group["targets"] = ["Linear"]
    head = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
    }
    return head | {"config_groups": {"group_0": group}} | extra


PER_TOKEN = {"strategy": "token", "dynamic": True}
CHANNELS = compressed({"strategy": "channel"}, PER_TOKEN)
TENSORS = compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False})
WEIGHTS_ALONE = compressed({"strategy": "channel"}, None)
COMPRESSED_BLOCKS = compressed({"strategy": "block", "block_structure": [16, 32]}, PER_TOKEN)
FORMATS = {
    "fp8-tensor-dynamic": FP8,
    "fp8-tensor-static": STATIC,
    "fp8-block": BLOCKS,
    "compressed-channel": CHANNELS,
    "compressed-tensor-static": TENSORS,
    "compressed-weights-alone": WEIGHTS_ALONE,
    "compressed-block": COMPRESSED_BLOCKS,
}


@dataclass(frozen=True)
class Pair:
    """A quantized folder, and one that holds in float32 the numbers that it stands for."""

    quantized: Path
    plain: Path


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied head and attention biases, or a tied head and norms of q and k."""
    extra = {"attention_bias": True} if request.param == "llama" else {}
    return make_tiny_model(request.param, tmp_path_factory.mktemp("original"), **extra)


def rounded(weight: torch.Tensor, quant: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in e4m3 and its scales, by the plainest loops."""
    rows, columns = (
        quant.block
        or {
            "tensor": tuple(weight.shape),
            "channel": (1, weight.shape[1]),
        }[quant.strategy]
    )
    scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    values = torch.empty(weight.shape, dtype=E4M3)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[place].abs().max() / 448
            values[place] = (weight[place] / scales[i, j]).to(E4M3)
    return values, scales.reshape(1) if quant.strategy == "tensor" else scales


def expanded(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if scales.numel() == 1:
        return values.float() * scales
    grid = scales
    for dim, size in enumerate(values.shape):
        grid = grid.repeat_interleave(-(-size // scales.shape[dim]), dim)
    if scales.shape[0] not in (1, values.shape[0]):  # blocks of 16 x 32
        grid = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
    return values.float() * grid[: values.shape[0], : values.shape[1]]


def quantized_pair(
    original: Path, folder: Path, values: dict[str, Any], ignored: tuple[str, ...] = ()
) -> Pair:
    quant = Quantization.from_hf(values)
    assert quant is not None
    tensors, plain = load_file(original / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        module = name.removesuffix(".weight")
        plain[name] = tensor
        if tensor.dim() == 2 and "_proj" in name and module not in ignored:
            tensors[name], scales = rounded(tensor, quant)
            tensors[f"{module}.{quant.scale}"] = scales
            plain[name] = expanded(tensors[name], scales)
            if quant.activations == "static":
                tensors[f"{module}.input_scale"] = torch.tensor(0.05)
    pair = Pair(folder / "quantized", folder / "plain")
    config = json.loads((original / "config.json").read_text())
    for path, content, extra in (
        (pair.quantized, tensors, {"quantization_config": values}),
        (pair.plain, plain, {}),
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | extra))
        save_file(content, path / "model.safetensors")
    return pair


def read(folder: Path, **options: Any) -> Tensors:
    config = ModelConfig.from_folder(folder)
    return loading.load(config, SafetensorsFolder(folder), torch.float32, CPU, **options)


def dequantized(weights: Tensors) -> Tensors:
    """The weights as if they had been loaded without scales."""
    values = {n: t for n, t in weights.items() if not n.endswith("scale")}
    for name, tensor in values.items():
        if tensor.dtype == E4M3:
            scale = weights[name.removesuffix("weight") + "scale"]
            values[name] = tensor.float() * scale[:, None]
    return values


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_the_values_times_their_scales(
    original: Path, tmp_path: Path, name: str
) -> None:
    pair = quantized_pair(original, tmp_path, FORMATS[name])
    weights, plain = read(pair.quantized), read(pair.plain)
    kept = {tensor.dtype for n, tensor in weights.items() if n.endswith("down.weight")}
    assert kept == ({torch.float32} if "block" in name or "alone" in name else {E4M3})
    assert weights["embedding"].dtype == torch.float32
    static = {n for n in weights if n.endswith("input_scale")}
    assert len(static) == (8 if "static" in name else 0)
    made = dequantized(weights)
    assert set(made) == set(plain)
    for key, tensor in plain.items():
        torch.testing.assert_close(made[key], tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_numbers_that_the_format_stands_for(
    original: Path, tmp_path: Path, name: str
) -> None:
    """Exactly so where activations are not rounded. Where they are, tiny random layers lose some
    percent; a wrong scale would lose everything."""
    pair = quantized_pair(original, tmp_path, FORMATS[name])
    logits, expected = (
        Engine(load(folder)).logits(Chunk(0, PROMPT)) for folder in (pair.quantized, pair.plain)
    )
    if "block" in name or "alone" in name:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    else:
        assert torch.corrcoef(torch.cat((logits, expected)))[0, 1] > 0.98


def test_block_scales_mean_what_they_do_in_transformers(original: Path, tmp_path: Path) -> None:
    pair = quantized_pair(original, tmp_path, BLOCKS)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        pair.quantized,
        dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0, -1:]
    logits = Engine(load(pair.quantized)).logits(Chunk(0, PROMPT))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["fp8-tensor-dynamic", "fp8-block", "compressed-channel"])
def test_modules_in_the_ignore_list_are_plain(original: Path, tmp_path: Path, name: str) -> None:
    key = "ignore" if "compressed" in name else "modules_to_not_convert"
    ignored = (IGNORED, "model.layers.1.self_attn.k_proj")
    values = FORMATS[name] | {key: ["lm_head", *ignored]}
    pair = quantized_pair(original, tmp_path, values, ignored)
    weights, plain = read(pair.quantized), read(pair.plain)
    assert torch.equal(weights["layers.0.down.weight"], plain["layers.0.down.weight"])
    # One of the three parts of a merged weight: then all of it is plain.
    assert weights["layers.1.qkv.weight"].dtype == torch.float32
    for key, tensor in dequantized(weights).items():
        torch.testing.assert_close(tensor, plain[key], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_scale_their_parts_as_the_whole(
    original: Path, tmp_path: Path, name: str, size: int
) -> None:
    """Inner size 160 over 3 ranks: parts that begin within a block, and padding."""
    pair = quantized_pair(original, tmp_path, FORMATS[name])
    for rank in range(size):
        shard = Shard(rank, size)
        made = dequantized(read(pair.quantized, shard=shard))
        for key, tensor in read(pair.plain, shard=shard).items():
            torch.testing.assert_close(made[key], tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        (FP8 | {"fmt": "e5m2"}, "e5m2"),
        (FP8 | {"activation_scheme": "odd"}, "odd"),
        (FP8 | {"weight_block_size": [128]}, r"block size \[128\]"),
        (compressed({"num_bits": 4, "type": "int", "strategy": "group"}, None), "int4 by group"),
        (compressed({"type": "int", "strategy": "channel"}, PER_TOKEN), "int8 by channel"),
        (
            compressed({"strategy": "tensor"}, PER_TOKEN | {"type": "int"}),
            "input_activations.*int8",
        ),
        (CHANNELS | {"format": "pack-quantized"}, "pack-quantized"),
        (CHANNELS | {"config_groups": {}}, "0 groups"),
    ],
)
def test_other_quantizations_are_refused_with_what_works(
    values: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"{named}.*What works: .*weight_block_size") as error:
        Quantization.from_hf(values)
    assert error.value.param == "model"


def test_a_folder_says_how_it_is_quantized(original: Path, tmp_path: Path) -> None:
    assert ModelConfig.from_folder(original).quantization is None
    pair = quantized_pair(original, tmp_path, STATIC)
    found = ModelConfig.from_folder(pair.quantized).quantization
    assert found == Quantization("tensor", "weight_scale", None, "static")


@pytest.mark.parametrize(
    ("entry", "module", "is_ignored"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1.mlp", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("down_proj", "model.layers.0.mlp.down_proj", True),
        ("re:.*gate$", "model.layers.0.mlp.gate", True),
        ("re:.*gate$", "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_ignore_lists_name_modules_their_parents_and_patterns(
    entry: str, module: str, is_ignored: bool
) -> None:
    quantization = replace(Quantization("tensor", "weight_scale"), ignored=(entry,))
    assert quantization.ignores(module) is is_ignored


def test_missing_and_misshapen_scales_are_named(original: Path, tmp_path: Path) -> None:
    pair = quantized_pair(original, tmp_path, BLOCKS)
    path = pair.quantized / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    scales = tensors.pop(name)
    save_file(tensors, path)
    with pytest.raises(InvalidRequest, match=rf"lacks 1 .*{name}"):
        read(pair.quantized)
    save_file(tensors | {name: scales[:-1]}, path)
    with pytest.raises(InvalidRequest, match=rf"{name}.*model\.safetensors has shape \(9, 2\)"):
        read(pair.quantized)
    save_file(tensors | {name: scales.to(torch.int32)}, path)
    with pytest.raises(InvalidRequest, match=rf"{name}.*model\.safetensors is of type I32"):
        read(pair.quantized)


@pytest.mark.parametrize("static", [False, True])
def test_the_product_rounds_rows_and_sums_them_exactly(static: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x, bias = (torch.randn(n, generator=generator) for n in ((48, 64), (5, 64), (48,)))
    x[2] = 0
    values, scale = quantize_rows(weight)
    input_scale = torch.tensor([x.abs().max() / 600]) if static else None
    layer = Fp8Linear(values, scale, input_scale, bias, torch.float32, TorchOps())
    scales = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448 if not static else input_scale
    rows = (x / scales).clamp(-448, 448).to(E4M3).double() * scales
    exact = rows @ (values.double() * scale[:, None]).T + bias
    torch.testing.assert_close(layer(x), exact.float(), atol=1e-5, rtol=1e-5)
    assert layer(x).isfinite().all()  # static: what is too large is cut, not nan


def test_the_fused_product_gives_the_same_numbers() -> None:
    """The call that CUDA devices are given, on a CPU: layouts and scales, not its kernels."""
    generator = torch.Generator().manual_seed(2)
    weight, x = (torch.randn(n, generator=generator) for n in ((48, 64), (5, 64)))
    (values, scale), rows = quantize_rows(weight), round_rows(x, None)
    y = scaled_product(rows, values, scale, torch.float32)
    exact = (rows.values.double() * rows.scales) @ (values.double() * scale[:, None]).T
    torch.testing.assert_close(y, exact.float(), atol=0.1, rtol=0.01)


def test_quantizing_at_load_rounds_linear_layers_alone(original: Path) -> None:
    weights, plain = read(original, quantize=True), read(original)
    fp8 = {name for name, tensor in weights.items() if tensor.dtype == E4M3}
    linears = ("qkv", "output", "gate_up", "down")
    assert fp8 == {f"layers.{index}.{name}.weight" for index in range(2) for name in linears}
    for key, tensor in dequantized(weights).items():
        worst = plain[key].abs().amax(-1, keepdim=True) * 2**-4
        assert ((tensor - plain[key]).abs() <= worst).all()
        if key not in fp8:
            assert torch.equal(tensor, plain[key])


def test_a_quantized_checkpoint_is_not_quantized_again(original: Path, tmp_path: Path) -> None:
    pair = quantized_pair(original, tmp_path, BLOCKS)
    once, twice = read(pair.quantized), read(pair.quantized, quantize=True)
    assert all(torch.equal(once[name], tensor) for name, tensor in twice.items())


def first_tokens(folder: Path, **settings: Any) -> list[int]:
    sizes = {"page_size": PAGE, "num_pages": PAGES, "max_running": 8}
    runner = ModelRunner(
        EngineSettings(device="cpu", **sizes, **settings), ModelFiles("hf", folder, "m", folder)
    )
    chunks = [Chunk(slot, [5 + slot, 9, 7]) for slot in range(8)]
    plan = PlanMaker(PAGES, PAGE).step(chunks, temperature=[1.0] * 8, seeds=range(8))
    return runner.launch(plan).collect().tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dummy_weights_can_be_quantized(original: Path, dtype: str) -> None:
    settings = {"load_format": "dummy", "dtype": dtype, "quantize": "fp8"}
    first, second = (first_tokens(original, **settings) for _ in range(2))
    assert first == second
    assert len(set(first)) > 2


@pytest.mark.parametrize("name", FORMATS)
def test_dummy_weights_have_the_form_of_the_checkpoint(
    original: Path, tmp_path: Path, name: str
) -> None:
    folder = quantized_pair(original, tmp_path, FORMATS[name]).quantized
    config = ModelConfig.from_folder(folder)
    dummy = loading.dummy(config, torch.bfloat16, CPU)
    real = SafetensorsFolder(folder).tensors
    assert {n: s.shape or (1,) for n, s in dummy.tensors.items()} == {
        n: s.shape or (1,) for n, s in real.items()
    }
    made = dequantized(loading.load(config, dummy, torch.bfloat16, CPU))
    assert made["layers.0.down.weight"].float().std() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", ["fp8-block", "fp8-tensor-static", "compressed-channel"])
def test_experts_are_dequantized(tmp_path: Path, name: str) -> None:
    original = make_tiny_model("qwen3_moe", tmp_path / "original")
    pair = quantized_pair(original, tmp_path, FORMATS[name])
    weights, plain = read(pair.quantized), read(pair.plain)
    experts = {tensor.dtype for key, tensor in weights.items() if "experts" in key}
    assert experts == {torch.float32}
    for key, tensor in dequantized(weights).items():
        torch.testing.assert_close(tensor, plain[key], rtol=1e-6, atol=0)
    if name == "fp8-block":
        logits, expected = (
            Engine(load(x)).logits(Chunk(0, PROMPT)) for x in (pair.quantized, pair.plain)
        )
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_experts_are_not_quantized_at_load(tmp_path: Path) -> None:
    folder = make_tiny_model("qwen3_moe", tmp_path)
    with pytest.raises(InvalidRequest, match="mixture of experts") as error:
        read(folder, quantize=True)
    assert error.value.param == "quantize"
