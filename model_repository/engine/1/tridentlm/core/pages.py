"""The pool of KV pages: a stack of free page numbers."""

from __future__ import annotations

import numpy as np

from tridentlm.core.plan import I32


class PagePool:
    """Pages 0..num_pages-1. Allocation and release are one slice copy each, whatever the number.

    free:  [ 7 4 9 2 | ? ? ? ]      allocate(2) hands out 9 2; free() puts pages back on top
                     ^ num_free
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)

    def allocate(self, n: int) -> I32:
        """`n` pages, int32[n]. The caller has checked that `n <= num_free`."""
        assert 0 <= n <= self.num_free, f"{n} pages asked for, {self.num_free} free"
        self.num_free -= n
        return self._stack[self.num_free : self.num_free + n].copy()

    def free(self, pages: I32) -> None:
        """Takes back pages that nobody else holds."""
        end = self.num_free + len(pages)
        assert end <= self.num_pages, "more pages freed than allocated"
        self._stack[self.num_free : end] = pages
        self.num_free = end

    def check(self, held: I32) -> None:
        """Every page is free or in `held`, and exactly once. Raises AssertionError."""
        pages = np.concatenate([self._stack[: self.num_free], held])
        assert len(pages) == self.num_pages, f"{len(pages)} of {self.num_pages} pages accounted for"
        counts = np.bincount(pages, minlength=self.num_pages)
        wrong = np.flatnonzero(counts != 1)
        assert not len(wrong), f"page {wrong[0]} is held {counts[wrong[0]]} times"
