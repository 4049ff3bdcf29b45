"""Arguments of the public calls, checked before anything is done with them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from replaydb.episodes import GroupStatus
from replaydb.errors import InvalidInputError
from replaydb.inputs import LONGEST_SECONDS, to_json_object, to_name
from replaydb.policies import checked_priority


def whole_number(field: str, value: Any, *, least: int = 0) -> int:
    """An int, or what counts as one (a numpy integer), not below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number < 2**63:
        raise InvalidInputError(field, f"a whole number >= {least}", repr(value))
    return number


def seconds(field: str, value: Any) -> float | None:
    """Seconds to wait; None: for ever."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InvalidInputError(field, "seconds >= 0, or None to wait for ever", repr(value))
    return None if math.isinf(value) else float(value)


def duration(field: str, value: Any) -> float:
    """Seconds after which something happens, as far ahead as a date can be."""
    number = seconds(field, value)
    if not number or number > LONGEST_SECONDS:
        raise InvalidInputError(field, f"seconds > 0, at most {LONGEST_SECONDS:g}", repr(value))
    return number


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
    if not isinstance(value, Iterable):
        raise InvalidInputError(field, "a name or several", repr(value))
    return frozenset(one_name(field, name) for name in value)


def one_name(field: str, value: Any) -> str:
    """A name: not empty, at most 255 characters."""
    return to_name(field, value)


def statuses(value: Any) -> frozenset[str] | None:
    """Statuses by name or member; None: every status."""
    if value is None:
        return None
    several = (value,) if isinstance(value, str) else value
    try:
        return frozenset(GroupStatus(status).value for status in several)
    except (TypeError, ValueError):
        known = ", ".join(GroupStatus)
        raise InvalidInputError("statuses", f"some of {known}", repr(value)) from None


def ids(value: Any) -> list[int]:
    """Group ids, from anything that holds whole numbers (a list, an array, a tensor)."""
    return [whole_number(f"ids[{i}]", item) for i, item in enumerate(_items("ids", value))]


def cursors(value: Any) -> dict[str, Any]:
    """JSON values by name; None is what a cursor that was never written reads as."""
    found = to_json_object("cursor", value)
    if any(one is None for one in found.values()):
        raise InvalidInputError("cursor", "values that are not None", repr(value))
    return found


def priorities(value: Any, count: int) -> list[float]:
    """So many priorities, from anything that holds numbers (a list, an array, a tensor)."""
    items = _items("priorities", value)
    if len(items) != count:
        raise InvalidInputError("priorities", f"as many as ids, {count}", f"{len(items)}")
    return [checked_priority(f"priorities[{i}]", item) for i, item in enumerate(items)]


def _items(field: str, value: Any) -> list[Any]:
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Iterable):
        raise InvalidInputError(field, "a sequence", repr(value))
    return list(items)
