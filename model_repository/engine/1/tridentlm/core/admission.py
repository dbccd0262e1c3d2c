"""Admission: from the queue into slots, with the pages of what is known of each request.

A row's later pages come one by one as it grows. What is left for newcomers:

    pages   [ held by rows | free or evictable .................................. ]
                             '- growth that running rows are expected to need -' '- for newcomers
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from tridentlm.core.cache import Match
from tridentlm.core.expect import ExpectedLength
from tridentlm.core.kv import KVPages
from tridentlm.core.plan import I32, I64
from tridentlm.core.policy import Entry
from tridentlm.core.queue import WaitingQueue
from tridentlm.core.request import Limits
from tridentlm.core.table import SlotTable

MOST_HELD = 32
"""Requests that one step holds back for a prefix in work before it stops looking further."""

NextPage = tuple[object, bytes]
"""Where a prefix ends in the cache, and the page of tokens that comes next."""


class Admission:
    """`reserve`: every row is expected to grow to its max_tokens, so that no page ever lacks."""

    def __init__(
        self,
        limits: Limits,
        table: SlotTable,
        kv: KVPages,
        queue: WaitingQueue,
        expected: ExpectedLength,
        *,
        reserve: bool,
    ) -> None:
        self.expected = expected
        self.prompt_tokens = 0
        self.prefix_hit_tokens = 0
        self.slots_of_client: Counter[str] = Counter()
        self._limits = limits
        self._table = table
        self._kv = kv
        self._queue = queue
        self._reserve = reserve
        self._count = 0
        self._blocked = (-1, 0)  # the request that did not fit last, and the pages it wants

    def enqueue(self, entry: Entry) -> None:
        """Takes a preempted request's slot away and queues it again."""
        self.leave(entry)
        self._queue.put_back(entry)

    def leave(self, entry: Entry) -> None:
        """A request has given its slot back."""
        self.slots_of_client[entry.request.client] -= 1

    @property
    def count(self) -> int:
        """Admissions so far."""
        return self._count

    def admit(self, running: I64, computing: I64, budget: int) -> list[int]:
        """Gives waiting requests slots while `budget` tokens remain; returns the slots.

        `running`: all running slots; `computing`: those whose prompts are not computed yet. Who
        could share a page that one of these is about to compute waits for it.
        """
        if budget <= 0 or not self._table.num_free:
            return []
        growth = self._growth(running)
        in_work = {self._next_page(slot) for slot in computing.tolist()}
        admitted: list[int] = []
        held = 0
        order = self._queue.ordered(self._count, self.slots_of_client, self._prefix_length)
        for entry in order:
            if budget <= 0 or not self._table.num_free or held == MOST_HELD:
                break
            if self._is_still_blocked(entry, growth):
                break
            before = self._kv.available
            match = self._kv.match(entry)
            page = _following(entry.tokens[:-1], match, self._limits.page_size)
            if page is not None and page in in_work:
                self._kv.cache.unlock(match.handle)
                held += 1
                continue
            wanted = self._expected_pages(entry) - len(match.pages)
            if wanted > self._kv.available - growth:
                self._blocked = entry.request.id, wanted + before - self._kv.available
                self._kv.cache.unlock(match.handle)
                break
            slot = self._place(entry, match)
            growth += self._expected_pages(entry) - int(self._table.num_pages[slot])
            in_work.add(self._next_page(slot))
            budget -= len(entry.tokens) - match.length
            admitted.append(slot)
        for slot in admitted:
            self._queue.remove(int(self._table.ids[slot]))
        return admitted

    def _place(self, entry: Entry, match: Match) -> int:
        missing = self._limits.pages_for(len(entry.tokens)) - len(match.pages)
        pages = np.concatenate([match.pages, self._kv.take(missing)])
        if entry.cached is None:
            entry.cached = match.length
            self.prompt_tokens += len(entry.tokens)
            self.prefix_hit_tokens += match.length
        self._count += 1
        self.slots_of_client[entry.request.client] += 1
        return self._table.admit(entry, pages, match)

    def _is_still_blocked(self, entry: Entry, growth: int) -> bool:
        """Saves a long prompt's lookup at every step while the pool stays full."""
        blocked, wanted = self._blocked
        return entry.request.id == blocked and wanted > self._kv.available - growth

    def _growth(self, running: I64) -> int:
        """Pages that running rows are expected to need beyond those they have."""
        table = self._table
        final: I64 = table.final_len[running]
        if not self._reserve:
            lengths = table.prompt_len[running], table.length[running]
            final = self.expected.final_len(*lengths, final)
        pages = -(-final // self._limits.page_size)
        return int(np.maximum(pages - table.num_pages[running], 0).sum())

    def _expected_pages(self, entry: Entry) -> int:
        prompt_len = len(entry.request.prompt)
        final = prompt_len + entry.request.max_tokens
        if not self._reserve:
            lengths = np.array([prompt_len, len(entry.tokens), final])
            final = int(self.expected.final_len(*lengths))
        return self._limits.pages_for(final)

    def _prefix_length(self, entry: Entry) -> int:
        return self._kv.cache.match_length(entry.tokens[:-1], entry.request.cache_salt)

    def _next_page(self, slot: int) -> NextPage | None:
        """The page that the row computes next, where it will be in the cache."""
        table, size = self._table, self._limits.page_size
        shared = int(table.shared[slot])
        match = Match(table.block_table[slot, :shared], shared * size, table.handles[slot])
        return _following(table.tokens[slot, : table.known[slot]], match, size)


def _following(ids: I32, match: Match, size: int) -> NextPage | None:
    page = ids[match.length : match.length + size]
    return None if match.handle is None or len(page) < size else (match.handle, page.tobytes())
