"""Where two completions differ."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import LCSseq

#: Items of each side that are matched: it takes a bit for each pair of them.
ITEMS = 10_000
#: Items of what is alike that are shown on either side of a difference.
AROUND = 40
#: Items of what both end with that are matched again: what a token says depends on those before.
AGAIN = 8

Array: TypeAlias = NDArray[Any]
#: What the items of a side from one place to another say.
Says: TypeAlias = Callable[[Array, int, int], Sequence[str]]

_WORD = re.compile(r"\w+|\s+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Text that both have, or only one of them.

    Attributes:
        of: Which of them has it.
        text: What it is, or how it begins.
        left_out: Words or tokens in the middle of it that are not shown.
        rest: How it ends, where its middle is not shown.
    """

    of: Literal["both", "a", "b"]
    text: str
    left_out: int = 0
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two completions, side by side.

    Attributes:
        stretches: One after the other.
        totals: Words or tokens of each.
        same: Whether nothing differs.
        same_start: Words or tokens that both begin with.
        between: Items of each, of words also what is between them, that are neither of what both
            begin with nor of what both end with.
        matched: So many of these, from the first one on, were matched.
        ratio: How many words or tokens are alike, 0 to 1, rounded down; None where not all were
            matched, or there are none.
    """

    stretches: Sequence[Stretch]
    totals: tuple[int, int]
    same: bool
    same_start: int
    between: tuple[int, int]
    matched: tuple[int, int]
    ratio: float | None


def words(text: str) -> Array:
    """Words, blanks and other signs of a text."""
    return np.array(_WORD.findall(text), dtype=object)


def count_words(items: Iterable[str]) -> int:
    """How many of them are words."""
    return sum(1 for it in items if it[0] == "_" or it[0].isalnum())


def compared(a: Array, b: Array, says: Says, count: Callable[[Array], int] = len) -> Comparison:
    """What differs between two sequences of words or tokens.

    What they begin and end with alike is found whatever their length; of what is between, the first
    `ITEMS` of each are matched, so that as many as can be are alike.

    Args:
        a: The one.
        b: The other.
        says: What items say.
        count: How many words or tokens some items are.
    """
    start = _alike(a, b)
    end = max(0, _alike(a[start:][::-1], b[start:][::-1]) - AGAIN)
    middle = a[start : len(a) - end], b[start : len(b) - end]
    left, right = (
        list(
            zip(items[:ITEMS].tolist(), says(side, start, start + len(items[:ITEMS])), strict=True)
        )
        for side, items in zip((a, b), middle, strict=True)
    )
    codes: dict[tuple[Any, str], int] = {}  # the library goes by hashes: -1 and -2 have the same
    numbers = [[codes.setdefault(it, len(codes)) for it in side] for side in (left, right)]
    equal = [(0, start)]
    stretches = [_both(a, 0, start, says, count)]
    i = k = 0
    for match in LCSseq.editops(*numbers).as_matching_blocks():  # the last one is empty
        stretches.append(Stretch("a", "".join(text for _, text in left[i : match.a])))
        stretches.append(Stretch("b", "".join(text for _, text in right[k : match.b])))
        i, k = match.a + match.size, match.b + match.size
        equal.append((start + match.a, start + i))
        stretches.append(_both(a, *equal[-1], says, count))
    equal.append((len(a) - end, len(a)))
    stretches.append(_both(a, *equal[-1], says, count))
    totals = count(a), count(b)
    alike = sum(count(a[i:j]) for i, j in equal)
    whole = max(map(len, middle)) <= ITEMS and sum(totals) > 0
    return Comparison(
        [it for it in stretches if it.text],
        totals,
        start == len(a) == len(b),
        count(a[:start]),
        (len(middle[0]), len(middle[1])),
        (len(left), len(right)),
        math.floor(2000 * alike / sum(totals)) / 1000 if whole else None,
    )


def _alike(a: Array, b: Array) -> int:
    """How many items both begin with."""
    least = min(len(a), len(b))
    different = np.flatnonzero(a[:least] != b[:least])
    return int(different[0]) if len(different) else least


def _both(a: Array, i: int, j: int, says: Says, count: Callable[[Array], int]) -> Stretch:
    if j - i <= 3 * AROUND:
        return Stretch("both", "".join(says(a, i, j)))
    before, after = i + AROUND, j - AROUND
    texts = "".join(says(a, i, before)), "".join(says(a, after, j))
    return Stretch("both", texts[0], count(a[before:after]), texts[1])
