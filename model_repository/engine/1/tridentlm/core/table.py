"""The slot table: all state of the running requests, one numpy row or entry per slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tridentlm.core.cache import Match
from tridentlm.core.plan import I32, I64
from tridentlm.core.policy import Entry
from tridentlm.core.request import Limits
from tridentlm.core.slotextras import SlotExtras

NO_ID = -1
NO_TOKEN = -1


class SlotTable:
    """Struct of arrays over R = max_running slots, so that a step is a few gathers and scatters.

    A sequence's tokens, and how far each party has come with them (steps in flight run ahead):

        prompt . . . . . . . . | output . . . . . . . . . . . . . . . . . . .|
        0                  prompt_len                                     final_len
        |--- computed: KV stored by launched steps ---->|
        |--- length: exist, or will when launched steps end ---->|
        |--- known: their values are in `tokens` ---->|

    computed < length <= final_len, and known <= length; a sequence whose length is final_len needs
    no further step. Of its `num_pages` pages the first `shared` are the prefix cache's, locked
    through `handles`; the others are its own. Arrays not annotated otherwise are int64[R].
    """

    def __init__(self, limits: Limits) -> None:
        rows, held = limits.max_running, limits.max_tokens_held
        self.page_size = limits.page_size
        self.tokens: I32 = np.zeros((rows, held), np.int32)  # [R, most tokens of a request]
        self.block_table: I32 = np.zeros((rows, limits.pages_for(held)), np.int32)
        self.ids: I64 = np.full(rows, NO_ID, np.int64)
        self.prompt_len: I64 = np.zeros(rows, np.int64)
        self.final_len: I64 = np.zeros(rows, np.int64)
        self.computed: I64 = np.zeros(rows, np.int64)
        self.length: I64 = np.zeros(rows, np.int64)
        self.known: I64 = np.zeros(rows, np.int64)
        self.num_pages: I64 = np.zeros(rows, np.int64)
        self.shared: I64 = np.zeros(rows, np.int64)
        self.arrival: I64 = np.zeros(rows, np.int64)
        self.priority: I64 = np.zeros(rows, np.int64)
        self.in_flight: I64 = np.zeros(rows, np.int64)  # launched steps that contain the slot
        self.finished: npt.NDArray[np.bool_] = np.zeros(rows, np.bool_)
        self.leaving: npt.NDArray[np.bool_] = np.zeros(rows, np.bool_)  # preempted, still in flight
        self.deadline = np.full(rows, np.inf)
        self.temperature = np.zeros(rows, np.float32)
        self.top_k: I32 = np.zeros(rows, np.int32)
        self.top_p = np.zeros(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.seeds = np.zeros(rows, np.uint64)
        self.has_extras: npt.NDArray[np.bool_] = np.zeros(rows, np.bool_)
        self.extras = SlotExtras(rows, limits.vocab_size)
        self.stop_ids: I32 = np.full((rows, 1), NO_TOKEN, np.int32)  # [R, most stop ids so far]
        self.handles: list[Any] = [None] * rows  # the prefix cache's
        self.entries: list[Entry | None] = [None] * rows
        self._free = list(range(rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def admit(self, entry: Entry, pages: I32, match: Match) -> int:
        """Gives a request a slot; `pages` hold all its tokens so far, those of `match` first."""
        slot = self._free.pop()
        request, tokens = entry.request, entry.tokens
        self.entries[slot] = entry
        self.tokens[slot, : len(tokens)] = tokens
        self.block_table[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)
        self.shared[slot] = len(match.pages)
        self.handles[slot] = match.handle
        self.ids[slot] = request.id
        self.arrival[slot] = entry.arrival
        self.priority[slot] = request.priority
        self.prompt_len[slot] = len(request.prompt)
        self.length[slot] = self.known[slot] = len(tokens)
        self.final_len[slot] = len(request.prompt) + request.max_tokens
        self.computed[slot] = match.length
        self.deadline[slot] = request.deadline
        self.temperature[slot] = request.temperature
        self.top_k[slot] = request.top_k
        self.top_p[slot] = request.top_p
        self.min_p[slot] = request.min_p
        self.seeds[slot] = request.seed
        self._set_stop_ids(slot, request.stop_token_ids)
        self.has_extras[slot] = request.extras is not None
        if request.extras is not None:
            self.extras.admit(slot, request.extras, known_output=len(tokens) - len(request.prompt))
        return slot

    def _set_stop_ids(self, slot: int, stop_ids: frozenset[int]) -> None:
        rows, width = self.stop_ids.shape
        if len(stop_ids) > width:
            more = np.full((rows, len(stop_ids) - width), NO_TOKEN, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, more], axis=1)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = sorted(stop_ids)

    def release(self, slot: int) -> None:
        self.block_table[slot, : self.num_pages[slot]] = 0
        self.num_pages[slot] = self.shared[slot] = 0
        self.ids[slot] = NO_ID
        self.finished[slot] = self.leaving[slot] = False
        self.handles[slot] = self.entries[slot] = None
        self._free.append(slot)

    def pages(self, slot: int) -> I32:
        return self.block_table[slot, : self.num_pages[slot]]

    def check(self) -> I32:
        """Raises AssertionError unless every slot is in order; returns the pages slots own."""
        used = np.flatnonzero(self.ids != NO_ID)
        free = np.array(self._free, np.int64)
        assert np.array_equal(np.sort(np.concatenate([used, free])), np.arange(len(self.ids)))
        assert len(np.unique(self.ids[used])) == len(used), "two slots hold one request"
        assert not self.num_pages[free].any()
        assert not self.in_flight[free].any()
        assert (self.shared[used] * self.page_size <= self.computed[used]).all()
        assert (self.computed[used] < self.length[used]).all()
        assert (self.known[used] <= self.length[used]).all()
        assert (self.length[used] <= self.final_len[used]).all()
        assert (self.num_pages[used] * self.page_size >= self.computed[used]).all()
        live = used[~self.finished[used]]
        assert (self.in_flight[live] >= (self.length - self.known)[live]).all()
        idle = used[(self.finished | self.leaving)[used] & (self.in_flight[used] == 0)]
        assert not len(idle), f"request {self.ids[idle]} should have been retired"
        columns = np.arange(self.block_table.shape[1])
        owned = (columns >= self.shared[:, None]) & (columns < self.num_pages[:, None])
        assert not self.block_table[columns >= self.num_pages[:, None]].any()
        return self.block_table[owned]
