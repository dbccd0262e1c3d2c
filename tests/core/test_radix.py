"""The radix cache alone: against a dict of prefixes, and its single promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tridentlm.core.cache import Match
from tridentlm.core.plan import I32
from tridentlm.core.radix import RadixCache

SIZE = 4


def ids(*pages: int) -> I32:
    """One page of equal tokens for each argument."""
    return np.repeat(np.array(pages, np.int32), SIZE)


def numbers(first: int, count: int) -> I32:
    return np.arange(first, first + count, dtype=np.int32)


def held(cache: RadixCache, match: Match) -> Match:
    cache.lock(match.handle)
    return match


def test_longest_whole_page_prefix_is_found() -> None:
    cache = RadixCache(SIZE)
    cache.insert(ids(1, 2, 3), numbers(10, 3), 0)
    found = held(cache, cache.match_prefix(np.append(ids(1, 2), [3, 3]).astype(np.int32)))
    assert (found.length, found.pages.tolist()) == (8, [10, 11])
    assert cache.match_length(ids(1, 2, 3, 4)) == 12
    assert cache.match_length(ids(2)) == 0
    assert cache.check([(found.handle, found.pages)]).tolist() == [10, 11, 12]


def test_a_page_that_is_there_already_is_not_taken_again() -> None:
    cache = RadixCache(SIZE)
    cache.insert(ids(1, 2), numbers(0, 2), 0)
    match = cache.insert(ids(1, 2, 3), numbers(20, 3), 0)
    assert match.pages.tolist() == [0, 1, 22]
    assert sorted(cache.check([])) == [0, 1, 22]


def test_what_was_inserted_does_not_change_with_the_callers_arrays() -> None:
    """Upstream's tree held views of a page-table row (94fe255)."""
    cache = RadixCache(SIZE)
    tokens, pages = ids(1, 2), numbers(5, 2)
    cache.insert(tokens, pages, 0)
    tokens[:], pages[:] = 9, 9
    assert cache.match_prefix(ids(1, 2)).pages.tolist() == [5, 6]


def test_locked_prefix_survives_eviction_and_the_lock_covers_its_own_node() -> None:
    """Upstream's lock skipped the node itself and its handle stored the root (61acfdc, 5e1318b)."""
    cache = RadixCache(SIZE)
    cache.insert(ids(1, 2, 3), numbers(0, 3), 0)
    match = held(cache, cache.match_prefix(ids(1, 2)))
    assert cache.evictable == 1
    assert cache.evict_until(3).tolist() == [2]
    assert cache.check([(match.handle, match.pages)]).tolist() == [0, 1]
    cache.unlock(match.handle)
    assert sorted(cache.evict_until(3)) == [0, 1]
    assert not cache._roots


def test_lock_holds_when_the_locked_node_is_split() -> None:
    cache = RadixCache(SIZE)
    cache.insert(ids(1, 2, 3), numbers(0, 3), 0)
    match = held(cache, cache.match_prefix(ids(1, 2, 3)))
    cache.insert(ids(1, 7), numbers(10, 2), 0)
    assert cache.evict_until(9).tolist() == [11]
    cache.check([(match.handle, match.pages)])


@pytest.mark.parametrize("size", [1, 4, 64])
def test_eviction_counts_pages_whatever_their_size(size: int) -> None:
    """Upstream counted pages as tokens (dae78f6)."""
    cache = RadixCache(size)
    cache.insert(np.arange(8 * size, dtype=np.int32), numbers(0, 8), 0)
    assert cache.evictable == 8
    assert cache.evict_until(3).tolist() == [5, 6, 7]
    assert cache.evictable == 5
    assert cache.match_length(np.arange(8 * size, dtype=np.int32)) == 5 * size


def test_least_recently_used_leaf_goes_first() -> None:
    cache = RadixCache(SIZE)
    for first in (1, 2, 3):
        cache.insert(ids(first), numbers(first, 1), 0)
    cache.unlock(held(cache, cache.match_prefix(ids(1))).handle)
    assert cache.evict_until(2).tolist() == [2, 3]
    assert cache.evict_until(2).tolist() == [1]


def test_salts_do_not_see_each_other_and_leave_nothing_behind() -> None:
    cache = RadixCache(SIZE)
    cache.insert(ids(1), numbers(0, 1), 0, "a")
    other = held(cache, cache.match_prefix(ids(1), "b"))
    assert other.length == 0
    cache.unlock(other.handle)
    assert list(cache._roots) == ["a"]
    cache.evict_until(1)
    assert not cache._roots


def test_the_check_finds_a_handle_too_many_and_foreign_pages() -> None:
    """Upstream's integrity check does nothing (#149)."""
    cache = RadixCache(SIZE)
    match = held(cache, cache.insert(ids(1, 2), numbers(0, 2), 0))
    with pytest.raises(AssertionError, match="locks differ"):
        cache.check([])
    with pytest.raises(AssertionError, match="not locked"):
        cache.check([(match.handle, numbers(7, 2))])


def test_notes_on_leaves_do_not_pile_up() -> None:
    cache = RadixCache(SIZE)
    cache.insert(ids(1), numbers(0, 1), 0)
    for _ in range(1000):
        cache.unlock(held(cache, cache.match_prefix(ids(1))).handle)
    assert len(cache._leaves) < 100
    assert cache.evict_until(1).tolist() == [0]


sequences = st.lists(st.integers(0, 2), min_size=0, max_size=12)


class AgainstDict(RuleBasedStateMachine):
    """The model: which page holds the tokens that end each page-aligned prefix."""

    @initialize(size=st.sampled_from([1, 2, 3]))
    def start(self, size: int) -> None:
        self.size = size
        self.cache = RadixCache(size)
        self.model: dict[tuple[str, tuple[int, ...]], int] = {}
        self.locked: list[Match] = []
        self.next_page = 0

    def prefixes(self, tokens: list[int], salt: str) -> list[tuple[str, tuple[int, ...]]]:
        ends = range(self.size, len(tokens) + 1, self.size)
        return [(salt, tuple(tokens[:end])) for end in ends]

    @rule(tokens=sequences, salt=st.sampled_from(["", "a"]), lock=st.booleans())
    def insert(self, tokens: list[int], salt: str, lock: bool) -> None:
        keys = self.prefixes(tokens, salt)
        offered = numbers(self.next_page, len(keys) + 1)
        self.next_page += len(offered)
        match = self.cache.insert(np.array(tokens, np.int32), offered, 0, salt)
        for key, page in zip(keys, offered.tolist(), strict=False):
            self.model.setdefault(key, page)
        assert match.pages.tolist() == [self.model[key] for key in keys]
        self.cache.lock(match.handle)
        self.locked.append(match)
        if not lock:
            self.cache.unlock(self.locked.pop().handle)

    @rule(tokens=sequences, salt=st.sampled_from(["", "a"]))
    def match(self, tokens: list[int], salt: str) -> None:
        keys = self.prefixes(tokens, salt)
        found = [self.model[key] for key in keys if key in self.model]
        array = np.array(tokens, np.int32)
        assert self.cache.match_length(array, salt) == len(found) * self.size
        match = self.cache.match_prefix(array, salt)
        assert match.pages.tolist() == found
        self.cache.lock(match.handle)
        self.locked.append(match)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        match = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.cache.unlock(match.handle)

    @rule(count=st.integers(0, 8))
    def evict(self, count: int) -> None:
        possible = self.cache.evictable
        gone = set(self.cache.evict_until(count).tolist())
        assert len(gone) == min(count, possible)
        self.model = {key: page for key, page in self.model.items() if page not in gone}

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        pages = self.cache.check([(match.handle, match.pages) for match in self.locked])
        assert sorted(pages.tolist()) == sorted(self.model.values())
        for salt, key in self.model:
            assert len(key) == self.size or (salt, key[: -self.size]) in self.model


TestAgainstDict = AgainstDict.TestCase
TestAgainstDict.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
