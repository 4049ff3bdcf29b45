"""Division of items into lists of limited size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def chunks(
    items: Iterable[T], size: Callable[[T], int], most: int, *, length: int = sys.maxsize
) -> Iterator[list[T]]:
    """Yield adjacent items in lists of at most `length` items with a total size of `most`.

    An item that is larger than `most` is in a list of its own.
    """
    several: list[T] = []
    total = 0
    for item in items:
        own = size(item)
        if several and (total + own > most or len(several) == length):
            yield several
            several, total = [], 0
        several.append(item)
        total += own
    if several:
        yield several
