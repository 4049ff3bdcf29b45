"""Numbers, text and JSON as callers hand them over."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from replaydb.errors import InvalidInputError, InvalidSettingsError

_T = TypeVar("_T")

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
#: 300 years: from today as far as dates of either engine go, in both directions.
LONGEST_SECONDS = 1e10

_MAX_NAME = 255  # of task names, uids: they are indexed columns
_MAX_JSON_DEPTH = 100  # well below what SQLite, PostgreSQL and this interpreter can nest


def to_number(
    field: str,
    value: object,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> float:
    """A finite float, from a number or a numpy or torch scalar; text and bools are no numbers.

    Raises:
        InvalidInputError: Not a number, NaN, infinite, below `least`, not above `above`, or
            above `most`.
    """
    bounds = ((">=", least), (">", above), ("<=", most))
    limits = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound))
    expected = f"a finite number {limits}".rstrip()
    scalar = to_scalar(value)
    if isinstance(scalar, bool) or not isinstance(scalar, Real):
        raise InvalidInputError(field, expected, repr(scalar))
    try:
        number = float(scalar)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and least <= number <= most and number > above):
        raise InvalidInputError(field, expected, number)
    return number


def to_reward(field: str, value: object) -> float:
    """A `to_number`, or a verdict: True is 1 and False 0."""
    verdict = to_scalar(value)
    return float(verdict) if isinstance(verdict, bool) else to_number(field, verdict)


def to_int(field: str, value: object, low: int = INT32[0], high: int = INT32[1]) -> int:
    """An int in `low..high`, from an int or an integer scalar of numpy or torch.

    Raises:
        InvalidInputError: Anything else; bools, floats and text are no integers.
    """
    number = to_scalar(value)
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidInputError(field, "an integer", repr(number))
    number = int.__index__(number)  # what a subclass makes of its value is not asked
    if not low <= number <= high:
        limits = f">= {low}" if high == INT64[1] else f"from {low} to {high}"
        raise InvalidInputError(field, f"an integer {limits}", number)
    return number


def to_flag(field: str, value: object) -> bool:
    """True or False, also as a scalar of numpy or torch.

    Raises:
        InvalidInputError: Anything else; 0 and 1 are numbers.
    """
    on = to_scalar(value)
    if not isinstance(on, bool):
        raise InvalidInputError(field, "True or False", repr(on))
    return on


def optional(check: Callable[[str, Any], _T], field: str, value: object) -> _T | None:
    """`check(field, value)`, or None for None."""
    return None if value is None else check(field, value)


def setting(check: Callable[..., _T], field: str, value: object, **limits: Any) -> _T:
    """`check(field, value, ...)`; what it refuses are settings that cannot work.

    Raises:
        InvalidSettingsError: With the words of the check.
    """
    try:
        return check(field, value, **limits)
    except InvalidInputError as error:
        raise InvalidSettingsError(str(error)) from None


def to_text(field: str, value: object) -> str:
    """A string that both engines can hold: UTF-8 without NUL characters.

    Raises:
        InvalidInputError: Not a str, holds a NUL character or an unpaired surrogate.
    """
    if not isinstance(value, str):
        raise InvalidInputError(field, "a str", repr(value))
    if "\0" in value:
        raise InvalidInputError(field, "no NUL character", f"one at {value.index(chr(0))}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            field, "text that is valid UTF-8", f"an unpaired surrogate at {error.start}"
        ) from error
    return str.__str__(value)


def to_name(field: str, value: object) -> str:
    """A `to_text` of 1 to 255 characters."""
    name = to_text(field, value)
    if not 1 <= len(name) <= _MAX_NAME:
        raise InvalidInputError(field, f"1 to {_MAX_NAME} characters", f"{len(name)} characters")
    return name


def to_json_object(field: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """A JSON object as plain dicts and lists (tuples become lists); None becomes empty.

    Raises:
        InvalidInputError: Holds something else than str keys, str, bool, None, 64-bit integers,
            finite floats, lists and objects, or nests deeper than 100; the field is the path.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidInputError(field, "a mapping", repr(value))
    return {} if not value else _json_object(field, value, 0)


def all_of(kind: type[_T], field: str, items: Iterable[_T]) -> tuple[_T, ...]:
    """The items, all of them of that class; the error names the position of one that is not."""
    checked = tuple(each(field, f"a sequence of {kind.__name__}", items))
    for position, item in enumerate(checked):
        if not isinstance(item, kind):
            actual = type(item).__name__
            raise InvalidInputError(f"{field}[{position}]", kind.__name__, actual)
    return checked


def each(field: str, expected: str, value: Iterable[_T]) -> Iterator[_T]:
    """The items of a value.

    Raises:
        InvalidInputError: It holds none, such as an array of no dimension.
    """
    # A filter has items by position, of which it warns: it is asked for none.
    if isinstance(value, Iterable):
        with suppress(TypeError):
            return iter(value)
    raise InvalidInputError(field, expected, type(value).__name__)


def to_scalar(value: object) -> object:
    """The Python number inside a numpy or torch scalar; anything else as it came."""
    torch = sys.modules.get("torch")
    if isinstance(value, np.generic | np.ndarray) or (torch and isinstance(value, torch.Tensor)):
        return value.item() if value.ndim == 0 else value
    return value


def _json_object(field: str, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    items = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise InvalidInputError(field, "str keys", repr(key))
        items[to_text(f"{field} key", key)] = _json_value(f"{field}.{key}", item, depth + 1)
    return items


def _json_value(field: str, value: object, depth: int) -> object:
    if depth > _MAX_JSON_DEPTH:
        raise InvalidInputError(
            field[:_MAX_NAME], f"at most {_MAX_JSON_DEPTH} levels of nesting", "more"
        )
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return to_text(field, value)
    if isinstance(value, int):
        if not -(2**63) <= (number := int.__index__(value)) < 2**64:
            raise InvalidInputError(field, "integers of at most 64 bits", "a larger one")
        return number
    if isinstance(value, float):
        return to_number(field, value)
    if isinstance(value, Mapping):
        return _json_object(field, value, depth)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_json_value(f"{field}[{i}]", item, depth + 1) for i, item in enumerate(value)]
    if (plain := to_scalar(value)) is not value:
        return _json_value(field, plain, depth)
    raise InvalidInputError(field, "JSON values", type(value).__name__)
