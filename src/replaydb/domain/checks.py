"""Argument checks: one function per kind of value, for every public call.

A check takes the name of the argument and its value. It returns the value as plain Python, ready to
be stored as JSON or bound to SQL. Scalars of numpy and torch count as the numbers and bools that
they contain. An invalid value raises InvalidInputError with the name, the expected and the received
value.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from numbers import Real
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from replaydb.errors import InvalidInputError

_T = TypeVar("_T")
_Text = TypeVar("_Text", bound=str)
_P = ParamSpec("_P")

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
FLOAT32_MAX = float(np.finfo(np.float32).max)
#: 300 years: from today as far as dates of either engine go, in both directions.
LONGEST_SECONDS = 1e10
#: Largest value that a row can hold: SQLite's rows have at most 10^9 bytes, by default, and
#: PostgreSQL's messages at most 2^30.
MAX_BYTES = 999_000_000

_MAX_NAME = 255  # of task names, uids: they are indexed columns
_MAX_JSON_DEPTH = 100  # well below what SQLite, PostgreSQL and this interpreter can nest


def scalar(value: object) -> object:
    """Return the Python number inside a numpy or torch scalar; anything else unchanged."""
    # Another thread may be importing torch. Before it defines the class, there are no tensors.
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    if isinstance(value, (np.generic, np.ndarray, tensor)):
        # The item of a masked array is 0, and a tensor on the device "meta" has none.
        if value.ndim or isinstance(value, np.ma.MaskedArray) or getattr(value, "is_meta", False):
            return value
        plain = value.item()
        return float(plain) if isinstance(plain, np.floating) else plain  # for a long double
    return value


def optional(
    check: Callable[Concatenate[str, Any, _P], _T],
    field: str,
    value: object,
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _T | None:
    """Return `check(field, value, ...)`, or None for None."""
    return None if value is None else check(field, value, *args, **kwargs)


def number(
    field: str,
    value: object,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> float:
    """Check for a finite number and return a float. Text and bools are not numbers."""
    actual = plain = scalar(value)
    if not isinstance(plain, bool) and isinstance(plain, Real):
        try:
            actual = found = float(plain)
        except OverflowError:
            actual = found = math.inf
        if math.isfinite(found) and least <= found <= most and found > above:
            return found
    bounds = ((">=", least), (">", above), ("<=", most))
    limits = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound))
    raise InvalidInputError(field, f"a finite number {limits}".rstrip(), repr(actual))


def whole_number(field: str, value: object, least: int = 0, most: int = INT64[1]) -> int:
    """Check for an int in `least..most`. Bools, floats and text are not whole numbers."""
    plain = scalar(value)
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise InvalidInputError(field, "an integer", repr(plain))
    found = int.__index__(plain)  # ignores methods of a subclass
    if not least <= found <= most:
        is_low = found < least and most == INT64[1]
        limits = f">= {least}" if is_low else f"from {least} to {most}"
        raise InvalidInputError(field, f"an integer {limits}", found)
    return found


def policy_version(field: str, value: object) -> int:
    """Check for a policy version that a buffer can have."""
    return whole_number(field, value, most=INT32[1])


def token_id(field: str, value: object) -> int:
    """Check for a 32-bit int. It may be negative: losses ignore -100."""
    return whole_number(field, value, *INT32)


def flag(field: str, value: object) -> bool:
    """Check for True or False. 0 and 1 are numbers."""
    plain = scalar(value)
    if not isinstance(plain, bool):
        raise InvalidInputError(field, "True or False", repr(plain))
    return plain


def reward(field: str, value: object) -> float:
    """Check for a number in the range of float32, or a bool: True is 1 and False 0."""
    verdict = scalar(value)
    if isinstance(verdict, bool):
        return float(verdict)
    return float32(field, verdict)


def float32(field: str, value: object) -> float:
    """Check for a number in the range of float32, the dtype that it has in tensors."""
    return number(field, value, least=-FLOAT32_MAX, most=FLOAT32_MAX)


def priority(field: str, value: object) -> float:
    """Check for a finite number >= 0."""
    return number(field, value, least=0.0)


def priorities(field: str, value: Any, count: int) -> list[float]:
    """Check for `count` priorities in a list, an array or a tensor."""
    found = _listed(field, value)
    if len(found) != count:
        raise InvalidInputError(field, f"as many as ids, {count}", f"{len(found)}")
    return [priority(f"{field}[{i}]", each) for i, each in enumerate(found)]


def priority_of_each(field: str, value: Any, count: int) -> list[float]:
    """Check for one priority for all, or `count` priorities."""
    if isinstance(scalar(value), Real):
        return [priority(field, value)] * count
    return priorities(field, value, count)


def ids(field: str, value: Any) -> list[int]:
    """Check for ids: whole numbers in a list, an array or a tensor."""
    return [whole_number(f"{field}[{i}]", each) for i, each in enumerate(_listed(field, value))]


def uids(field: str, value: Any) -> list[str]:
    """Check for one uid or several. Their order is kept."""
    several = (value,) if isinstance(value, str) else items(field, "a uid or several uids", value)
    return [name(f"{field}[{i}]", each) for i, each in enumerate(several)]


def seconds(field: str, value: object) -> float | None:
    """Check for seconds to wait, >= 0. None or infinity: wait indefinitely."""
    plain = scalar(value)
    if plain is None or (isinstance(plain, float) and plain == math.inf):
        return None
    return number(field, plain, least=0.0)


def duration(field: str, value: object) -> float:
    """Check for a positive number of seconds, within the range of dates."""
    return number(field, value, above=0.0, most=LONGEST_SECONDS)


def text(field: str, value: object) -> str:
    """Check for any str. Generated text may contain NUL and unpaired surrogates."""
    if not isinstance(value, str):
        raise InvalidInputError(field, "a str", repr(value))
    if len(value) > MAX_BYTES // 4:  # a character has up to four bytes
        size = len(value.encode(errors="surrogatepass"))
        if size > MAX_BYTES:
            raise InvalidInputError(field, f"at most {MAX_BYTES} bytes of text", f"{size} bytes")
    return str.__str__(value)


def string(field: str, value: object) -> str:
    """Check for a str that is valid UTF-8 without NUL: names, keys and settings."""
    value = text(field, value)
    if "\0" in value:
        raise InvalidInputError(field, "no NUL character", f"one at {value.index(chr(0))}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            field, "text that is valid UTF-8", f"an unpaired surrogate at {error.start}"
        ) from error
    return value


def name(field: str, value: object) -> str:
    """Check for text of 1 to 255 characters."""
    found = string(field, value)
    if not 1 <= len(found) <= _MAX_NAME:
        raise InvalidInputError(field, f"1 to {_MAX_NAME} characters", f"{len(found)} characters")
    return found


def names(field: str, value: Any) -> frozenset[str] | None:
    """Check for one name or several. None: no restriction."""
    if value is None:
        return None
    several = (value,) if isinstance(value, str) else items(field, "a name or several names", value)
    return frozenset(name(field, each) for each in several)


def one_of(field: str, value: object, choices: Iterable[_Text]) -> _Text:
    """Check for one of some strings, or of the members of a StrEnum, by text."""
    known = tuple(choices)
    if isinstance(value, str):
        for choice in known:
            if choice == value:
                return choice
    raise InvalidInputError(field, f"one of {', '.join(known)}", repr(value))


def meant(name: str, known: Iterable[str]) -> str:
    """Return the name most similar to an unknown one, or all known names, for an error."""
    choices = sorted(known)
    near = get_close_matches(name, choices, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known names: {', '.join(choices)}"


def some_of(field: str, value: Any, choices: Iterable[str]) -> frozenset[str] | None:
    """Check for one or several of some strings, and return plain text. None: all of them."""
    if value is None:
        return None
    known = tuple(choices)
    expected = f"some of {', '.join(known)}"
    several = (value,) if isinstance(value, str) else tuple(items(field, expected, value))
    if any(not isinstance(each, str) or each not in known for each in several):
        raise InvalidInputError(field, expected, repr(value))
    return frozenset(str.__str__(each) for each in several)


def instance(field: str, value: object, *kinds: type[_T]) -> _T:
    """Check for an instance of one of some classes, not the class itself."""
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidInputError(field, expected, repr(value))
    return value


def instances(
    field: str, value: Iterable[_T], kind: type[_T], expected: str | None = None
) -> tuple[_T, ...]:
    """Check that all items are instances of a class. The error has the index of a wrong one."""
    found = tuple(items(field, expected or f"a sequence of {kind.__name__}", value))
    for position, each in enumerate(found):
        if not isinstance(each, kind):
            raise InvalidInputError(f"{field}[{position}]", kind.__name__, _kind_of(each))
    return found


def function(field: str, value: Callable[_P, _T]) -> Callable[_P, _T]:
    """Check for a callable."""
    if not callable(value):
        raise InvalidInputError(field, "a function", repr(value))
    return value


def items(field: str, expected: str, value: Iterable[_T]) -> Iterator[_T]:
    """Return an iterator over a value that is meant as a sequence of items.

    Characters of a text, numbers of bytes, keys of a mapping and arrays without dimensions are
    refused: they are never meant as items.
    """
    # `iter` accepts a SQLAlchemy expression, as it can be indexed, and warns. It is no Iterable.
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping):
        with suppress(TypeError):
            return iter(value)
    raise InvalidInputError(field, expected, _kind_of(value))


def quotas(field: str, value: Any) -> tuple[int, dict[str, int] | None]:
    """Check for a number of groups, or a mapping by task. Return the total and the mapping."""
    if not isinstance(value, Mapping):
        return whole_number(field, value), None
    wanted = {
        name(field, task_name): whole_number(f"{field}[{task_name!r}]", count)
        for task_name, count in value.items()
    }
    return sum(wanted.values()), wanted


def cursors(field: str, value: Any) -> dict[str, Any]:
    """Check for JSON values by name. None is refused: `Buffer.cursor` returns it for no cursor."""
    found = json_object(field, value)
    for key in found:
        name(field, key)
    if any(position is None for position in found.values()):
        raise InvalidInputError(field, "values that are not None", repr(value))
    return found


def etags(field: str, value: Mapping[str, str] | None) -> dict[str, str]:
    """Check for a mapping of uids to etags."""
    return {uid: string(f"{field}.{uid}", etag) for uid, etag in json_object(field, value).items()}


def json_object(
    field: str, value: Mapping[str, Any] | None, leaf: Callable[[str, object], str] = string
) -> dict[str, Any]:
    """Check for a JSON object and return it as plain dicts and lists. None becomes empty.

    It may contain str, bool, None, 64-bit integers, finite floats, lists and tuples, and objects
    whose keys are str, nested up to 100 levels. The field of an error is the path to the invalid
    value.

    Args:
        field: Name of the argument, for errors.
        value: The object.
        leaf: Check for its strings, except keys: `string` or `text`.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidInputError(field, "a mapping", repr(value))
    return {} if not value else _json_object(field, value, leaf, 0)


def _json_object(
    field: str, value: Mapping[Any, Any], leaf: Callable[[str, object], str], depth: int
) -> dict[str, Any]:
    found = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise InvalidInputError(field, "str keys", repr(key))
        name = string(f"{field} key", key)
        found[name] = _json_value(f"{field}.{key}", item, leaf, depth + 1)
    return found


def _json_value(
    field: str, value: object, leaf: Callable[[str, object], str], depth: int
) -> object:
    if depth > _MAX_JSON_DEPTH:
        raise InvalidInputError(
            field[:_MAX_NAME], f"at most {_MAX_JSON_DEPTH} levels of nesting", "more"
        )
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return leaf(field, value)
    if isinstance(value, int):
        if not -(2**63) <= (found := int.__index__(value)) < 2**64:
            raise InvalidInputError(field, "integers of at most 64 bits", "a larger one")
        return found
    if isinstance(value, float):
        return number(field, value)
    if isinstance(value, Mapping):
        return _json_object(field, value, leaf, depth)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_json_value(f"{field}[{i}]", item, leaf, depth + 1) for i, item in enumerate(value)]
    if not isinstance(plain := scalar(value), type(value)):
        return _json_value(field, plain, leaf, depth)
    raise InvalidInputError(field, "JSON values", type(value).__name__)


def _listed(field: str, value: Any) -> list[Any]:
    plain = value.tolist() if hasattr(value, "tolist") else value
    return list(items(field, "a sequence", plain))


def _kind_of(value: object) -> str:
    """Return the type of a value for an error, as the value may be large."""
    if value is None or isinstance(value, type):
        return repr(value)
    return type(value).__name__
