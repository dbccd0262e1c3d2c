"""Attention by FlashInfer, for CUDA.

step:    [ decode rows: one query each            | prefill rows: a chunk each     ]
kernel:  `decode_attention`                          `rope_store`, then
         or `rope_store`, then `XqaDecode`           `Prefill`, causal to the end of each context

Both decode kernels read their metadata from buffers at fixed addresses, so a CUDA Graph that holds
them serves every step. Ours is the faster one for many rows, and there for every model; with an FP8
cache XQA is (an H200, 256 rows of the offline job: 84 us a layer against 160).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import flashinfer
import numpy as np
import numpy.typing as npt
import torch
from flashinfer.decode import xqa_batch_decode_with_kv_cache

from tridentlm.backends.base import KVCache
from tridentlm.backends.decode_attention import DecodeRows, DecodeWorkers, decode_attention
from tridentlm.backends.kernels import rope_store
from tridentlm.core.plan import F32, I32
from tridentlm.core.request import Limits
from tridentlm.models.config import ModelConfig
from tridentlm.models.rotary import rotary_table
from tridentlm.steparrays import LONGEST_TILE, Fields, tiles_of

logger = logging.getLogger(__name__)

LAYOUT = "HND"
"""The order in a page: KV heads, tokens, head_dim."""

WORKSPACE_BYTES = 256 * 2**20
"""What FlashInfer advises, and what XQA's partial results and semaphores fit into."""


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
    """What the partial results of one prefill take that is split over so many processors.

    FlashInfer (`PrefillPlan`) keeps room for one float32 output and its sum per head and query of
    each tile: of `rows` short chunks, or as many of 128 queries as fill each processor twice.
    """
    group = config.num_heads // config.num_kv_heads
    tile = 16 if group <= 16 else 64
    short = (-(-rows * group // tile) + rows) * tile
    chunks = 2 * processors // config.num_kv_heads * 128
    return config.num_heads * max(short, chunks) * (config.head_dim + 1) * 4


class FlashInferBackend:
    """The KV cache, the workspaces and what all steps share.

    The cache has its heads first. Its last page is nobody's: padding rows of a graph write there.
    """

    def __init__(self, cache: KVCache, dtype: torch.dtype, limits: Limits) -> None:
        self.cache, self.config, self.dtype = cache, cache.config, dtype
        self.device, self.limits = cache.data.device, limits
        self.layers = [(k, v) for k, v in cache.data]
        self.rotary = rotary_table(cache.config, limits.max_model_len, self.device)
        # Tokens before its own that a query attends to; -1: all.
        self.window_left = cache.config.window - 1
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        size = max(WORKSPACE_BYTES, split_bytes(self.config, limits.max_running, processors))
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)
        sizes = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        self.workers = DecodeWorkers(limits.max_running, *sizes, self.device)
        self.is_fp8 = cache.data.dtype.itemsize == 1
        self.uses_xqa = self.is_fp8 and self._try_xqa()

    @property
    def spare_page(self) -> int:
        return self.cache.num_pages - 1

    def decode_fields(self, rows: int) -> Fields:
        """What decodes of up to `rows` rows read, beside `context_lens`."""
        tokens, page_size = self.limits.max_tokens_held, self.limits.page_size
        if self.uses_xqa:
            return {"pages": ((rows, self.limits.pages_for(tokens)), torch.int32)}
        tiles = rows * -(-tokens // min(page_size, LONGEST_TILE))
        return {"tile_starts": ((rows + 1,), torch.int32), "tile_slots": ((tiles,), torch.int32)}

    def decode_arrays(self, tables: I32, context_lens: I32) -> dict[str, I32]:
        """The `decode_fields` of these rows."""
        if self.uses_xqa:
            return {"pages": tables}
        slots, starts = tiles_of(tables, context_lens, self.limits.page_size, self.config.window)
        return {"tile_slots": slots, "tile_starts": starts}

    def decode(self, fields: Mapping[str, torch.Tensor], rows: int) -> XqaDecode | DecodeRows:
        """How `rows` rows attend whose arrays are in `fields`, on the device."""
        context_lens = fields["context_lens"][:rows]
        if self.uses_xqa:
            return XqaDecode(self, fields["pages"][:rows], context_lens)
        return DecodeRows(fields["tile_slots"], fields["tile_starts"], context_lens)

    def _try_xqa(self) -> bool:
        heads, head_dim = self.config.num_heads, self.config.head_dim
        # It keeps semaphores in a workspace of its own, which must be 0 between its runs.
        self.xqa_workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        one = torch.ones(1, dtype=torch.int32, device=self.device)
        q = torch.zeros(1, heads, head_dim, dtype=self.dtype, device=self.device)
        try:
            XqaDecode(self, (one - 1)[:, None], one).run(q, 0, torch.empty_like(q))
            torch.cuda.synchronize()
        except Exception as error:
            logger.info("No XQA kernel for this model (%s).", error)
            return False
        return True


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
    """Implements `base.StepAttention` for `decodes` decode rows, then the rows of `prefill`.

    decode: how the decode rows attend. out [T, heads * head_dim]: where each layer's results go,
    None: into memory of their own.
    """

    def __init__(
        self,
        backend: FlashInferBackend,
        positions: torch.Tensor,
        kv_slots: torch.Tensor,
        decode: XqaDecode | DecodeRows | None,
        decodes: int,
        prefill: Prefill | None,
        out: torch.Tensor | None = None,
    ) -> None:
        self._backend, self._positions, self._kv_slots = backend, positions, kv_slots
        self._out = out
        self._decode, self._decodes, self._prefill = decode, decodes, prefill

    def attend(self, layer: int, qkv: torch.Tensor, qk_norm: torch.Tensor | None) -> torch.Tensor:
        backend, decodes = self._backend, self._decodes
        config = backend.config
        turned = qk_norm, config.rms_norm_eps, backend.rotary
        size = (len(qkv), config.num_heads, config.head_dim)
        out = qkv.new_empty(size) if self._out is None else self._out.view(size)
        first = 0
        if isinstance(self._decode, DecodeRows):
            first = decodes
            decode_attention(
                qkv[:first],
                *turned,
                *backend.layers[layer],
                self._decode,
                out[:first],
                backend.workers,
                config.window,
            )
        if first < len(qkv):
            slots = self._positions[first:], self._kv_slots[first:]
            q = rope_store(qkv[first:], *turned, *slots, *backend.layers[layer])
        if isinstance(self._decode, XqaDecode):
            self._decode.run(q[:decodes], layer, out[:decodes])
        if self._prefill is not None:
            self._prefill.run(q[decodes - first :], layer, out[decodes:])
        return out.view(len(out), -1)
