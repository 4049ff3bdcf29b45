"""Arguments of the public calls, checked before anything is done with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from replaydb.episodes import GroupStatus
from replaydb.errors import InvalidInputError
from replaydb.inputs import (
    INT64,
    LONGEST_SECONDS,
    each,
    to_int,
    to_json_object,
    to_name,
    to_number,
    to_scalar,
)


def whole_number(field: str, value: Any, *, least: int = 0) -> int:
    """An int, or an integer scalar of numpy or torch, not below `least`."""
    return to_int(field, value, least, INT64[1])


def seconds(field: str, value: Any) -> float | None:
    """Seconds to wait, 0 or more; None, or infinity: for ever."""
    number = to_scalar(value)
    if number is None or (isinstance(number, float) and number == math.inf):
        return None
    return to_number(field, number, least=0.0)


def duration(field: str, value: Any) -> float:
    """Seconds after which something happens, as far ahead as a date can be."""
    return to_number(field, value, above=0.0, most=LONGEST_SECONDS)


def quotas(n: Any) -> tuple[int, dict[str, int] | None]:
    """How many groups in all, and how many of each task where that was said."""
    if not isinstance(n, Mapping):
        return whole_number("n", n, least=1), None
    wanted = {
        one_name("n", task_name): whole_number(f"n[{task_name!r}]", count, least=1)
        for task_name, count in n.items()
    }
    if not wanted:
        raise InvalidInputError("n", "at least one task", "an empty mapping")
    return sum(wanted.values()), wanted


def names(field: str, value: Any) -> frozenset[str] | None:
    """One name or several; None: all there are."""
    if value is None:
        return None
    if isinstance(value, str):
        return frozenset((one_name(field, value),))
    return frozenset(one_name(field, name) for name in each(field, "a name or several", value))


def one_name(field: str, value: Any) -> str:
    """A name: not empty, at most 255 characters."""
    return to_name(field, value)


def statuses(value: Any) -> frozenset[str] | None:
    """Statuses by name or member; None: every status."""
    if value is None:
        return None
    expected = f"some of {', '.join(GroupStatus)}"
    several = (value,) if isinstance(value, str) else each("statuses", expected, value)
    try:
        return frozenset(GroupStatus(status).value for status in several)
    except (TypeError, ValueError):
        raise InvalidInputError("statuses", expected, repr(value)) from None


def ids(value: Any) -> list[int]:
    """Group ids, from anything that holds whole numbers (a list, an array, a tensor)."""
    return [whole_number(f"ids[{i}]", item) for i, item in enumerate(_items("ids", value))]


def cursors(value: Any) -> dict[str, Any]:
    """JSON values by name; None is what a cursor that was never written reads as."""
    found = to_json_object("cursor", value)
    for name in found:
        one_name("cursor", name)
    if any(one is None for one in found.values()):
        raise InvalidInputError("cursor", "values that are not None", repr(value))
    return found


def priorities(value: Any, count: int) -> list[float]:
    """So many priorities, from anything that holds numbers (a list, an array, a tensor)."""
    items = _items("priorities", value)
    if len(items) != count:
        raise InvalidInputError("priorities", f"as many as ids, {count}", f"{len(items)}")
    return [to_number(f"priorities[{i}]", item, least=0.0) for i, item in enumerate(items)]


def _items(field: str, value: Any) -> list[Any]:
    return list(each(field, "a sequence", value.tolist() if hasattr(value, "tolist") else value))
