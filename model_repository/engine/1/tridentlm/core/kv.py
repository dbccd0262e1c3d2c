"""Whose every page is: the pool, the prefix cache and the slot table, kept in step.

A running row's pages, and the remap rule for a page that the cache got from somebody else meanwhile
(two requests computed the same prefix side by side):

    row    [ shared, locked by the handle | own, full | own, being filled ]
    insert                                 '-> the cache takes it, or has page q for these tokens:
                                               the row reads q from the next plan on, and its own
                                               page is freed once no launched step reads it
"""

from __future__ import annotations

from collections import deque

import numpy as np

from tridentlm.core.cache import NO_PAGES, Match, PrefixCache
from tridentlm.core.pages import PagePool
from tridentlm.core.plan import I32, I64
from tridentlm.core.policy import Entry
from tridentlm.core.request import Limits
from tridentlm.core.table import NO_ID, SlotTable


class KVPages:
    def __init__(self, limits: Limits, table: SlotTable, cache: PrefixCache) -> None:
        self.cache = cache
        self.pool = PagePool(limits.num_pages)
        self._limits = limits
        self._table = table
        self._replaced: deque[tuple[int, I32]] = deque()  # last step that reads them, pages

    @property
    def available(self) -> int:
        """Pages that `take` could give now."""
        return self.pool.num_free + self.cache.evictable

    def take(self, n: int) -> I32:
        """`n` pages, int32[n], out of the cache where the pool is empty; `n <= available`."""
        if n > self.pool.num_free:
            self.pool.free(self.cache.evict_until(n - self.pool.num_free))
        return self.pool.allocate(n)

    def match(self, entry: Entry) -> Match:
        """What is cached of a request, locked. One token at least remains to be computed."""
        reusable = entry.tokens[:0] if _wants_prompt_rows(entry) else entry.tokens[:-1]
        match = self.cache.match_prefix(reusable, entry.request.cache_salt)
        self.cache.lock(match.handle)
        return match

    def grow(self, slots: I64) -> None:
        """Gives one more page to each of `slots`."""
        table = self._table
        table.block_table[slots, table.num_pages[slots]] = self.take(len(slots))
        table.num_pages[slots] += 1

    def share(self, slot: int, step: int) -> None:
        """Puts the row's full pages into the cache; `step` is the last launched that reads them."""
        table, size = self._table, self._limits.page_size
        full = min(int(table.computed[slot]), int(table.known[slot])) // size
        shared, old = int(table.shared[slot]), table.handles[slot]
        if full <= shared:
            return
        match = self._insert(slot, full)
        count = len(match.pages)
        if not count:
            return
        row = table.block_table[slot]
        replaced = row[shared:count][row[shared:count] != match.pages[shared:]]
        if len(replaced):
            self._replaced.append((step, replaced))
        row[:count] = match.pages
        self.cache.lock(match.handle)
        self.cache.unlock(old)
        table.handles[slot], table.shared[slot] = match.handle, count

    def release(self, slot: int) -> None:
        """Takes a row's pages back: what can be looked up goes to the cache, the rest is free."""
        table = self._table
        # The KV of tokens whose value never came back cannot be looked up by value.
        valid = min(int(table.computed[slot]), int(table.known[slot]))
        match = self._insert(slot, valid // self._limits.page_size)
        shared, count = int(table.shared[slot]), len(match.pages)
        row = table.pages(slot)
        self.pool.free(row[shared:count][row[shared:count] != match.pages[shared:]])
        self.pool.free(row[max(shared, count) :])
        self.cache.unlock(table.handles[slot])

    def settle(self, step: int) -> None:
        """Frees the pages that were replaced and that no step after `step` reads."""
        while self._replaced and self._replaced[0][0] <= step:
            self.pool.free(self._replaced.popleft()[1])

    def flush(self) -> None:
        """Returns every cached page that no running request reads to the pool."""
        self.pool.free(self.cache.evict_until(self.cache.evictable))

    def check(self) -> None:
        """Raises AssertionError unless every page is free, cached or owned, and exactly once."""
        table = self._table
        used = np.flatnonzero(table.ids != NO_ID).tolist()
        holders = [(table.handles[i], table.block_table[i, : table.shared[i]]) for i in used]
        replaced = [pages for _, pages in self._replaced]
        cached = self.cache.check(holders)
        self.pool.check(np.concatenate([NO_PAGES, table.check(), cached, *replaced]))

    def _insert(self, slot: int, pages: int) -> Match:
        table = self._table
        entry = table.entries[slot]
        assert entry is not None
        ids = table.tokens[slot, : pages * self._limits.page_size]
        shared = int(table.shared[slot])
        return self.cache.insert(ids, table.pages(slot), shared, entry.request.cache_salt)


def _wants_prompt_rows(entry: Entry) -> bool:
    """The log-probabilities of its prompt are not told yet, so every row must be computed."""
    extras = entry.request.extras
    asks = extras is not None and extras.prompt_logprobs is not None
    return asks and len(entry.tokens) == len(entry.request.prompt)
