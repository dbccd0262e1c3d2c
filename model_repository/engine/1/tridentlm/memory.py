"""How much the engine can hold: from settings, model and free memory to `Limits`.

    device memory   | weights | KV pool              | graphs | a step at its peak | reserve |

On a CPU the pool is a quarter of what is free and 4 GiB at most; on CUDA it is all that is left.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tridentlm.backends.base import KVCache
from tridentlm.config import EngineSettings
from tridentlm.core.request import Limits
from tridentlm.errors import InvalidRequest
from tridentlm.models.config import ModelConfig
from tridentlm.models.fp8 import has_units
from tridentlm.models.shard import Shard
from tridentlm.models.weights import is_linear, layout
from tridentlm.parallel.divide import divided

GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")
CPU_KV_BYTES = 4 * GIB
CPU_SHARE = 0.25
CUDA_SHARE = 0.9
STEP_TOKENS = {"cpu": 512, "cuda": 8192}
"""Token budget of a step where the settings name none: what a CPU computes in about a second, and
what fills a GPU."""

FP8_BYTES = 1
TP_SIZES = (2, 4, 8)
"""Numbers of ranks that a refusal may propose."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are `free` for the KV pool beside weights and a step, and what a `step` takes at
    its peak (measured on CUDA alone)."""

    free: int
    step: int = 0


def check_weights(
    settings: EngineSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    ranks: int = 1,
) -> None:
    """Raises InvalidRequest, naming what would fit, when the weights do not fit into free memory.

    `config` is the whole model's. Each of `ranks` processes has its part on its own GPU, or all
    have them in the host's memory.
    """
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else available_memory()
    rounds = settings.quantize == "fp8" and config.quantization is None
    fp8 = has_units(device) and (rounds or bool(config.quantization and config.quantization.by_row))

    def taken(dtype: torch.dtype, fp8: bool, ranks: int) -> int:
        return weight_bytes(config, dtype, fp8) // (ranks if on_gpu else 1)

    if taken(dtype, fp8, ranks) <= free:
        return
    options = []
    if dtype == torch.float32:
        options.append(("dtype bfloat16", taken(torch.bfloat16, fp8, ranks)))
    if has_units(device) and not fp8 and config.quantization is None and config.experts is None:
        options.append(("quantize fp8", taken(dtype, True, ranks)))
    for size in TP_SIZES if on_gpu else ():
        if size > ranks and _divides(config, size):
            options.append((f"tp {size}", taken(dtype, fp8, size)))
    fitting = [f"{name} ({gib(size)})" for name, size in options if size <= free]
    name = str(dtype).removeprefix("torch.")
    raise InvalidRequest(
        f"The weights take {gib(taken(dtype, fp8, ranks))} {'of each GPU ' if on_gpu else ''}in "
        f"{name}, and {gib(free)} is free. {_would_fit(fitting)}",
        param="model",
    )


def weight_bytes(config: ModelConfig, dtype: torch.dtype, fp8: bool) -> int:
    """Bytes of all weights in `dtype`, those of linear layers in e4m3 with `fp8`."""
    total = 0
    for name, parts in layout(config).items():
        size = FP8_BYTES if fp8 and is_linear(name) else dtype.itemsize
        total += size * sum(math.prod(part.shape) for part in parts)
    return total


def measure_room(device: torch.device, profile: Callable[[], int], ranks: int = 1) -> Room:
    """What is left once the weights are loaded.

    `profile` runs the costliest steps with a KV cache of its own and returns the bytes of that
    (called on CUDA alone). `ranks` processes share the host's memory.
    """
    if device.type == "cuda":
        return _cuda_room(device, profile)
    return Room(available_memory() // ranks)


def step_budget(settings: EngineSettings, device: torch.device) -> int:
    """Tokens of the largest step."""
    return settings.max_step_tokens or STEP_TOKENS[device.type]


def resolve_limits(
    settings: EngineSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    room: Room,
) -> Limits:
    """Sizes the KV pool and fixes the limits. The weights are on the device already.

    `settings.page_size` is set; `dtype` is the pool's; `config` is the part of one rank. Without
    `max_model_len` in the settings it is the model's, though the pool may hold less:
    `Limits.resolve` refuses requests that do not fit.

    Raises InvalidRequest, naming what would fit, when the pool or the length asked for does not.
    """
    longest = config.max_position_embeddings
    if settings.max_model_len > longest:
        raise InvalidRequest(
            f"max_model_len is {settings.max_model_len}; the model's context ends at {longest}.",
            param="max_model_len",
        )
    max_model_len = settings.max_model_len or longest
    page_bytes = KVCache.page_bytes(config, settings.page_size, dtype)
    share = min(CPU_KV_BYTES, int(CPU_SHARE * room.free)) if device.type == "cpu" else room.free
    # More than every slot filled to the end would never be used.
    useful = settings.max_running * -(-max_model_len // settings.page_size)
    num_pages = _num_pages(settings, page_bytes, room.free) or _default_pages(
        share, page_bytes, useful
    )
    limits = Limits(
        max_model_len=max_model_len,
        num_pages=num_pages,
        page_size=settings.page_size,
        max_running=settings.max_running,
        max_queue=settings.max_queue,
        max_step_tokens=step_budget(settings, device),
        vocab_size=config.vocab_size,
    )
    if settings.max_model_len > limits.max_tokens_held:
        raise _too_long(settings, limits, room.free // page_bytes, device)
    return limits


def report(
    limits: Limits, page_bytes: int, weights: int, graphs: int, room: Room, shard: Shard
) -> None:
    """Logs what the memory of one rank is used for; sizes in bytes."""
    pool = limits.num_pages * page_bytes
    tokens = limits.num_pages * limits.page_size
    parts = [f"weights {gib(weights)}", f"KV cache {gib(pool)} ({tokens} tokens)"]
    if room.step:
        parts += [f"graphs {gib(graphs)}", f"a step at its peak {gib(room.step)}"]
    rank = f" of rank {shard.rank} of {shard.size}" if shard.size > 1 else ""
    left = gib(max(room.free - pool, 0))
    logger.info("Memory%s: %s; %s is left", rank, ", ".join(parts), left)


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def available_memory() -> int:
    """Bytes of host memory that can still be had, within the container's limit if there is one."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # The page cache counts as used, and goes when memory is asked for.
        cached = int(stat["inactive_file"]) + int(stat["active_file"])
    except (OSError, ValueError, KeyError):  # no cgroup v2, or "max": no limit
        return available
    return min(available, max(limit - used + cached, 0))


def _num_pages(settings: EngineSettings, page_bytes: int, free: int) -> int:
    """The pages that the settings ask for; 0 when they leave it open."""
    pages = settings.num_pages or int(settings.kv_memory_gb * GIB) // page_bytes
    asked = bool(settings.num_pages or settings.kv_memory_gb)
    if asked and not 0 < pages * page_bytes <= free:
        name = "num_pages" if settings.num_pages else "kv_memory_gb"
        raise InvalidRequest(
            f"{name} is {getattr(settings, name)}. A page of {settings.page_size} tokens takes "
            f"{page_bytes / GIB:.6f} GiB, and {gib(free)} is free: num_pages can be 1 to "
            f"{free // page_bytes}, kv_memory_gb {page_bytes / GIB:.6f} to {free / GIB:.2f}.",
            param=name,
        )
    return pages


def _default_pages(budget: int, page_bytes: int, useful: int) -> int:
    if budget < page_bytes:
        raise InvalidRequest(
            f"No memory is left for the KV cache: one page takes {page_bytes / GIB:.6f} GiB, "
            f"{max(budget, 0) / GIB:.6f} GiB is free. Smaller weights (dtype, quantize, tp), a "
            "smaller page_size or a smaller max_step_tokens leave more.",
            param="kv_memory_gb",
        )
    return min(budget // page_bytes, useful)


def _too_long(
    settings: EngineSettings, limits: Limits, most_pages: int, device: torch.device
) -> InvalidRequest:
    needed = limits.pages_for(settings.max_model_len)
    fitting = [f"max_model_len {limits.max_tokens_held}"]
    if needed <= most_pages:
        fitting.append(f"num_pages {needed}")
    elif device.type == "cuda":
        fitting += ["kv_dtype fp8 (twice the tokens)"] if settings.kv_dtype != "fp8" else []
        fitting.append("more ranks (tp)")
    return InvalidRequest(
        f"max_model_len is {settings.max_model_len}, and the KV cache holds "
        f"{limits.max_tokens_held} tokens. {_would_fit(fitting)}",
        param="max_model_len",
    )


def _would_fit(options: list[str]) -> str:
    if not options:
        return "Neither dtype nor quantize nor tp makes them fit."
    return f"What would fit: {', '.join(options)}."


def _divides(config: ModelConfig, ranks: int) -> bool:
    try:
        divided(config, ranks)
    except InvalidRequest:
        return False
    return True


def _cuda_room(device: torch.device, profile: Callable[[], int]) -> Room:
    """What is free at the peak of a step, less a reserve."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    own_cache = profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before - own_cache
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Room(int(free - peak - (1 - CUDA_SHARE) * total), peak)
