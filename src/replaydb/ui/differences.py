"""Where two completions differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Literal

#: Items of each side that are compared at once: the matching takes their product, at worst.
ITEMS = 2000
#: Beyond so many, items that are frequent begin no match: it would take seconds.
FEW = 600
#: Signs of what is alike that are shown on either side of a difference.
AROUND = 120

_WORD = re.compile(r"\w+|\s+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Text that both have, or only one of them.

    Attributes:
        of: Which of them has it.
        text: What it is.
        left_out: Signs in the middle of it that are not shown.
    """

    of: Literal["both", "a", "b"]
    text: str
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two completions, side by side.

    Attributes:
        stretches: One after the other.
        same_start: Items that both begin with.
        ratio: How much they are alike, 0 to 1.
        whole: Whether all of both was compared.
    """

    stretches: Sequence[Stretch]
    same_start: int
    ratio: float
    whole: bool


def words(text: str) -> list[str]:
    """Words, blanks and other signs of a text."""
    return _WORD.findall(text)


def compared(a: Sequence[str], b: Sequence[str]) -> Comparison:
    """What differs between two sequences of words or tokens.

    They are compared from where they begin to differ, `ITEMS` of each.
    """
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    left, right = a[start : start + ITEMS], b[start : start + ITEMS]
    stretches = [_both("".join(a[:start]))] if start else []
    matcher = SequenceMatcher(None, left, right, autojunk=max(len(left), len(right)) > FEW)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            stretches.append(_both("".join(left[i:j])))
            continue
        if i < j:
            stretches.append(Stretch("a", "".join(left[i:j])))
        if k < m:
            stretches.append(Stretch("b", "".join(right[k:m])))
    total = 2 * start + len(left) + len(right)
    alike = start + sum(block.size for block in matcher.get_matching_blocks())
    whole = len(a) <= start + ITEMS and len(b) <= start + ITEMS
    return Comparison(stretches, start, 2 * alike / total if total else 1.0, whole)


def _both(text: str) -> Stretch:
    if len(text) <= 2 * AROUND + 40:
        return Stretch("both", text)
    return Stretch("both", f"{text[:AROUND]} … {text[-AROUND:]}", len(text) - 2 * AROUND)
