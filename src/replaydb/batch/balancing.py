"""Division of groups into parts with similar numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from replaydb.domain import checks
from replaydb.errors import InvalidInputError


def balanced(lengths: Iterable[int], num_parts: int, *, even: bool = True) -> list[list[int]]:
    """Divide items into parts whose sums of lengths are similar.

    The longest item goes first, each to the part with the smallest sum that has room (Graham's LPT
    rule, 1969, with a limit on the number of items). The result depends only on the arguments, so
    every rank can compute it.

    Args:
        lengths: Length of each item, such as the tokens of a group [n].
        num_parts: Number of parts, such as ranks.
        even: Whether all parts must have the same number of items. With False, the numbers differ
            by at most 1.

    Returns:
        The indices of the items of each part, in ascending order [num_parts].

    Raises:
        InvalidInputError: An argument is invalid, or `even` and `num_parts` does not divide n.
    """
    return divided("num_parts", lengths, num_parts, even=even)


def divided(field: str, lengths: Iterable[int], num_parts: int, *, even: bool) -> list[list[int]]:
    """Return what `balanced` does. `field` is the name of `num_parts` in errors."""
    sizes = [
        checks.whole_number("lengths", one) for one in checks.items("lengths", "integers", lengths)
    ]
    count = checks.whole_number(field, num_parts, least=1)
    room, more = divmod(len(sizes), count)
    if checks.flag("even", even) and more:
        raise InvalidInputError(field, f"a divisor of {len(sizes)} (or even=False)", count)
    parts: list[list[int]] = [[] for _ in range(count)]
    with_room = [(0, at) for at in range(count)]  # a heap of sums
    for item in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        total, at = heappop(with_room)
        while len(parts[at]) == room and not more:
            total, at = heappop(with_room)
        more -= len(parts[at]) == room
        parts[at].append(item)
        if len(parts[at]) <= room:
            heappush(with_room, (total + sizes[item], at))
    return [sorted(part) for part in parts]
