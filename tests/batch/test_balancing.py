"""Division of groups into parts with similar numbers of tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaydb import InvalidInputError
from replaydb.training import balanced

LENGTHS = st.lists(st.integers(0, 10_000), max_size=60)


@given(LENGTHS, st.integers(1, 9))
def test_every_item_is_in_one_part(lengths: list[int], num_parts: int) -> None:
    parts = balanced(lengths, num_parts, even=False)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    sizes = [len(part) for part in parts]
    assert len(parts) == num_parts
    assert max(sizes) - min(sizes) <= 1


@given(LENGTHS, st.integers(1, 9))
def test_sums_differ_by_less_than_the_longest_item(lengths: list[int], num_parts: int) -> None:
    """So does every division that deals items in order of length, if it cannot do better."""
    even = lengths[: len(lengths) // num_parts * num_parts]
    parts = balanced(even, num_parts)
    sums = [sum(even[at] for at in part) for part in parts]
    assert {len(part) for part in parts} == {len(even) // num_parts}
    assert max(sums) - min(sums) <= max(even, default=0) * (len(even) // num_parts)


def test_long_items_are_spread() -> None:
    assert balanced([9, 1, 8, 2, 7, 3], 2) == [[0, 3, 5], [1, 2, 4]]
    assert balanced([5, 5, 5, 5], 2) == [[0, 2], [1, 3]]
    assert balanced([100, 1, 1, 1], 2, even=False) == [[0, 3], [1, 2]]
    assert balanced([], 3) == [[], [], []]


def test_unequal_parts_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"num_parts: expected a divisor of 3"):
        balanced([1, 2, 3], 2)
    assert balanced([1, 2, 3], 2, even=False) == [[2], [0, 1]]
    with pytest.raises(InvalidInputError, match="num_parts"):
        balanced([1], 0)
    for lengths in ([-1], None, 3, "12", {1: 2}):
        with pytest.raises(InvalidInputError, match="lengths"):
            balanced(lengths, 1)  # type: ignore[arg-type]
