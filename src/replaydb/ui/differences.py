"""Diff of two completions, by words or tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import LCSseq

#: Items of each side that are matched. Matching needs one bit per pair of items.
MAX_ITEMS = 10_000
#: Equal items that are shown on either side of a difference.
CONTEXT = 40
#: Items of the common suffix that are matched again: the text of a token depends on earlier ones.
SUFFIX_OVERLAP = 8

Array: TypeAlias = NDArray[Any]
#: Returns the text of each item of a side from a start to an end position.
ItemTexts: TypeAlias = Callable[[Array, int, int], Sequence[str]]

_WORD = re.compile(r"\w+|\s+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text that is in both completions, or in one of them.

    Attributes:
        of: The completions that contain it.
        text: The text, or its beginning if its middle is omitted.
        left_out: Number of omitted words or tokens.
        rest: The end of the text if its middle is omitted, else empty.
    """

    of: Literal["both", "a", "b"]
    text: str
    left_out: int = 0
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The diff of two completions.

    Attributes:
        segments: The segments in order.
        totals: Number of words or tokens of each completion.
        same: Whether they are identical.
        same_start: Length of the common prefix in words or tokens.
        between: Items of each between the common prefix and the common suffix. Items of words
            include the whitespace and punctuation between them.
        matched: Number of these that were matched, from the first on.
        ratio: Share of equal words or tokens, 0 to 1, rounded down. None if not all were matched
            or there are none.
    """

    segments: Sequence[Segment]
    totals: tuple[int, int]
    same: bool
    same_start: int
    between: tuple[int, int]
    matched: tuple[int, int]
    ratio: float | None


def words(text: str) -> Array:
    """Split a text into words, whitespace and single other characters."""
    return np.array(_WORD.findall(text), dtype=object)


def count_words(items: Iterable[str]) -> int:
    """Return the number of items that are words."""
    return sum(1 for it in items if it[0] == "_" or it[0].isalnum())


def compared(
    a: Array, b: Array, texts: ItemTexts, count: Callable[[Array], int] = len
) -> Comparison:
    """Compare two sequences of words or tokens.

    The common prefix and suffix are found at any length. Of the items between them, the first
    `MAX_ITEMS` of each side are matched by their longest common subsequence.

    Args:
        a: Items of the first sequence.
        b: Items of the second sequence.
        texts: Returns the texts of items.
        count: Returns the number of words or tokens among items.
    """
    start = _common_prefix(a, b)
    end = max(0, _common_prefix(a[start:][::-1], b[start:][::-1]) - SUFFIX_OVERLAP)
    middle = a[start : len(a) - end], b[start : len(b) - end]
    left, right = (
        list(
            zip(
                items[:MAX_ITEMS].tolist(),
                texts(side, start, start + len(items[:MAX_ITEMS])),
                strict=True,
            )
        )
        for side, items in zip((a, b), middle, strict=True)
    )
    # The library compares hashes, and -1 and -2 have the same hash: use distinct numbers instead.
    codes: dict[tuple[Any, str], int] = {}
    numbers = [[codes.setdefault(it, len(codes)) for it in side] for side in (left, right)]
    equal = [(0, start)]
    segments = [_equal_segment(a, 0, start, texts, count)]
    i = k = 0
    for match in LCSseq.editops(*numbers).as_matching_blocks():  # the last one is empty
        segments.append(Segment("a", "".join(text for _, text in left[i : match.a])))
        segments.append(Segment("b", "".join(text for _, text in right[k : match.b])))
        i, k = match.a + match.size, match.b + match.size
        equal.append((start + match.a, start + i))
        segments.append(_equal_segment(a, *equal[-1], texts, count))
    equal.append((len(a) - end, len(a)))
    segments.append(_equal_segment(a, *equal[-1], texts, count))
    totals = count(a), count(b)
    num_equal = sum(count(a[i:j]) for i, j in equal)
    all_matched = max(map(len, middle)) <= MAX_ITEMS and sum(totals) > 0
    return Comparison(
        [it for it in segments if it.text],
        totals,
        start == len(a) == len(b),
        count(a[:start]),
        (len(middle[0]), len(middle[1])),
        (len(left), len(right)),
        math.floor(2000 * num_equal / sum(totals)) / 1000 if all_matched else None,
    )


def _common_prefix(a: Array, b: Array) -> int:
    """Return the number of items that both sequences begin with."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _equal_segment(
    a: Array, i: int, j: int, texts: ItemTexts, count: Callable[[Array], int]
) -> Segment:
    if j - i <= 3 * CONTEXT:
        return Segment("both", "".join(texts(a, i, j)))
    before, after = i + CONTEXT, j - CONTEXT
    ends = "".join(texts(a, i, before)), "".join(texts(a, after, j))
    return Segment("both", ends[0], count(a[before:after]), ends[1])
