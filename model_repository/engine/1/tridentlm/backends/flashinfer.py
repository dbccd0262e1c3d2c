"""Attention by FlashInfer, for CUDA.

step:    [ decode rows: one query each          | prefill rows: a chunk each     ]
kernel:  `PlannedDecode` or `XqaDecode`           `Prefill`, causal to the end of each context

Both decode kernels read their metadata from buffers at fixed addresses, so a CUDA Graph that holds
them serves every step. XQA needs no plan and is the faster one for few rows; the planned kernel
balances rows of unlike length over the processors and is the faster one for many.
"""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import flashinfer
import numpy as np
import numpy.typing as npt
import torch
from flashinfer.decode import xqa_batch_decode_with_kv_cache

from tridentlm.backends.base import KVCache
from tridentlm.backends.kernels import rope_store
from tridentlm.core.plan import F32, I32
from tridentlm.core.request import Limits
from tridentlm.errors import InvalidRequest
from tridentlm.models.config import ModelConfig
from tridentlm.models.rotary import rotary_table

logger = logging.getLogger(__name__)

LAYOUT = "HND"
"""The order in a page: KV heads, tokens, head_dim."""

WORKSPACE_BYTES = 256 * 2**20
"""What FlashInfer advises, and what XQA's partial results and semaphores fit into."""

XQA_MAX_ROWS = 32
"""Most rows for which XQA decodes, where the planned kernel could. On an H200 with pages of 64 and
contexts of 283 to 1,416 tokens: 13 us a layer against 15 at 4 rows, 40 both at 32, 237 against 223
at 256; with short contexts XQA is slower from 40 rows on."""


def unsupported(config: ModelConfig, dtype: torch.dtype) -> str:
    """Why FlashInfer has no kernel for this model, or an empty string."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer computes in bfloat16 or float16, not {str(dtype)[6:]}"
    if config.head_dim not in (64, 128, 256):
        return f"FlashInfer has no kernel for heads of size {config.head_dim}"
    if config.window and len(config.windowed_layers) < config.num_layers:
        return "FlashInfer's attention is planned once for all layers, some of which have a window"
    return ""


def cut_tail(weights: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: F32) -> torch.Tensor:
    """A `sampling.CutTail` without a sort. Of equal weights at the edge all are kept."""
    device, vocab = weights.device, weights.shape[-1]
    limits = np.where((top_k > 0) & (top_k < vocab), top_k, vocab).astype(np.int32)
    if (limits < vocab).any():
        weights = flashinfer.sampling.top_k_renorm_probs(
            weights, torch.from_numpy(limits).to(device, non_blocking=True)
        )
    else:
        weights = weights / weights.sum(-1, keepdim=True)
    if (top_p < 1).any():
        share = torch.from_numpy(np.ascontiguousarray(top_p)).to(device, non_blocking=True)
        weights = flashinfer.sampling.top_p_renorm_probs(weights, share)
    return weights


def split_bytes(config: ModelConfig, rows: int, processors: int) -> int:
    """What the partial results of one attention take that is split over so many processors.

    FlashInfer (`PrefillPlan`) keeps room for one float32 output and its sum per head and query of
    each tile: the tiles of `rows` decodes, or as many of 128 queries as fill every processor twice.
    """
    group = config.num_heads // config.num_kv_heads
    tile = 16 if group <= 16 else 64
    decodes = (-(-rows * group // tile) + rows) * tile
    chunks = 2 * processors // config.num_kv_heads * 128
    return config.num_heads * max(decodes, chunks) * (config.head_dim + 1) * 4


class FlashInferBackend:
    """The KV cache, the workspaces and what all steps share.

    The cache has its heads first. Its last page is nobody's: padding rows of a graph write there.
    """

    def __init__(self, cache: KVCache, dtype: torch.dtype, limits: Limits) -> None:
        self.cache, self.config, self.dtype = cache, cache.config, dtype
        self.device = cache.data.device
        self.layers = [(k, v) for k, v in cache.data]
        self.rotary = rotary_table(cache.config, limits.max_model_len, self.device)
        # Tokens before its own that a query attends to; -1: all.
        self.window_left = cache.config.window - 1
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        size = max(WORKSPACE_BYTES, split_bytes(self.config, limits.max_running, processors))
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)
        # XQA keeps semaphores in its own, which must be 0 between its runs.
        self.xqa_workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self.has_xqa = self._try_xqa()
        self.is_fp8 = cache.data.dtype.itemsize == 1
        if self.is_fp8 and not self.has_xqa:
            raise InvalidRequest(
                "There is no decode kernel for this model with an fp8 KV cache.", param="kv_dtype"
            )

    @property
    def spare_page(self) -> int:
        return self.cache.num_pages - 1

    def uses_xqa(self, rows: int) -> bool:
        """Which kernel decodes `rows` rows."""
        return self.has_xqa and (self.is_fp8 or rows <= XQA_MAX_ROWS)

    def _try_xqa(self) -> bool:
        heads, head_dim = self.config.num_heads, self.config.head_dim
        one = torch.ones(1, dtype=torch.int32, device=self.device)
        q = torch.zeros(1, heads, head_dim, dtype=self.dtype, device=self.device)
        try:
            XqaDecode(self, (one - 1)[:, None], one).run(q, 0, torch.empty_like(q))
            torch.cuda.synchronize()
        except Exception as error:
            logger.info("No XQA kernel for this model (%s); decoding by plan.", error)
            return False
        return True


class Decode(Protocol):
    """Attention of rows with one query each."""

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        """q, out [rows, heads, head_dim]."""
        ...


class XqaDecode:
    """block_tables int32 [rows, most pages], context_lens int32 [rows], on the device."""

    def __init__(
        self, backend: FlashInferBackend, block_tables: torch.Tensor, context_lens: torch.Tensor
    ) -> None:
        self._backend, self._block_tables = backend, block_tables
        self._context_lens = context_lens
        self._most = block_tables.shape[1] * backend.cache.page_size

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        xqa_batch_decode_with_kv_cache(
            q,
            self._backend.layers[layer],
            self._backend.xqa_workspace,
            self._block_tables,
            self._context_lens,
            self._most,
            bmm1_scale=q.shape[-1] ** -0.5,
            bmm2_scale=1.0,
            window_left=self._backend.window_left,
            out=out,
            kv_layout=LAYOUT,
        )


class PlannedDecode:
    """Tensor-core decode for a fixed number of rows, planned on the CPU before each step.

    indptr int32 [rows + 1], last_page_lens [rows] and pages (the rows' pages one after another) are
    the buffers that its kernels read.
    """

    def __init__(
        self,
        backend: FlashInferBackend,
        indptr: torch.Tensor,
        pages: torch.Tensor,
        last_page_lens: torch.Tensor,
    ) -> None:
        self._backend, self._indptr, self._pages = backend, indptr, pages
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            backend.workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=last_page_lens,
            backend="fa2",
        )
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._first = True

    def plan(self, indptr: I32, last_page_lens: I32) -> None:
        """Splits the rows over the processors. The buffers are filled by the caller.

        The plan travels through one pinned buffer, so the one before must have left it.
        """
        self._planned.synchronize()
        config, cache = self._backend.config, self._backend.cache
        host, last = torch.from_numpy(indptr), torch.from_numpy(last_page_lens)
        sizes = (config.num_heads, config.num_kv_heads, config.head_dim, cache.page_size)
        options = {
            "q_data_type": self._backend.dtype,
            "kv_data_type": cache.data.dtype,
            "window_left": self._backend.window_left,
        }
        if self._first:
            used = self._pages[: int(indptr[-1])].clone()
            self._wrapper.plan(host, used, last, *sizes, **options)
            self._first = False
        flashinfer.fast_decode_plan(
            self._wrapper,
            self._indptr,
            self._pages,
            last,
            *sizes,
            **options,
            global_override_indptr_cpu=host,
        )
        self._planned.record()

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        self._wrapper.run(q, self._backend.layers[layer], out=out)


class Prefill:
    """Causal attention of chunks over their contexts. One object serves all steps, in turn."""

    def __init__(self, backend: FlashInferBackend) -> None:
        self._backend = backend
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pages: torch.Tensor | None = None
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            backend.workspace, LAYOUT, backend=_prefill_kernel(backend.config.head_dim)
        )

    def plan(self, query_starts: I32, indptr: I32, context_lens: I32, pages: torch.Tensor) -> None:
        """query_starts [rows + 1] from 0; pages: on the device, the rows' pages in order."""
        self._planned.synchronize()
        config, page_size = self._backend.config, self._backend.cache.page_size
        if self._backend.is_fp8:
            # Its kernels read bfloat16: `run` copies these rows' pages, in order.
            self._pages = pages
            pages = torch.arange(len(pages), dtype=torch.int32, device=pages.device)
        self._wrapper.plan(
            torch.from_numpy(query_starts),
            torch.from_numpy(indptr),
            pages,
            torch.from_numpy((context_lens - 1) % page_size + 1),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            page_size,
            causal=True,
            window_left=self._backend.window_left,
            q_data_type=self._backend.dtype,
            kv_data_type=self._backend.dtype,
            seq_lens=torch.from_numpy(context_lens),
            max_token_per_sequence=int(np.diff(query_starts).max()),
        )
        self._planned.record()

    def run(self, q: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        """q, out [T, heads, head_dim]."""
        keys, values = self._backend.layers[layer]
        if self._pages is not None:
            keys, values = (self._widened(x, self._pages) for x in (keys, values))
        self._wrapper.run(q, (keys, values), out=out)

    def _widened(self, cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        picked = cache.view(torch.uint8).index_select(0, pages)
        return picked.view(cache.dtype).to(self._backend.dtype)


@functools.cache
def _prefill_kernel(head_dim: int) -> str:
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    return "fa3" if is_hopper and head_dim == 128 else "fa2"


class FlashInferStep:
    """Implements `base.StepAttention` for `decodes` decode rows, then the rows of `prefill`."""

    def __init__(
        self,
        backend: FlashInferBackend,
        positions: torch.Tensor,
        kv_slots: torch.Tensor,
        decode: Decode | None,
        decodes: int,
        prefill: Prefill | None,
    ) -> None:
        self._backend, self._positions, self._kv_slots = backend, positions, kv_slots
        self._decode, self._decodes, self._prefill = decode, decodes, prefill

    def attend(self, layer: int, qkv: torch.Tensor, qk_norm: torch.Tensor | None) -> torch.Tensor:
        backend = self._backend
        q = rope_store(
            qkv,
            qk_norm,
            backend.config.rms_norm_eps,
            backend.rotary,
            self._positions,
            self._kv_slots,
            *backend.layers[layer],
        )
        out = torch.empty_like(q)
        if self._decode is not None:
            self._decode.run(q[: self._decodes], layer, out[: self._decodes])
        if self._prefill is not None:
            self._prefill.run(q[self._decodes :], layer, out[self._decodes :])
        return out.view(len(out), -1)
