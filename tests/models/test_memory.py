from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tridentlm import memory
from tridentlm.backends.base import KVCache
from tridentlm.config import EngineSettings
from tridentlm.core.request import Limits
from tridentlm.errors import InvalidRequest
from tridentlm.models.config import ModelConfig

from tests.models.conftest import Reference

SETTINGS = EngineSettings(page_size=16, max_running=1000)
CPU = torch.device("cpu")


@pytest.fixture
def config(tiny: Reference) -> ModelConfig:
    return ModelConfig.from_folder(tiny.folder)


def resolve(config: ModelConfig, settings: EngineSettings) -> Limits:
    return memory.resolve_limits(settings, config, torch.float32, CPU, pytest.fail)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    size = 100 * 2**20
    monkeypatch.setattr(memory, "available_memory", lambda: size)
    return size


def test_a_page_is_counted_as_large_as_the_cache_makes_it(config: ModelConfig) -> None:
    cache = KVCache(config, 3, 16, torch.bfloat16, CPU)
    assert cache.data.nbytes == 3 * KVCache.page_bytes(config, 16, torch.bfloat16)


def test_the_pool_is_a_quarter_of_the_free_memory_by_default(
    config: ModelConfig, free: int
) -> None:
    page = KVCache.page_bytes(config, 16, torch.float32)
    assert resolve(config, SETTINGS).num_pages == free // 4 // page


def test_the_pool_is_no_larger_than_all_slots_can_use(config: ModelConfig, free: int) -> None:
    few = replace(SETTINGS, max_running=2, max_model_len=100)
    assert resolve(config, few).num_pages == 2 * 7


def test_num_pages_goes_before_kv_memory(config: ModelConfig, free: int) -> None:
    page = KVCache.page_bytes(config, 16, torch.float32)
    by_memory = replace(SETTINGS, kv_memory_gb=page * 10.5 / memory.GIB)
    assert resolve(config, by_memory).num_pages == 10
    assert resolve(config, replace(by_memory, num_pages=3)).num_pages == 3


@pytest.mark.parametrize("asked", [{"num_pages": 10**6}, {"kv_memory_gb": 1.0}])
def test_a_pool_that_does_not_fit_is_refused_with_what_would(
    config: ModelConfig, free: int, asked: dict[str, float]
) -> None:
    most = free // KVCache.page_bytes(config, 16, torch.float32)
    with pytest.raises(InvalidRequest, match=f"num_pages can be 1 to {most}") as caught:
        resolve(config, replace(SETTINGS, **asked))
    assert caught.value.param == next(iter(asked))


def test_kv_memory_below_one_page_and_no_memory_at_all_are_refused(
    config: ModelConfig, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="num_pages can be 1 to"):
        resolve(config, replace(SETTINGS, kv_memory_gb=1e-6))
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(InvalidRequest, match="No memory is left"):
        resolve(config, SETTINGS)


def test_the_context_is_the_model_s_or_a_shorter_one(config: ModelConfig, free: int) -> None:
    limits = resolve(config, replace(SETTINGS, num_pages=2))
    assert limits.max_model_len == 2048  # though the pool holds 32 tokens
    assert limits.max_tokens_held == 32
    assert resolve(config, replace(SETTINGS, max_model_len=99)).max_model_len == 99
    with pytest.raises(InvalidRequest, match="ends at 2048"):
        resolve(config, replace(SETTINGS, max_model_len=2049))


def test_the_step_budget_follows_the_device_unless_set(config: ModelConfig, free: int) -> None:
    assert resolve(config, SETTINGS).max_step_tokens == 512
    assert resolve(config, replace(SETTINGS, max_step_tokens=77)).max_step_tokens == 77


def test_available_memory_is_a_part_of_the_machine_s() -> None:
    assert 0 < memory.available_memory() < 2**50
