"""The prefix cache's interface, and the cache that never holds anything.

A cache owns the KV pages of prompts and answers of earlier requests. Ownership of a page:

    PagePool --allocate--> request --insert, at its end--> cache --evict_until--> PagePool
                              ^                              |
                              `----- match_prefix + lock ----'   (shared, read only)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tridentlm.core.plan import I32

NO_PAGES: I32 = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: `length` tokens, a multiple of the page size, in `pages`."""

    pages: I32
    length: int
    handle: Any = None


class PrefixCache(Protocol):
    @property
    def evictable(self) -> int:
        """Pages that `evict_until` can give up now."""

    def match_prefix(self, ids: I32) -> Match:
        """What is cached of `ids`. Only a lock keeps it from being evicted."""

    def lock(self, handle: Any) -> None:
        """Protects a match from eviction until as many `unlock`s."""

    def unlock(self, handle: Any) -> None: ...

    def insert(self, ids: I32, pages: I32, cached: int) -> I32:
        """Offers the pages that hold the KV of `ids`, int32[any number >= pages for ids].

        The first `cached` tokens' pages came from `match_prefix`. Returns those after them that
        the cache did not take over, which stay the caller's.
        """

    def evict_until(self, pages: int) -> I32:
        """Gives up at least `pages` pages (all that are evictable if fewer) to the caller."""

    def check(self) -> I32:
        """All pages the cache owns. Raises AssertionError if its books do not balance."""


class NullCache:
    """Caches nothing: every page goes back to the pool at its request's end."""

    evictable = 0

    def match_prefix(self, ids: I32) -> Match:
        return Match(NO_PAGES, 0)

    def lock(self, handle: Any) -> None:
        pass

    def unlock(self, handle: Any) -> None:
        pass

    def insert(self, ids: I32, pages: I32, cached: int) -> I32:
        return pages

    def evict_until(self, pages: int) -> I32:
        return NO_PAGES

    def check(self) -> I32:
        return NO_PAGES
