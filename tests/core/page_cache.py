"""A minimal prefix cache over whole pages, to test that the scheduler keeps the interface."""

from __future__ import annotations

from collections import Counter

import numpy as np
from tridentlm.core.cache import Match
from tridentlm.core.plan import I32

Key = tuple[int, ...]


class PageCache:
    """Maps each page-aligned prefix to the page of its last tokens; evicts the oldest leaf."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[Key, int] = {}
        self.locks: Counter[Key] = Counter()

    def prefixes(self, ids: I32) -> list[Key]:
        ends = range(self.page_size, len(ids) + 1, self.page_size)
        return [tuple(ids[:end].tolist()) for end in ends]

    @property
    def evictable(self) -> int:
        locked = {key[:end] for key in +self.locks for end in range(1, len(key) + 1)}
        return sum(key not in locked for key in self.pages)

    def match_prefix(self, ids: I32) -> Match:
        keys: list[Key] = []
        for key in self.prefixes(ids):
            if key not in self.pages:
                break
            keys.append(key)
        pages = np.array([self.pages[key] for key in keys], np.int32)
        return Match(pages, len(keys) * self.page_size, keys[-1] if keys else ())

    def lock(self, handle: Key) -> None:
        self.locks[handle] += 1

    def unlock(self, handle: Key) -> None:
        self.locks[handle] -= 1
        assert self.locks[handle] >= 0

    def insert(self, ids: I32, pages: I32, cached: int) -> I32:
        kept = list(range(cached // self.page_size, len(pages)))
        for i, key in enumerate(self.prefixes(ids)):
            if key not in self.pages:
                self.pages[key] = int(pages[i])
                kept.remove(i)
        return pages[kept].copy()

    def evict_until(self, pages: int) -> I32:
        gone: list[int] = []
        while len(gone) < pages and self.evictable:
            locked = {key[:end] for key in +self.locks for end in range(1, len(key) + 1)}
            inner = {key[: -self.page_size] for key in self.pages}
            leaf = next(k for k in self.pages if k not in inner and k not in locked)
            gone.append(self.pages.pop(leaf))
        return np.array(gone, np.int32)

    def check(self) -> I32:
        for key in self.pages:
            parent = key[: -self.page_size]
            assert not parent or parent in self.pages
        return np.array(list(self.pages.values()), np.int32)
