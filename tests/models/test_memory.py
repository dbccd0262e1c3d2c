from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from tests.models.conftest import Reference
from tridentlm import memory
from tridentlm.backends.base import KVCache
from tridentlm.config import EngineSettings
from tridentlm.core.request import Limits
from tridentlm.errors import InvalidRequest
from tridentlm.models import loading
from tridentlm.models.config import ModelConfig
from tridentlm.models.fp8 import held_bytes
from tridentlm.models.shard import Shard

SETTINGS = EngineSettings(page_size=16, max_running=1000)
CPU = torch.device("cpu")


@pytest.fixture
def config(tiny: Reference) -> ModelConfig:
    return ModelConfig.from_folder(tiny.folder)


FREE = 100 * 2**20


def resolve(config: ModelConfig, settings: EngineSettings, free: int = FREE) -> Limits:
    return memory.resolve_limits(settings, config, torch.float32, CPU, memory.Room(free))


def test_a_page_is_counted_as_large_as_the_cache_makes_it(config: ModelConfig) -> None:
    cache = KVCache(config, 3, 16, torch.bfloat16, CPU)
    assert cache.data.nbytes == 3 * KVCache.page_bytes(config, 16, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_on_a_cpu_is_zero_and_takes_memory_as_it_is_used(
    config: ModelConfig, dtype: torch.dtype
) -> None:
    pages = 2**30 // KVCache.page_bytes(config, 16, dtype)
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(config, pages, 16, dtype, CPU)
    assert process.memory_info().rss - before < 2**26
    assert cache.data[-1, -1, -1].eq(0).all()
    cache.data[0, 1, 7] = 2.5
    assert float(cache.data.select(1, 1)[0, 6:9].sum()) == 2.5 * cache.data[0, 0, 0].numel()


def test_the_pool_is_a_quarter_of_the_free_memory_by_default(config: ModelConfig) -> None:
    page = KVCache.page_bytes(config, 16, torch.float32)
    assert resolve(config, SETTINGS).num_pages == FREE // 4 // page


def test_the_pool_is_no_larger_than_all_slots_can_use(config: ModelConfig) -> None:
    few = replace(SETTINGS, max_running=2, max_model_len=100)
    assert resolve(config, few).num_pages == 2 * 7


def test_num_pages_goes_before_kv_memory(config: ModelConfig) -> None:
    page = KVCache.page_bytes(config, 16, torch.float32)
    by_memory = replace(SETTINGS, kv_memory_gb=page * 10.5 / memory.GIB)
    assert resolve(config, by_memory).num_pages == 10
    assert resolve(config, replace(by_memory, num_pages=3)).num_pages == 3


@pytest.mark.parametrize("asked", [{"num_pages": 10**6}, {"kv_memory_gb": 1.0}])
def test_a_pool_that_does_not_fit_is_refused_with_what_would(
    config: ModelConfig, asked: dict[str, float]
) -> None:
    most = FREE // KVCache.page_bytes(config, 16, torch.float32)
    with pytest.raises(InvalidRequest, match=f"num_pages can be 1 to {most}") as caught:
        resolve(config, replace(SETTINGS, **asked))
    assert caught.value.param == next(iter(asked))


def test_kv_memory_below_one_page_and_no_memory_at_all_are_refused(config: ModelConfig) -> None:
    with pytest.raises(InvalidRequest, match="num_pages can be 1 to"):
        resolve(config, replace(SETTINGS, kv_memory_gb=1e-6))
    with pytest.raises(InvalidRequest, match=r"No memory is left.*quantize"):
        resolve(config, SETTINGS, free=1000)


@pytest.mark.parametrize(("free", "fits"), [(FREE, "num_pages 100"), (2**20, "max_model_len 32")])
def test_a_length_that_the_pool_cannot_hold_is_refused_with_what_would(
    config: ModelConfig, free: int, fits: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"What would fit: .*{fits}") as caught:
        resolve(config, replace(SETTINGS, max_model_len=1600, num_pages=2), free)
    assert caught.value.param == "max_model_len"


def test_weights_that_do_not_fit_are_refused_with_what_would(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = memory.weight_bytes(config, torch.float32, fp8=False)

    def check(free: int, dtype: torch.dtype = torch.float32) -> None:
        monkeypatch.setattr(memory, "available_memory", lambda: free)
        memory.check_weights(SETTINGS, config, dtype, CPU)

    check(size)
    check(size // 2, torch.bfloat16)
    with pytest.raises(InvalidRequest, match=r"float32.*What would fit: dtype bfloat16 \(0.00"):
        check(size - 1)
    with pytest.raises(InvalidRequest, match="Neither dtype nor quantize nor tp"):
        check(size // 2 - 1)


def test_weights_on_a_gpu_may_fit_in_fp8_or_on_more_of_them(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the refusal is worded for a CUDA device; what one reports is made up here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    size = memory.weight_bytes(config, torch.bfloat16, fp8=False)

    def check(free: int, quantize: str = "none", ranks: int = 1) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2 * free))
        settings = replace(SETTINGS, quantize=quantize)
        memory.check_weights(settings, config, torch.bfloat16, torch.device("cuda"), ranks)

    check(size // 2, ranks=2)
    options = "tp 2 .*tp 4 " if config.experts else "quantize fp8 .*, tp 2 .*tp 4 "
    with pytest.raises(InvalidRequest, match=f"of each GPU in bfloat16.*What would fit: {options}"):
        check(size - 1)
    if not config.experts:
        check(memory.weight_bytes(config, torch.bfloat16, fp8=True), "fp8")


def test_what_weights_take_is_counted_as_they_are_loaded(config: ModelConfig) -> None:
    dummy = loading.dummy(config, torch.bfloat16, CPU)
    for quantize in (False, True) if config.experts is None else (False,):
        made = loading.load(config, dummy, torch.bfloat16, CPU, quantize=quantize)
        size = sum(tensor.nbytes for name, tensor in made.items() if not name.endswith(".scale"))
        assert size == memory.weight_bytes(config, torch.bfloat16, quantize)
        # A CPU computes with dequantized weights.
        held = sum(held_bytes(t, torch.bfloat16) for n, t in made.items() if ".scale" not in n)
        assert held == memory.weight_bytes(config, torch.bfloat16, False)


def test_a_rank_reports_what_its_memory_is_used_for(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(64, 10, 16, 4, 4, 64, 100)
    gib = memory.GIB
    with caplog.at_level(logging.INFO):
        memory.report(limits, gib // 10, 2 * gib, 0, memory.Room(4 * gib), Shard())
        memory.report(limits, gib // 10, 2 * gib, gib, memory.Room(4 * gib, gib // 2), Shard(1, 2))
    assert caplog.messages == [
        "Memory: weights 2.00 GiB, KV cache 1.00 GiB (160 tokens); 3.00 GiB is left",
        "Memory of rank 1 of 2: weights 2.00 GiB, KV cache 1.00 GiB (160 tokens), graphs 1.00 GiB, "
        "a step at its peak 0.50 GiB; 3.00 GiB is left",
    ]


def test_the_context_is_the_model_s_or_a_shorter_one(config: ModelConfig) -> None:
    limits = resolve(config, replace(SETTINGS, num_pages=2))
    assert limits.max_model_len == 2048  # though the pool holds 32 tokens
    assert limits.max_tokens_held == 32
    assert resolve(config, replace(SETTINGS, max_model_len=99)).max_model_len == 99
    with pytest.raises(InvalidRequest, match="ends at 2048"):
        resolve(config, replace(SETTINGS, max_model_len=2049))


def test_the_step_budget_follows_the_device_unless_set(config: ModelConfig) -> None:
    assert resolve(config, SETTINGS).max_step_tokens == 512
    assert resolve(config, replace(SETTINGS, max_step_tokens=77)).max_step_tokens == 77


def test_available_memory_is_a_part_of_the_machine_s() -> None:
    assert 0 < memory.available_memory() < 2**50


def test_available_memory_is_what_the_container_may_still_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page cache, full of the model's files, counts as free."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    whole = memory.available_memory()
    (tmp_path / "memory.max").write_text("100000\n")
    (tmp_path / "memory.current").write_text("95000\n")
    stat = "anon 5000\nfile 91000\nactive_file 30000\ninactive_file 60000\nshmem 1000\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert memory.available_memory() == 95_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() == pytest.approx(whole, rel=0.2)
