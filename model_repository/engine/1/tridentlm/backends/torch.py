"""Paged attention in plain torch: the reference for every backend, and what a CPU runs.

step:   [ decode rows: one query each      | prefill rows: a chunk each        ]
work:   groups of rows of like context,      one row at a time, causal to the
        gathered and attended together       end of its context

A layer with a sliding window masks what lies before it; that is still gathered, its pages are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tridentlm.backends.base import KVCache, Rounded
from tridentlm.core.plan import I32, StepPlan
from tridentlm.models.config import Experts
from tridentlm.models.fp8 import round_rows, scaled_product
from tridentlm.models.moe import grouped_product
from tridentlm.models.rotary import rotary_frequencies

GROUP_TOKENS = 16384
"""Most tokens of KV that one group of decode rows gathers, so that its copy stays in the caches."""

SMALL_CONTEXT = 256
"""Below this many tokens a row joins any group: padding costs less than a group of its own."""


class TorchOps:
    """Implements `base.Ops`. Overwrites nothing."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype) * weight

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + delta
        return x, self.rms_norm(x, weight, eps)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def round_rows(self, x: torch.Tensor, input_scale: torch.Tensor | None) -> Rounded:
        return round_rows(x, input_scale)

    def add_rms_norm_rounded(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        input_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Rounded]:
        x, normed = self.add_rms_norm(x, delta, weight, eps)
        return x, self.round_rows(normed, input_scale)

    def silu_mul_rounded(self, gate_up: torch.Tensor, input_scale: torch.Tensor | None) -> Rounded:
        return self.round_rows(self.silu_mul(gate_up), input_scale)

    def scaled_linear(
        self, x: Rounded, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        return scaled_product(x, weight, scale, dtype)

    def mix_experts(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        experts: Experts,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(experts.per_token)
        if experts.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        ranked, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(experts.count, device=x.device)
        ends = torch.searchsorted(ranked, numbers, right=True, out_int32=True)
        rows = x.index_select(0, order // experts.per_token)
        inner = self.silu_mul(grouped_product(rows, gate_up, ends))
        out = grouped_product(inner, down, ends)
        # Back in the tokens' order, so that a token's sum does not depend on its neighbours.
        unsorted = torch.empty_like(out).index_copy_(0, order, out)
        by_token = unsorted.view(*chosen.shape, x.shape[1])
        return torch.bmm(weights.to(x.dtype)[:, None], by_token).squeeze(1)


class TorchBackend:
    """Works on any device. Decides everything on the CPU from the plan, so nothing waits for it."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.device = cache.data.device
        self._ops = TorchOps()
        self._frequencies = rotary_frequencies(cache.config).to(self.device)

    def begin_step(self, plan: StepPlan) -> TorchStep:
        """Prepares what all layers of the step share."""
        return TorchStep(self._cache, plan, self._ops, self._frequencies)


@dataclass(frozen=True, slots=True)
class _Masks:
    """0 or -inf for each pair of query and key, in layers without and with a window.

    None: plain causal attention.
    """

    whole: torch.Tensor | None
    windowed: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    rows: torch.Tensor | None  # [n] rows of the step, None: the first n in order
    count: int
    pages: torch.Tensor  # [n * pages per row]
    masks: _Masks  # [n, 1, 1, padded context] each


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    start: int
    stop: int
    context: int
    pages: torch.Tensor | None  # None: the chunk is the whole context
    masks: _Masks  # [stop - start, context] each


class TorchStep:
    """One step's rows, prepared once and used by every layer."""

    def __init__(
        self, cache: KVCache, plan: StepPlan, ops: TorchOps, frequencies: torch.Tensor
    ) -> None:
        self._config, self._ops = cache.config, ops
        self._data = cache.data
        self._device, self._dtype = cache.data.device, cache.data.dtype
        self._page_size = cache.page_size
        self._kv_slots = self._to_device(plan.kv_slots)
        angles = self._to_device(plan.positions)[:, None].float() * frequencies
        magnitude = self._config.rope.magnitude
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        # The first half of a head is rotated by -sin, the second by +sin. [T, 1, head_dim] each.
        self._cos = torch.cat((cos, cos), -1).to(self._dtype)[:, None]
        self._signed_sin = torch.cat((-sin, sin), -1).to(self._dtype)[:, None]
        lengths = np.diff(plan.query_starts)
        decodes = int((lengths != 1).argmax()) if (lengths != 1).any() else plan.num_rows
        groups = decode_groups(plan.context_lens[:decodes])
        self._groups = [self._decode_group(plan, rows, len(groups) == 1) for rows in groups]
        self._prefills = [self._prefill_row(plan, row) for row in range(decodes, plan.num_rows)]

    def attend(self, layer: int, qkv: torch.Tensor, qk_norm: torch.Tensor | None) -> torch.Tensor:
        # q and k heads lie side by side, so norm and rotation treat them as one tensor.
        heads = self._config.num_heads
        rotated = heads + self._config.num_kv_heads
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if qk_norm is not None:
            qk = self._ops.rms_norm(qk, qk_norm, self._config.rms_norm_eps)
        # Pairs (i, i + head_dim / 2).
        qk = torch.addcmul(qk * self._cos, qk.roll(qk.shape[-1] // 2, -1), self._signed_sin)
        q, k = qk[:, :heads], qk[:, heads:]
        cache = self._data[layer]
        flat = cache.view(2, -1, *cache.shape[3:])
        flat[0].index_copy_(0, self._kv_slots, k)
        flat[1].index_copy_(0, self._kv_slots, v)
        is_windowed = layer in self._config.windowed_layers
        if len(self._groups) == 1 and not self._prefills:
            return self._decode(self._groups[0], cache, q, is_windowed)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for group in self._groups:
            if group.rows is None:
                out[: group.count] = self._decode(group, cache, q[: group.count], is_windowed)
            else:
                attended = self._decode(group, cache, q[group.rows], is_windowed)
                out.index_copy_(0, group.rows, attended)
        for row in self._prefills:
            part = slice(row.start, row.stop)
            mask = row.masks.windowed if is_windowed else row.masks.whole
            out[part] = self._prefill(row, mask, cache, q[part], k[part], v[part])
        return out

    def _decode(
        self, group: _DecodeGroup, cache: torch.Tensor, q: torch.Tensor, is_windowed: bool
    ) -> torch.Tensor:
        """q [n, heads, head_dim]. The query heads that share a KV head act as its queries."""
        n, kv_heads, head_dim = len(q), cache.shape[3], q.shape[2]
        gathered = cache.view(2, len(cache[0]), -1).index_select(1, group.pages)
        k, v = gathered.view(2, n, -1, kv_heads, head_dim).transpose(2, 3)
        q = q.reshape(n, kv_heads, -1, head_dim)
        mask = group.masks.windowed if is_windowed else group.masks.whole
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(n, -1)

    def _prefill(
        self,
        row: _PrefillRow,
        mask: torch.Tensor | None,
        cache: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """q [n, heads, head_dim]; k, v [n, kv_heads, head_dim] of the chunk alone."""
        n, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        if row.pages is not None:
            gathered = cache.view(2, len(cache[0]), -1).index_select(1, row.pages)
            k, v = gathered.view(2, -1, kv_heads, head_dim)[:, : row.context]
        # [kv_heads, heads that share it, tokens, head_dim]; K and V are broadcast, not copied.
        group = heads // kv_heads
        q = q.view(n, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        k, v = (x.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))
        if mask is not None and k.is_cuda:
            # With 64 n + 1 queries torch 2.11's masked float32 kernel reads broadcast ones wrongly.
            k, v = k.contiguous(), v.contiguous()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return out.permute(2, 0, 1, 3).reshape(n, -1)

    def _decode_group(
        self, plan: StepPlan, rows: npt.NDArray[np.intp], alone: bool
    ) -> _DecodeGroup:
        if alone:
            rows = np.arange(len(rows))
        lengths = plan.context_lens[rows]
        width = -(-int(lengths.max()) // self._page_size)
        keys = np.arange(width * self._page_size)
        hidden = keys >= lengths[:, None]
        before = keys < lengths[:, None] - self._config.window
        return _DecodeGroup(
            rows=None if alone else self._to_device(rows),
            count=len(rows),
            pages=self._to_device(plan.block_tables[rows, :width].ravel()),
            masks=_Masks(
                self._decode_mask(hidden),
                self._decode_mask(hidden | before) if self._config.window else None,
            ),
        )

    def _decode_mask(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, None]
        return self._to_device(mask).to(self._dtype)

    def _prefill_row(self, plan: StepPlan, row: int) -> _PrefillRow:
        start, stop = int(plan.query_starts[row]), int(plan.query_starts[row + 1])
        context, window = int(plan.context_lens[row]), self._config.window
        is_whole = context == stop - start
        masks = _Masks(
            None if is_whole else self._prefill_mask(stop - start, context, context),
            self._prefill_mask(stop - start, context, window)
            if window and not (is_whole and context <= window)
            else None,
        )
        width = -(-context // self._page_size)
        pages = None if is_whole else self._to_device(plan.block_tables[row, :width])
        return _PrefillRow(start, stop, context, pages, masks)

    def _prefill_mask(self, queries: int, context: int, window: int) -> torch.Tensor:
        """For the last `queries` positions of `context`, each seeing `window` tokens."""
        visible = torch.ones(queries, context, dtype=torch.bool, device=self._device)
        last = context - queries
        visible = visible.tril_(last).triu_(last - window + 1)
        return torch.zeros_like(visible, dtype=self._dtype).masked_fill_(~visible, -torch.inf)

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def decode_groups(context_lens: I32) -> list[npt.NDArray[np.intp]]:
    """Splits decode rows into groups whose contexts are of like length, longest first.

    A group is padded to its longest context. So a row joins unless its own is less than half of
    that, or the group's gathered KV would exceed GROUP_TOKENS.
    """
    order = np.argsort(-context_lens, kind="stable")
    groups: list[npt.NDArray[np.intp]] = []
    start = 0
    for index in range(1, len(order) + 1):
        longest = int(context_lens[order[start]])
        if index < len(order):
            full = longest * (index - start + 1) > GROUP_TOKENS
            short = 2 * int(context_lens[order[index]]) < longest and longest > SMALL_CONTEXT
            if not (full or short):
                continue
        groups.append(order[start:index])
        start = index
    return groups
