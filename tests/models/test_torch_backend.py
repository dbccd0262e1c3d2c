from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridentlm.backends import torch as backend
from tridentlm.backends.torch import decode_groups

contexts = st.lists(st.integers(1, 9000), max_size=80)


@given(contexts)
def test_every_decode_row_is_in_one_group(lengths: list[int]) -> None:
    groups = decode_groups(np.array(lengths, np.int32))
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))


@given(contexts)
def test_a_group_s_padded_size_is_bounded(lengths: list[int]) -> None:
    array = np.array(lengths, np.int32)
    for group in decode_groups(array):
        padded = int(array[group].max()) * len(group)
        assert len(group) == 1 or padded <= backend.GROUP_TOKENS
        assert array[group].max() <= max(2 * array[group].min(), backend.SMALL_CONTEXT)


@pytest.mark.parametrize(
    ("lengths", "count"), [([], 0), ([5], 1), ([20, 200, 3], 1), ([500, 20], 2), ([8000] * 4, 2)]
)
def test_groups_are_few(lengths: list[int], count: int) -> None:
    assert len(decode_groups(np.array(lengths, np.int32))) == count
