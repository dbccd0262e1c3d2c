"""How much the engine can hold: from settings, model and free memory to `Limits`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from tridentlm.backends.base import KVCache
from tridentlm.config import EngineSettings
from tridentlm.core.request import Limits
from tridentlm.errors import InvalidRequest
from tridentlm.models.config import ModelConfig

GIB = 2**30
CPU_KV_BYTES = 4 * GIB
CPU_SHARE = 0.25
CUDA_SHARE = 0.9
STEP_TOKENS = {"cpu": 512, "cuda": 8192}
"""Token budget of a step where the settings name none: what a CPU computes in about a second, and
what fills a GPU."""


def resolve_limits(
    settings: EngineSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    profile: Callable[[int], int],
    ranks: int = 1,
) -> Limits:
    """Sizes the KV pool and fixes the limits. The weights are on the device already.

    `settings.page_size` is set; `dtype` is the pool's. `profile(tokens)` runs steps of up to that
    many tokens with a KV cache of its own and returns the bytes of that; its peak is kept free
    (CUDA only). `ranks` processes share the host's memory; `config` is the part of one. A pool too
    small for one request of `max_model_len` is allowed: `Limits.resolve` refuses those.

    Raises InvalidRequest, naming what would fit, when the pool asked for does not.
    """
    longest = config.max_position_embeddings
    if settings.max_model_len > longest:
        raise InvalidRequest(
            f"max_model_len is {settings.max_model_len}; the model's context ends at {longest}.",
            param="max_model_len",
        )
    max_model_len = settings.max_model_len or longest
    step_tokens = settings.max_step_tokens or STEP_TOKENS[device.type]
    page_bytes = KVCache.page_bytes(config, settings.page_size, dtype)
    if device.type == "cuda":
        free = _free_cuda(device, lambda: profile(step_tokens))
        default = free
    else:
        free = available_memory() // ranks
        default = min(CPU_KV_BYTES, int(CPU_SHARE * free))
    # More than every slot filled to the end would never be used.
    useful = settings.max_running * -(-max_model_len // settings.page_size)
    return Limits(
        max_model_len=max_model_len,
        num_pages=_num_pages(settings, page_bytes, free)
        or _default_pages(default, page_bytes, useful),
        page_size=settings.page_size,
        max_running=settings.max_running,
        max_queue=settings.max_queue,
        max_step_tokens=step_tokens,
        vocab_size=config.vocab_size,
    )


def available_memory() -> int:
    """Bytes of host memory that can still be had, within the container's limit if there is one."""
    available = int(psutil.virtual_memory().available)
    limit, used = (Path("/sys/fs/cgroup", f"memory.{name}") for name in ("max", "current"))
    try:
        return min(available, max(int(limit.read_text()) - int(used.read_text()), 0))
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return available


def _num_pages(settings: EngineSettings, page_bytes: int, free: int) -> int:
    """The pages that the settings ask for; 0 when they leave it open."""
    pages = settings.num_pages or int(settings.kv_memory_gb * GIB) // page_bytes
    asked = bool(settings.num_pages or settings.kv_memory_gb)
    if asked and not 0 < pages * page_bytes <= free:
        name = "num_pages" if settings.num_pages else "kv_memory_gb"
        raise InvalidRequest(
            f"{name} is {getattr(settings, name)}. A page of {settings.page_size} tokens takes "
            f"{page_bytes / GIB:.6f} GiB, and {free / GIB:.2f} GiB is free: "
            f"num_pages can be 1 to {free // page_bytes}.",
            param=name,
        )
    return pages


def _default_pages(budget: int, page_bytes: int, useful: int) -> int:
    if budget < page_bytes:
        raise InvalidRequest(
            f"No memory is left for the KV cache: one page takes {page_bytes / GIB:.6f} GiB, "
            f"{max(budget, 0) / GIB:.6f} GiB is free.",
            param="kv_memory_gb",
        )
    return min(budget // page_bytes, useful)


def _free_cuda(device: torch.device, profile: Callable[[], int]) -> int:
    """CUDA memory for the KV pool: what is free at the peak of a step, less a reserve."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    own_cache = profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before - own_cache
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - peak - (1 - CUDA_SHARE) * total)
