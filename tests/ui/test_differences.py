"""Diffs of completions: complete, and counted in words or tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from replaydb.ui.differences import MAX_ITEMS, Comparison, compared, count_words, words
from replaydb.ui.tokens import texts_in_range


def by_words(a: str, b: str) -> Comparison:
    return compared(words(a), words(b), lambda side, i, j: list(side[i:j]), count_words)


@pytest.mark.parametrize("seed", range(20))
def test_a_diff_contains_both_texts(seed: int) -> None:
    chance = random.Random(seed)
    texts = ["".join(chance.choices("a b\n.é", k=chance.randrange(60))) for _ in range(2)]
    found = by_words(*texts)
    for side, text in zip("ab", texts, strict=True):
        assert "".join(it.text for it in found.segments if it.of in ("both", side)) == text
    assert found.same == (texts[0] == texts[1])


def test_words_are_counted() -> None:
    text = "call: today()\nSunday\nMonday."
    assert by_words(text, text).same_start == 4
    found = by_words(text, text.replace("Monday", "Sunday"))
    assert (found.same_start, found.totals, found.ratio) == (3, (4, 4), 0.75)
    found = by_words("🦕" * MAX_ITEMS, "🦖" * (MAX_ITEMS + 1))
    assert (found.matched, found.between, found.ratio) == (
        (MAX_ITEMS, MAX_ITEMS),
        (MAX_ITEMS, MAX_ITEMS + 1),
        None,
    )
    found = by_words("one two", "one  two")
    assert (found.same, found.ratio) == (False, 1.0)


def test_the_ratio_is_not_rounded_up_to_one() -> None:
    ids = np.arange(25_000)
    found = compared(ids, np.append(ids[:-1], 7), lambda side, i, j: list(map(str, side[i:j])))
    assert (found.same, found.ratio, found.same_start) == (False, 0.999, 24_999)


def test_sequences_of_few_distinct_items_are_matched() -> None:
    """Long texts of digits or tokens of bytes: every item occurs often."""
    digits = [i * 7919 % 10 for i in range(1, 699)]
    a, b = np.array([10, *digits, 11]), np.array([12, *digits[:300], 13, *digits[301:], 14])
    found = compared(a, b, lambda side, i, j: list(map(str, side[i:j])))
    assert (found.ratio, found.matched) == (0.995, (700, 700))


def test_characters_that_share_a_token_differ_as_a_whole() -> None:
    """The last byte of both characters is equal, but not the character."""

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    a, b = (np.array(list(text.encode())) for text in ("naé!", "naĩ!"))
    found = compared(a, b, lambda ids, i, j: texts_in_range(ids, i, j, decode))
    assert [(it.of, it.text) for it in found.segments] == [
        ("both", "na"), ("a", "é"), ("b", "ĩ"), ("both", "!"),
    ]  # fmt: skip
