"""A step's arrays as the CUDA executor sends them: where each lies, how a batch is filled up."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tridentlm.core.plan import I32, StepPlan
from tridentlm.core.request import Limits
from tridentlm.staging import Layout, make_layout

LONGEST_TILE = 64
"""Tokens that a decode's attention takes at a time; of smaller pages it takes one."""

Fields = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and 32-bit types."""


def decode_layout(rows: int, attention: Fields) -> Layout:
    """attention: what the attention of decodes reads beside `context_lens`."""
    integer, real = torch.int32, torch.float32
    fields: Fields = {
        "token_ids": ((rows,), integer),
        "positions": ((rows,), integer),
        "kv_slots": ((rows,), integer),
        "slots": ((rows,), integer),
        "context_lens": ((rows,), integer),
        "temperature": ((rows,), real),
        "uniform": ((rows,), real),
    }
    return make_layout(fields | attention)


def mixed_layout(limits: Limits, attention: Fields) -> Layout:
    tokens, rows = (limits.max_step_tokens,), (limits.max_running,)
    pages = limits.max_running * limits.pages_for(limits.max_tokens_held)
    integer, real = torch.int32, torch.float32
    fields: Fields = {
        "token_ids": (tokens, integer),
        "positions": (tokens, integer),
        "kv_slots": (tokens, integer),
        "token_slots": (tokens, integer),
        "context_lens": (rows, integer),
        "slots": (rows, integer),
        "rows": (rows, integer),
        "temperature": (rows, real),
        "uniform": (rows, real),
        "prefill_pages": ((pages,), integer),
    }
    return make_layout(fields | attention)


def idle_plan() -> StepPlan:
    """A step without rows: a graph's size fills it with padding."""
    none, real = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return StepPlan(
        step=0,
        slots=none,
        query_starts=np.zeros(1, np.int32),
        context_lens=none,
        block_tables=np.zeros((0, 1), np.int32),
        token_ids=none,
        positions=none,
        kv_slots=none.astype(np.int64),
        sampled=none,
        temperature=real,
        top_k=none,
        top_p=real,
        min_p=real,
        seeds=none.astype(np.uint64),
        sample_positions=none.astype(np.int64),
    )


def padded(array: npt.NDArray[Any], size: int, value: int) -> npt.NDArray[Any]:
    """`array`, and rows of `value` up to `size`."""
    if len(array) == size:
        return array
    padded = np.full((size, *array.shape[1:]), value, array.dtype)
    padded[: len(array)] = array
    return padded


def page_list(tables: I32, context_lens: I32, page_size: int) -> tuple[I32, I32]:
    """The rows' pages one after another: (starts int32 [rows + 1], pages)."""
    counts = -(-context_lens // page_size)
    used = np.arange(tables.shape[1]) < counts[:, None]
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), tables[used]


def tiles_of(tables: I32, context_lens: I32, page_size: int, window: int) -> tuple[I32, I32]:
    """The tiles of all rows, end to end, and where each row's start among them [rows + 1].

    A tile is the KV slot of its first token. window: tokens that a query attends to, 0: all.
    """
    tile = min(page_size, LONGEST_TILE)
    counts = -(-context_lens // tile)
    first = np.maximum(context_lens - window, 0) // tile if window else np.zeros_like(counts)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts - first, out=starts[1:])
    number = np.arange(counts.max(initial=0), dtype=np.int32)
    slots = tables[:, number * tile // page_size] * page_size + number * tile % page_size
    return slots[(number >= first[:, None]) & (number < counts[:, None])], starts
