"""Lists of limited size."""

from __future__ import annotations

from replaydb.util.chunks import chunks


def test_lists_have_a_limited_size_and_length() -> None:
    assert list(chunks([], len, 3)) == []
    items = ["aa", "b", "cc", "ddddd", "", "e", "", "f"]
    assert list(chunks(items, len, 3)) == [["aa", "b"], ["cc"], ["ddddd"], ["", "e", "", "f"]]
    assert list(chunks("abcde", len, 9, length=2)) == [["a", "b"], ["c", "d"], ["e"]]


def test_items_are_read_when_they_are_needed() -> None:
    read = []
    items = (read.append(item) or item for item in range(9))  # type: ignore[func-returns-value]
    assert next(chunks(items, lambda _: 1, 2)) == [0, 1]
    assert read == [0, 1, 2]
