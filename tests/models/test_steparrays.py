from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tridentlm.steparrays import LONGEST_TILE, tiles_of


def test_rows_are_cut_into_tiles_of_64_end_to_end() -> None:
    tables = np.array([[7, 2, 9], [4, 0, 0]], np.int32)
    slots, starts = tiles_of(tables, np.array([130, 64], np.int32), 64, 0)
    assert starts.tolist() == [0, 3, 4]
    assert slots.tolist() == [7 * 64, 2 * 64, 9 * 64, 4 * 64]


def test_a_page_of_128_has_two_tiles_and_a_window_leaves_the_first_ones_out() -> None:
    tables = np.array([[3, 5]], np.int32)
    slots, starts = tiles_of(tables, np.array([200], np.int32), 128, 100)
    assert starts.tolist() == [0, 3]  # tokens 64 to 200: the window begins at 100
    assert slots.tolist() == [3 * 128 + 64, 5 * 128, 5 * 128 + 64]


@given(
    st.sampled_from([16, 32, 64, 128]),
    st.lists(st.integers(1, 700), max_size=6),
    st.integers(0, 300),
)
def test_tiles_hold_every_token_that_is_attended_to(
    page_size: int, contexts: list[int], window: int
) -> None:
    rng = np.random.default_rng(0)
    lens = np.array(contexts, np.int32)
    width = -(-max(contexts, default=1) // page_size)
    tables = rng.permutation(len(contexts) * width).astype(np.int32).reshape(-1, width)
    slots, starts = tiles_of(tables, lens, page_size, window)
    assert (slots.dtype, starts.dtype) == (np.int32, np.int32)
    tile = min(page_size, LONGEST_TILE)
    for row, context in enumerate(contexts):
        of_row = slots[starts[row] : starts[row + 1]]
        held = (of_row[:, None] + np.arange(tile)).ravel()
        first = context - 1 - (context - 1) % tile - (len(of_row) - 1) * tile
        tokens = np.arange(max(0, context - window) if window else 0, context)
        wanted = tables[row, tokens // page_size] * page_size + tokens % page_size
        assert held[tokens - first].tolist() == wanted.tolist()
        assert len(of_row) == -(-context // tile) - tokens[0] // tile  # and no tile beyond
