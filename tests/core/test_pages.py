from __future__ import annotations

import numpy as np
import pytest

from tridentlm.core.pages import PagePool


def test_pages_are_handed_out_once_and_come_back() -> None:
    pool = PagePool(10)
    first, second = pool.allocate(4), pool.allocate(6)
    assert sorted([*first, *second]) == list(range(10))
    assert pool.num_free == 0
    pool.free(first)
    pool.check(second)
    assert sorted(pool.allocate(4)) == sorted(first)


def test_allocated_pages_do_not_change_when_the_pool_does() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    kept = pages.copy()
    pool.free(pool.allocate(2)[::-1])
    pool.free(kept[::-1])
    assert np.array_equal(pages, kept)


def test_more_than_is_free_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="3 pages asked for, 2 free"):
        PagePool(2).allocate(3)


@pytest.mark.parametrize(
    ("held", "message"),
    [([0], "1 of 2 pages"), ([0, 0], "page 0 is held 2 times"), ([0, 1, 1], "3 of 2 pages")],
)
def test_check_finds_lost_and_doubled_pages(held: list[int], message: str) -> None:
    pool = PagePool(2)
    pool.allocate(2)
    with pytest.raises(AssertionError, match=message):
        pool.check(np.array(held, np.int32))
