"""From the slot table to a `StepPlan`, in a few gathers and scatters."""

from __future__ import annotations

import numpy as np

from tridentlm.core.plan import FROM_DEVICE, I64, StepPlan
from tridentlm.core.slotextras import plan_extras
from tridentlm.core.table import SlotTable


def plan_step(table: SlotTable, slots: I64, take: I64, step: int) -> StepPlan:
    """The step that computes the next `take[i]` tokens of each of `slots`, noted as launched."""
    page_size = table.page_size
    ends = np.cumsum(take)
    starts = ends - take
    first = table.computed[slots]
    context = first + take
    row = np.repeat(np.arange(len(slots)), take)
    positions = np.arange(ends[-1]) - (starts - first)[row]
    slot = slots[row]
    tokens = table.tokens[slot, positions]
    pages = table.block_table[slot, positions // page_size].astype(np.int64)
    width = -(-int(context.max()) // page_size)
    sampled = np.flatnonzero(context == table.length[slots])
    sampling = slots[sampled]
    extras = None
    if table.has_extras[slots].any():
        extras = plan_extras(table, slots, starts, context, sampled)
    table.in_flight[slots] += 1
    table.computed[slots] = context
    table.length[sampling] += 1
    return StepPlan(
        step=step,
        slots=slots.astype(np.int32),
        query_starts=np.concatenate([starts, ends[-1:]]).astype(np.int32),
        context_lens=context.astype(np.int32),
        block_tables=table.block_table[slots, :width],
        token_ids=np.where(positions < table.known[slot], tokens, np.int32(FROM_DEVICE)),
        positions=positions.astype(np.int32),
        kv_slots=pages * page_size + positions % page_size,
        sampled=sampled.astype(np.int32),
        temperature=table.temperature[sampling],
        top_k=table.top_k[sampling],
        top_p=table.top_p[sampling],
        min_p=table.min_p[sampling],
        seeds=table.seeds[sampling],
        sample_positions=context[sampled],
        extras=extras,
    )
