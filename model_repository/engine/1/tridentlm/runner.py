"""The model on its device: a `StepPlan` in, the step's sampled tokens out."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import replace
from typing import Protocol

import torch

from tridentlm.backends.base import KVCache, Ops
from tridentlm.backends.torch import TorchBackend, TorchOps
from tridentlm.config import EngineSettings
from tridentlm.core.plan import StepPlan
from tridentlm.core.request import Limits
from tridentlm.eager import PendingTokens, TorchExecutor, profile_plan, with_all_extras
from tridentlm.errors import InvalidRequest
from tridentlm.hub import ModelFiles
from tridentlm.memory import check_weights, measure_room, report, resolve_limits, step_budget
from tridentlm.models import loading
from tridentlm.models.checkpoint import Checkpoint, SafetensorsFolder
from tridentlm.models.config import ModelConfig
from tridentlm.models.decoder import Decoder
from tridentlm.models.fp8 import held_bytes
from tridentlm.models.gguf import GGUFModel
from tridentlm.models.moe import check_experts
from tridentlm.parallel.divide import divided
from tridentlm.parallel.group import Group

logger = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
PAGE_SIZES = {"torch": 16, "flashinfer": 64}
GRAPH_TOKENS = 512
"""Of the largest step that runs by `promptgraphs`, where the settings name none: a GPU computes it
for as long as a fast host launches it. With several ranks, where they are untried: none."""
SMALLEST_PAGE = 16
"""With FlashInfer: what the tensor cores take at a time."""


class Executor(Protocol):
    """Launches steps; those of `eager` and `graphs`."""

    def launch(self, plan: StepPlan) -> PendingTokens: ...


class ModelRunner:
    """Implements `core.runner.Runner`: loads a model, sizes its memory, prepares its executor."""

    def __init__(
        self, settings: EngineSettings, files: ModelFiles, group: Group | None = None
    ) -> None:
        """Loads the model, or this rank's part of it, and allocates the KV pool.

        Raises InvalidRequest or ModelNotFound.
        """
        group = group or Group()
        self._device = _device(settings.device, group.shard.rank)
        self._dtype = _dtype(settings.dtype, self._device)
        self.device = self._device.type
        self.dtype = str(self._dtype).removeprefix("torch.")
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.startup_seconds: dict[str, float] = {}
        self._stage_started = time.monotonic()
        logger.info("Loading %s on %s in %s", files.name, self.device, self.dtype)
        whole, checkpoint = self._open(settings, files)
        config = divided(whole, group.shard.size)
        self.backend = _backend(settings, config, self._dtype, self._device)
        settings = replace(settings, page_size=_page_size(settings, self.backend))
        self._kv_dtype = _kv_dtype(settings, self.backend, self._dtype)
        if config.experts is not None:
            check_experts(self._device, self._dtype)
        check_weights(settings, whole, self._dtype, self._device, group.shard.size)
        with torch.inference_mode():
            merged = loading.load(
                whole,
                checkpoint,
                self._dtype,
                self._device,
                shard=group.shard,
                quantize=settings.quantize == "fp8",
            )
            weight_bytes = sum(held_bytes(tensor, self._dtype) for tensor in merged.values())
            self._graph_max_batch = min(settings.cuda_graph_max_batch, settings.max_running)
            most = settings.cuda_graph_max_tokens or (GRAPH_TOKENS if group.shard.size == 1 else 0)
            most = min(most, step_budget(settings, self._device))
            self._graph_max_tokens = most if self._graph_max_batch else 0
            self._decoder = Decoder(config, merged, self._ops(), group)
        self._end_stage("weights")
        self._graph_bytes = 0
        with torch.inference_mode():
            group.wait_until_loaded()
            room = measure_room(
                self._device,
                lambda: self._profile(settings, step_budget(settings, self._device)),
                group.shard.size,
            )
            limits = resolve_limits(settings, config, self._kv_dtype, self._device, room)
            self.limits = replace(limits, num_pages=group.least(limits.num_pages))
            self._end_stage("profile")
            self._executor = self._make_executor(self.limits, self.limits.num_pages)
            if self.device == "cuda":
                self._warm_up()
                self._end_stage("warm-up")
        page_bytes = KVCache.page_bytes(config, self.limits.page_size, self._kv_dtype)
        report(self.limits, page_bytes, weight_bytes, self._graph_bytes, room, group.shard)
        logger.info(
            "Ready in %.1f s (%s)",
            sum(self.startup_seconds.values()),
            ", ".join(f"{name} {spent:.1f}" for name, spent in self.startup_seconds.items()),
        )

    def launch(self, plan: StepPlan) -> PendingTokens:
        """Starts the step. On a CPU it is done on return."""
        with torch.inference_mode():
            return self._executor.launch(plan)

    def close(self) -> None:
        """Frees the model and the KV pool, once what was launched is done."""
        if self.device == "cuda":
            torch.cuda.synchronize(self._device)
        del self._decoder, self._executor
        if self.device == "cuda":
            gc.collect()  # no graph may be left when a group that it calls is let go
            torch.cuda.empty_cache()

    def _make_executor(
        self, limits: Limits, num_pages: int, *, only_largest: bool = False
    ) -> Executor:
        """only_largest: of the graphs."""
        config, page_size = self._decoder.config, limits.page_size
        if self.backend == "torch":
            cache = KVCache(config, num_pages, page_size, self._kv_dtype, self._device)
            self._end_stage("cache")
            return TorchExecutor(self._decoder, TorchBackend(cache), limits)
        from tridentlm.backends.flashinfer import FlashInferBackend
        from tridentlm.graphs import CudaExecutor, batch_sizes
        from tridentlm.promptgraphs import token_sizes

        cache = KVCache(
            config, num_pages + 1, page_size, self._kv_dtype, self._device, heads_first=True
        )
        backend = FlashInferBackend(cache, self._dtype, limits)
        self._end_stage("cache")
        sizes = batch_sizes(self._graph_max_batch), token_sizes(self._graph_max_tokens)
        if only_largest:
            sizes = sizes[0][-1:], sizes[1][-1:]
        executor = CudaExecutor(self._decoder, backend, limits, *sizes)
        before = torch.cuda.memory_reserved(self._device)
        executor.capture()
        self._graph_bytes = torch.cuda.memory_reserved(self._device) - before
        self._end_stage("graphs")
        return executor

    def _profile(self, settings: EngineSettings, tokens: int) -> int:
        """Runs the costliest steps on an executor of its own; returns its KV cache's bytes."""
        page_size = settings.page_size
        longest = settings.max_model_len or self._decoder.config.max_position_embeddings
        limits = Limits(
            max_model_len=longest,
            num_pages=settings.max_running * -(-longest // page_size),
            page_size=page_size,
            max_running=settings.max_running,
            max_queue=settings.max_queue,
            max_step_tokens=tokens,
            vocab_size=self._decoder.config.vocab_size,
        )
        row = min(longest, tokens)
        plans = [
            profile_plan(size, min(size, row), page_size, settings.max_running)
            for size in (1, tokens)  # one token: the kernels of a decode outside a graph
        ]
        pages = max(plan.block_tables.size for plan in plans)
        executor = self._make_executor(limits, pages, only_largest=True)
        for plan in plans:
            executor.launch(plan).collect()
            executor.launch(with_all_extras(plan, limits)).collect()
        return (pages + 1) * KVCache.page_bytes(self._decoder.config, page_size, self._kv_dtype)

    def _warm_up(self) -> None:
        """Computes full steps, so that the first request finds kernels and memory in place."""
        limits = self.limits
        row = min(limits.max_tokens_held, limits.max_step_tokens)
        rows = min(limits.max_step_tokens // row, limits.num_pages // limits.pages_for(row))
        plan = profile_plan(rows * row, row, limits.page_size, limits.max_running)
        self._executor.launch(plan).collect()
        self._executor.launch(with_all_extras(plan, limits)).collect()

    def _open(self, settings: EngineSettings, files: ModelFiles) -> tuple[ModelConfig, Checkpoint]:
        is_dummy = settings.load_format == "dummy"
        if files.kind == "gguf":
            if is_dummy:
                raise InvalidRequest(
                    "load_format 'dummy' takes a folder with a config.json.", param="load_format"
                )
            model = GGUFModel(files.path)
            return model.config, model
        config = ModelConfig.from_folder(files.path)
        if is_dummy:
            return config, loading.dummy(config, self._dtype, self._device)
        return config, SafetensorsFolder(files.path)

    def _ops(self) -> Ops:
        if self.backend == "torch":
            return TorchOps()
        from tridentlm.backends.flashinfer_ops import FlashInferOps

        return FlashInferOps()

    def _end_stage(self, name: str) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.monotonic()
        spent = self.startup_seconds.get(name, 0.0) + now - self._stage_started
        self.startup_seconds[name], self._stage_started = spent, now


def _backend(
    settings: EngineSettings, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> str:
    """The backend that the settings ask for, or the best one for the device."""
    if settings.backend == "torch" or device.type == "cpu":
        if settings.backend == "flashinfer":
            raise InvalidRequest("backend 'flashinfer' needs a CUDA device.", param="backend")
        return "torch"
    try:
        from tridentlm.backends.flashinfer import unsupported

        reason = unsupported(config, dtype)
    except ImportError as error:
        reason = f"FlashInfer cannot be imported ({error})"
    if reason and settings.backend == "flashinfer":
        raise InvalidRequest(f"{reason}.", param="backend")
    if reason:
        logger.warning("%s; using the torch backend, which is slower.", reason)
    return "torch" if reason else "flashinfer"


def _page_size(settings: EngineSettings, backend: str) -> int:
    size = settings.page_size or PAGE_SIZES[backend]
    if backend == "flashinfer" and size < SMALLEST_PAGE:
        raise InvalidRequest(
            f"On CUDA a page has {SMALLEST_PAGE} tokens at least, not {size}.", param="page_size"
        )
    return size


def _kv_dtype(settings: EngineSettings, backend: str, dtype: torch.dtype) -> torch.dtype:
    if settings.kv_dtype == "fp8" and backend != "flashinfer":
        raise InvalidRequest("kv_dtype 'fp8' needs the flashinfer backend.", param="kv_dtype")
    return FP8 if settings.kv_dtype == "fp8" else dtype


def _device(name: str, rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("device is 'cuda', and torch finds no CUDA device.", param="device")
    return torch.device(name, rank) if name == "cuda" else torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype
