"""The prefix cache's interface, and the cache that never holds anything.

A cache owns the KV pages of prompts and answers, of earlier requests and of running ones as far as
they have come. Ownership of a page:

    PagePool --allocate--> request --insert, as pages fill--> cache --evict_until--> PagePool
                              ^                                 |
                              `------ match_prefix + lock ------'   (shared, read only)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tridentlm.core.plan import I32

NO_PAGES: I32 = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: `length` tokens, a multiple of the page size, in `pages`."""

    pages: I32
    length: int
    handle: Any = None


class PrefixCache(Protocol):
    """Prefixes of one `salt` are never found under another."""

    @property
    def evictable(self) -> int:
        """Pages that `evict_until` can give up now."""

    def match_prefix(self, ids: I32, salt: str = "") -> Match:
        """The longest cached prefix of `ids`. Only a lock keeps it from being evicted."""

    def match_length(self, ids: I32, salt: str = "") -> int:
        """How many tokens `match_prefix` would find; changes nothing."""

    def lock(self, handle: Any) -> None:
        """Protects a match from eviction until as many `unlock`s."""

    def unlock(self, handle: Any) -> None: ...

    def insert(self, ids: I32, pages: I32, shared: int, salt: str = "") -> Match:
        """Offers the pages that hold the KV of `ids`, int32[>= whole pages of ids].

        The first `shared` pages are the cache's already. Returns what the cache now holds of `ids`:
        an offered page that is not in the answer stays the caller's.
        """

    def evict_until(self, pages: int) -> I32:
        """Gives up at least `pages` pages (all that are evictable if fewer) to the caller."""

    def check(self, holders: Iterable[tuple[Any, I32]]) -> I32:
        """All pages the cache owns, int32[n].

        `holders` are all locked handles, each with the pages that its holder reads through it.
        Raises AssertionError if the books do not balance.
        """


class NullCache:
    """Caches nothing: every page goes back to the pool at its request's end."""

    evictable = 0

    def match_prefix(self, ids: I32, salt: str = "") -> Match:
        return Match(NO_PAGES, 0)

    def match_length(self, ids: I32, salt: str = "") -> int:
        return 0

    def lock(self, handle: Any) -> None:
        pass

    def unlock(self, handle: Any) -> None:
        pass

    def insert(self, ids: I32, pages: I32, shared: int, salt: str = "") -> Match:
        return Match(NO_PAGES, 0)

    def evict_until(self, pages: int) -> I32:
        return NO_PAGES

    def check(self, holders: Iterable[tuple[Any, I32]]) -> I32:
        assert not any(len(pages) for _, pages in holders)
        return NO_PAGES
