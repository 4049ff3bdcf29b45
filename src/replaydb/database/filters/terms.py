"""Typed terms of a filter: SQL expressions of a known kind, and the operations on each kind.

Engines compare values of different kinds differently (on SQLite any text is greater than any
number), so only values of one kind are compared. A tag is read as the kind that it is compared
with, and is NULL if it has another kind. Columns and constants of different kinds are refused. A
comparison with NULL is neither true nor false, as in SQL.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, NoReturn

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    Double,
    Text,
    bindparam,
    cast,
    false,
    func,
    null,
    or_,
    true,
)
from sqlalchemy.exc import CompileError
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import False_, Grouping, True_
from sqlalchemy.sql.functions import Function
from sqlalchemy.types import TypeEngine

from replaydb.database.filters.tag_lookups import lookup_of, tag_condition
from replaydb.database.tables.column_types import UtcDateTime
from replaydb.database.tables.expressions import (
    among,
    bytewise,
    json_boolean,
    json_double,
    json_integer,
    json_kind,
    json_part,
    json_text,
    matches,
)
from replaydb.database.tables.schema import episode_group
from replaydb.domain import checks
from replaydb.errors import InvalidInputError

Kind = Literal["text", "integer", "number", "boolean", "time"]

_MAX_PATTERN = 1000  # SQLite refuses patterns of 50,000 bytes
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Term:
    """A SQL expression, and the kind of its value if it is not NULL."""

    sql: ColumnElement[Any]
    kind: Kind


@dataclass(frozen=True, slots=True)
class Tag:
    """The value at a path of the tags, of any kind."""

    path: tuple[str | int, ...]


#: A part of a filter; None is NULL in SQL.
Part = Term | Tag | None

Operator = Callable[[Any, Any], Any]

_TAG_KINDS: dict[str, type[json_part]] = {
    "text": json_text,
    "integer": json_integer,
    "number": json_double,
    "boolean": json_boolean,
}


def refused(expected: str, actual: object) -> NoReturn:
    """Raise `InvalidInputError` for a part that a filter may not have."""
    raise InvalidInputError("where", expected, str(actual)[:_SHOWN])


def shown(element: Any) -> str:
    """Return SQL for an error message; the type's name if it compiles only for an engine."""
    try:
        return repr(str(element))
    except CompileError:
        return type(element).__name__


def constant(value: object) -> Part:
    """Return a constant of the caller as a part of a filter.

    Raises:
        InvalidInputError: Filters do not support its type, or an engine cannot store its value.
    """
    value = checks.scalar(value)
    match value:
        case None:
            return None
        case bool():
            return Term(true() if value else false(), "boolean")
        case int():
            return _bound(
                checks.whole_number("where", value, *checks.INT64), BigInteger(), "integer"
            )
        case float():
            return _bound(checks.number("where", value), Double(), "number")
        case str():
            return _bound(checks.string("where", value), Text(), "text")
        case datetime(tzinfo=None):
            refused("times with a time zone", repr(value))
        case datetime():
            try:
                return _bound(value.astimezone(UTC), UtcDateTime(), "time")
            except OverflowError:
                refused("times of years 1 to 9999", repr(value))
    refused("str, int, float, bool, datetime or None", type(value).__name__)


def as_kind(part: Part, kind: Kind) -> Term:
    """Return a part as a term of this kind. A tag whose value has another kind is NULL.

    Raises:
        InvalidInputError: The part is a column or constant of another kind.
    """
    match part:
        case None:
            return Term(null(), kind)
        case Tag(path):
            if kind not in _TAG_KINDS:
                refused("a tag and a str, number, bool or None", f"a tag and a {kind}")
            return Term(_TAG_KINDS[kind](episode_group.c.tags, path), kind)
        case Term(sql, "integer") if kind == "number":
            if isinstance(sql, BindParameter):
                return _bound(float(sql.value or 0), Double(), "number")
            return Term(cast(sql, Double()), "number")
        case Term() if part.kind != kind:
            refused(f"a {kind}", f"a {part.kind}: {shown(part.sql)}")
        case Term(sql, "boolean") if not isinstance(sql, Column | True_ | False_):
            # The engines differ in which operators bind tighter, and SQLAlchemy's NOT does.
            return Term(Grouping(sql), kind)
    return part


def common_kind(parts: Iterable[Part]) -> Kind:
    """Return the kind in which parts can be compared with each other.

    Raises:
        InvalidInputError: There is none.
    """
    kinds = {part.kind for part in parts if isinstance(part, Term)}
    if kinds == {"integer", "number"}:
        return "number"
    if not kinds:
        refused("a constant, a column, or a tag as_string(), as_float(), ...", "tags alone")
    if len(kinds) > 1:
        refused("values of one kind", " and ".join(sorted(kinds)))
    return kinds.pop()


def compared(compare: Operator, left: Part, right: Part) -> Term:
    """Compare two parts."""
    if left is None or right is None:
        refused("is_(None) or is_not(None)", "another comparison with None")
    kind = common_kind((left, right))
    if kind == "boolean" and compare not in (operators.eq, operators.ne):
        refused("== or != between booleans", compare.__name__)
    if kind == "integer" and (isinstance(left, Tag) or isinstance(right, Tag)):
        # Integers compare exactly with integers, and with other numbers as doubles.
        exactly, nearly = (
            compare(as_kind(left, as_what).sql, as_kind(right, as_what).sql)
            for as_what in ("integer", "number")
        )
        condition = func.coalesce(exactly, nearly)
    else:
        first, second = as_kind(left, kind).sql, as_kind(right, kind).sql
        if kind == "text" and compare not in (operators.eq, operators.ne):
            first = bytewise(first)
        condition = compare(first, second)
    return Term(_indexed(condition, left, compare, [right]), "boolean")


def is_missing(part: Part) -> Term:
    """Return whether a part has no value. A tag that is JSON's null has none."""
    if isinstance(part, Tag):
        return Term(json_kind(episode_group.c.tags, part.path).is_(None), "boolean")
    return Term(null() if part is None else as_kind(part, part.kind).sql.is_(None), "boolean")


def one_of(part: Part, values: Sequence[Part]) -> Term:
    """Return whether a part equals one of several constants."""
    terms = [value for value in values if isinstance(value, Term)]
    if part is None or len(terms) < len(values):
        refused("values other than None, which is_(None) finds", "None")
    if not terms:
        return Term(false(), "boolean")
    if isinstance(part, Term):
        kind = common_kind((part, *terms))
        listed = _listed(part, terms, kind)
        return Term(_indexed(listed, part, operators.in_op, terms), "boolean")
    found = []
    for kinds in (("text",), ("integer", "number"), ("boolean",)):
        if alike := [term for term in terms if term.kind in kinds]:
            kind = common_kind(alike)
            if whole := [term for term in alike if term.kind == "integer"]:
                # As in `compared`: integers exactly with integers, all else as doubles.
                rest = [term for term in alike if term.kind != "integer"]
                exactly = _listed(part, whole, "integer")
                found.append(or_(exactly, _listed(part, rest, "number")) if rest else exactly)
                kind = "number"
            found.append(_listed(part, alike, kind))
    if len(found) == 0 or any(term.kind == "time" for term in terms):
        refused("text, numbers or booleans in in_() of a tag", "times")
    condition = _indexed(_first_of(found), part, operators.in_op, terms)
    return Term(condition, "boolean")


def calculated(calculate: Operator, left: Part, right: Part) -> Term:
    """Apply `+`, `-`, `*` or `/` to two numbers as doubles, `%` to integers, or `+` to texts.

    A division by 0 is NULL.
    """
    kinds = {part.kind for part in (left, right) if isinstance(part, Term)}
    if calculate is operators.concat_op:  # SQLAlchemy's operator for `+` between two tags
        calculate = operators.add
    if calculate is operators.add and "text" in kinds:
        joined = as_kind(left, "text").sql.concat(as_kind(right, "text").sql)
        return Term(joined, "text")
    kind: Kind = "integer" if calculate is operators.mod else "number"
    first, second = as_kind(left, kind).sql, as_kind(right, kind).sql
    if calculate in (operators.truediv, operators.mod):
        second = func.nullif(second, as_kind(constant(0), kind).sql, type_=second.type)
    return Term(calculate(first, second), kind)


def called(name: str, parts: Sequence[Part]) -> Term:
    """Call a function with parts as its arguments."""
    call = FUNCTIONS.get(name)
    if call is None:
        refused(f"one of the functions {', '.join(sorted(FUNCTIONS))}", f"{name}()")
    least, most, make = call
    if not least <= len(parts) <= most:
        refused(f"{least} to {most} arguments of {name}()", len(parts))
    return make(*parts)


def _cased(change: Callable[[ColumnElement[str]], Function[str]]) -> Callable[[Part], Term]:
    return lambda part: Term(change(bytewise(as_kind(part, "text").sql)), "text")


def _length(part: Part) -> Term:
    return Term(func.length(as_kind(part, "text").sql, type_=BigInteger()), "integer")


def _abs(part: Part) -> Term:
    return Term(func.abs(as_kind(part, "number").sql, type_=Double()), "number")


def _coalesce(*parts: Part) -> Term:
    kind = common_kind(parts)
    return Term(_first_of([as_kind(part, kind).sql for part in parts]), kind)


def _nullif(part: Part, other: Part) -> Term:
    kind = common_kind((part, other))
    sql = as_kind(part, kind).sql
    return Term(func.nullif(sql, as_kind(other, kind).sql, type_=sql.type), kind)


#: Functions that are safe and the same on both engines: minimum and maximum number of arguments,
#: and the call.
FUNCTIONS: dict[str, tuple[int, int, Callable[..., Term]]] = {
    "abs": (1, 1, _abs),
    "coalesce": (1, 20, _coalesce),
    "length": (1, 1, _length),
    "lower": (1, 1, _cased(partial(func.lower, type_=Text()))),
    "nullif": (2, 2, _nullif),
    "upper": (1, 1, _cased(partial(func.upper, type_=Text()))),
}


def matching(part: Part, pattern: Part, form: str, escape: str | None, fold: bool) -> Term:
    """Match a text with LIKE, or test whether it starts with, ends with or contains another.

    Args:
        part: The text to match.
        pattern: A constant.
        form: "{}" if `pattern` is a LIKE pattern; else the pattern around a plain text, as "{}%".
        escape: Escape character of `pattern`.
        fold: Ignore the case of ASCII letters.
    """
    text = as_kind(part, "text").sql
    if not (isinstance(pattern, Term) and isinstance(pattern.sql, BindParameter)):
        refused("a str to match with", "another expression")
    given: str = as_kind(pattern, "text").sql.value
    if len(given) > _MAX_PATTERN:
        refused(f"at most {_MAX_PATTERN} characters to match with", f"{len(given)} characters")
    like = form.format(_escaped(given, escape, wildcards=form == "{}"))
    if fold:
        text = func.lower(bytewise(text), type_=Text())
        like = like.translate(_ASCII_LOWER)
    return Term(matches(text, like), "boolean")


_ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def _escaped(given: str, escape: str | None, *, wildcards: bool) -> str:
    """Return a pattern with a backslash as escape character, from a plain text or a pattern."""
    like, characters = [], iter(given)
    for character in characters:
        if character == escape:
            character = next(characters, "")
            if not character:
                refused("a pattern that does not end with its escape character", given)
        elif wildcards and character in "%_":
            like.append(character)
            continue
        like.append(f"\\{character}" if character in "%_\\" else character)
    return "".join(like)


def _first_of(several: Sequence[ColumnElement[Any]]) -> ColumnElement[Any]:
    """Return the first value that is not NULL. SQLite's COALESCE needs at least two arguments."""
    return func.coalesce(*several) if len(several) > 1 else several[0]


def _listed(part: Part, terms: Sequence[Term], kind: Kind) -> ColumnElement[bool]:
    sql = as_kind(part, kind).sql
    constants = [as_kind(term, kind).sql for term in terms]
    if kind == "boolean":
        return sql.in_(constants)  # not `sql == a or sql == b`: nested, that grows exponentially
    values = [constant.value for constant in constants]
    if kind == "time":
        refused("text or numbers in in_()", "times")
    return sql.in_(values) if kind == "number" else among(sql, values)


def _indexed(
    condition: ColumnElement[bool], part: Part, operator: Operator, others: Sequence[Part]
) -> ColumnElement[bool]:
    """Add the index lookup to a condition on a tag, if the index of the tag supports it."""
    match part:
        case Tag(path=(str(name),)):
            pass
        case Term(sql=json_part(path=(str(name),))):
            pass
        case _:
            return condition
    values = [_value(other) for other in others]
    lookup = lookup_of(name, operator, [value for value in values if value is not None])
    return condition if lookup is None or None in values else tag_condition(condition, lookup)


def _value(part: Part) -> str | float | None:
    """Return a constant as it is in the index; None for other parts."""
    match part:
        case Term(sql=BindParameter(), kind="text" | "integer" | "number"):
            value: str | float = part.sql.value
            return value
        case Term(sql=True_() | False_()):
            return float(isinstance(part.sql, True_))
    return None


def _bound(value: Any, kind: TypeEngine[Any], name: Kind) -> Term:
    return Term(bindparam(None, value, kind, unique=True), name)
