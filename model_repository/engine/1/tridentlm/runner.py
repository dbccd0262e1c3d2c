"""The model on its device: a `StepPlan` in, the step's sampled tokens out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from tridentlm.backends.base import AttentionBackend, KVCache
from tridentlm.backends.torch import TorchBackend
from tridentlm.config import EngineSettings
from tridentlm.core.plan import FROM_DEVICE, I32, StepPlan
from tridentlm.errors import InvalidRequest
from tridentlm.hub import ModelFiles
from tridentlm.memory import GIB, resolve_limits
from tridentlm.models import weights
from tridentlm.models.config import ModelConfig
from tridentlm.models.decoder import Decoder
from tridentlm.models.eos import eos_token_ids
from tridentlm.models.gguf import GGUFModel
from tridentlm.sampling import sample

logger = logging.getLogger(__name__)


class ModelRunner:
    """Implements `core.runner.Runner` with torch.

    The token sampled last for each slot stays on the device, so the next step can be launched
    before anyone has read it:

        launch k:    ... -> sample -> last_token[slots] = tokens -> copy to the host
        launch k+1:  token_ids, FROM_DEVICE replaced by last_token[slot] -> ...
        collect k:   wait for k's copy
    """

    def __init__(self, settings: EngineSettings, files: ModelFiles) -> None:
        """Loads the model and allocates the KV pool. Raises InvalidRequest or ModelNotFound."""
        self._device = _device(settings.device)
        self._dtype = _dtype(settings.dtype, self._device)
        self.device = self._device.type
        self.dtype = str(self._dtype).removeprefix("torch.")
        if settings.threads:
            torch.set_num_threads(settings.threads)
        started = time.monotonic()
        logger.info("Loading %s on %s in %s", files.name, self.device, self.dtype)
        config, tensors = _open(files)
        with torch.inference_mode():
            merged = weights.merge(config, tensors, self._dtype, self._device)
            self._decoder = Decoder(config, merged)
        self.eos_token_ids = config.eos_token_ids
        for folder in {files.path, files.tokenizer_path}:
            self.eos_token_ids |= eos_token_ids(folder)
        self._last_token = torch.zeros(settings.max_running, dtype=torch.int32, device=self._device)
        self.limits = resolve_limits(settings, config, self._dtype, self._device, self._profile)
        self._backend = self._make_backend(self.limits.num_pages, self.limits.page_size)
        logger.info(
            "Loaded in %.1f s; the KV cache holds %d tokens (%.2f GiB)",
            time.monotonic() - started,
            self.limits.num_pages * self.limits.page_size,
            self.limits.num_pages
            * KVCache.page_bytes(config, settings.page_size, self._dtype)
            / GIB,
        )

    def launch(self, plan: StepPlan) -> PendingTokens:
        """Starts the step. On a CPU it is done on return."""
        with torch.inference_mode():
            return PendingTokens(self._compute(plan, self._backend))

    def close(self) -> None:
        """Frees the model and the KV pool."""
        del self._decoder, self._backend, self._last_token
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _compute(self, plan: StepPlan, backend: AttentionBackend) -> torch.Tensor:
        hidden = self._decoder.forward(
            self._token_ids(plan), self._to_device(plan.positions), backend.begin_step(plan)
        )
        if len(plan.sampled) < plan.num_tokens:
            hidden = hidden[self._to_device(plan.query_starts[plan.sampled + 1] - 1)]
        if not len(plan.sampled):
            return self._last_token[:0]
        tokens = sample(self._decoder.logits(hidden), plan).int()
        self._last_token[self._to_device(plan.slots[plan.sampled])] = tokens
        return tokens

    def _token_ids(self, plan: StepPlan) -> torch.Tensor:
        ids = self._to_device(plan.token_ids)
        if not (plan.token_ids == FROM_DEVICE).any():
            return ids
        slots = np.repeat(plan.slots, np.diff(plan.query_starts))
        return torch.where(ids == FROM_DEVICE, self._last_token[self._to_device(slots)], ids)

    def _make_backend(self, num_pages: int, page_size: int) -> AttentionBackend:
        config = self._decoder.config
        return TorchBackend(KVCache(config, num_pages, page_size, self._dtype, self._device))

    def _profile(self, tokens: int) -> None:
        """Computes a step of `tokens` tokens, one row, with as many sampled rows as may run."""
        one, none = np.ones(1, np.int32), np.zeros(1, np.int32)
        sampled = min(len(self._last_token), tokens)
        ramp = np.arange(tokens, dtype=np.int32)
        plan = StepPlan(
            step=0,
            slots=none,
            query_starts=np.array([0, tokens], np.int32),
            context_lens=one * tokens,
            block_tables=none[None],
            token_ids=np.zeros(tokens, np.int32),
            positions=ramp,
            kv_slots=ramp.astype(np.int64),
            sampled=ramp[:0],
            temperature=np.ones(sampled, np.float32),
            top_k=np.zeros(sampled, np.int32),
            top_p=np.full(sampled, 0.9, np.float32),
            min_p=np.zeros(sampled, np.float32),
            seeds=np.zeros(sampled, np.uint64),
            sample_positions=np.zeros(sampled, np.int64),
        )
        with torch.inference_mode():
            step = self._make_backend(1, tokens).begin_step(plan)
            hidden = self._decoder.forward(
                self._token_ids(plan), self._to_device(plan.positions), step
            )
            sample(self._decoder.logits(hidden[:sampled]), plan)

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class PendingTokens:
    """A launched step; its tokens are on their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._tokens = tokens
        if tokens.is_cuda:
            self._tokens = torch.empty_like(tokens, device="cpu", pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def collect(self) -> I32:
        """Waits for the step. Returns int32 [S]."""
        if self._copied is not None:
            self._copied.synchronize()
        array: I32 = self._tokens.numpy()
        return array


def _open(files: ModelFiles) -> tuple[ModelConfig, Iterator[tuple[str, torch.Tensor]]]:
    if files.kind == "gguf":
        model = GGUFModel(files.path)
        return model.config, model.tensors()
    return ModelConfig.from_folder(files.path), weights.safetensors(files.path)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("device is 'cuda', and torch finds no CUDA device.", param="device")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype
