"""Random filters, each with an equivalent Python function of a group's columns.

The functions return True, False or None, which is SQL's unknown.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from hypothesis import strategies as st

import replaydb as rdb

Facts = dict[str, Any]
Path = Sequence[str | int]

KEYS = ["a", "b", "难度", 'x"\\y', "0"]
NUMBERS: list[int | float] = [
    0, 1, 3, -2, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 0.5, 3.0, -0.0, 1e300, 2.0**53, -1e-7,
]  # fmt: skip
TEXTS = ["", "a", "A", "hard", "Hard", "a%b", "a_b", "axb", "ä", "Ä", "难", "*", "[a]", "3", "true"]

values = st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS)
leaves = values | st.none()
inner = st.dictionaries(st.sampled_from(KEYS), leaves, max_size=3) | st.lists(leaves, max_size=3)
tags = st.dictionaries(st.sampled_from(KEYS), leaves | leaves | inner, max_size=4)
# Unsigned 64-bit integers can be stored, but are compared as doubles.
stored_tags = st.just({"a": 2**64 - 1}) | tags

paths: st.SearchStrategy[Path] = st.tuples(st.sampled_from(KEYS)) | st.tuples(
    st.sampled_from(KEYS), st.sampled_from(KEYS) | st.integers(0, 2)
)


@dataclass(frozen=True)
class Condition:
    sql: sa.ColumnElement[bool]
    holds: Callable[[Facts], bool | None]

    def __repr__(self) -> str:
        return str(self.sql.compile(compile_kwargs={"render_postcompile": True}))


def kind(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "text"
    return "other"


def at(facts: Facts, path: Path) -> Any:
    value: Any = facts["tags"]
    for step in path:
        if isinstance(value, dict) and isinstance(step, str):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step] if step < len(value) else None
        else:
            return None
    return value


def element(path: Path) -> Any:
    found: Any = rdb.col.tags
    for step in path:
        found = found[step]
    return found


def compare(op: Callable[[Any, Any], bool], one: Any, other: Any) -> bool | None:
    if kind(one) != kind(other) or kind(one) == "other":
        return None
    if kind(one) == "number":
        both = (one, other)
        if not all(isinstance(number, int) and -(2**63) <= number < 2**63 for number in both):
            return op(float(one), float(other))
    return op(one, other)


def any_of(several: list[bool | None]) -> bool | None:
    return True if True in several else None if None in several else False


def negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def among(value: Any, several: list[Any]) -> bool | None:
    if not several:
        return False
    alike = [one for one in several if kind(one) == kind(value)]
    return any(compare(operator.eq, value, one) for one in alike) if alike else None


def like(value: Any, pattern: str, fold: bool) -> bool | None:
    if not isinstance(value, str):
        return None
    parts = {"%": ".*", "_": "."}
    regex = "".join(parts.get(one, re.escape(one)) for one in pattern)
    flags = re.DOTALL | re.ASCII | (re.IGNORECASE if fold else 0)
    return re.fullmatch(regex, value, flags) is not None


EQUALITY = [operator.eq, operator.ne]
ORDER = [operator.lt, operator.le, operator.gt, operator.ge]


@st.composite
def simple(draw: st.DrawFn) -> Condition:
    """Generate a condition on one tag."""
    path = draw(paths)
    tag = element(path)
    form = draw(st.sampled_from(["compare", "compare", "in", "between", "none", "like", "cast"]))
    if form == "none":
        sql = draw(st.sampled_from([tag.is_(None), tag == None]))  # noqa: E711
        return Condition(sql, lambda facts: at(facts, path) is None)
    if form == "compare":
        value = draw(values)
        op = draw(st.sampled_from(EQUALITY if isinstance(value, bool) else EQUALITY + ORDER))
        return Condition(op(tag, value), lambda facts: compare(op, at(facts, path), value))
    if form == "in":
        several = draw(st.lists(values, max_size=5))
        return Condition(tag.in_(several), lambda facts: among(at(facts, path), several))
    if form == "between":
        low, high = draw(st.sampled_from([(0, 3), (-1.5, 2**53), ("A", "a_b"), (2**53, 2**63 - 1)]))
        return Condition(
            tag.between(low, high),
            lambda facts: negated(
                any_of([compare(operator.lt, at(facts, path), low),
                        compare(operator.gt, at(facts, path), high)])
            ),
        )  # fmt: skip
    if form == "like":
        text = draw(st.sampled_from([*TEXTS, "a%", "%d", "_a%"]))
        name = draw(
            st.sampled_from(["like", "ilike", "startswith", "endswith", "contains", "icontains"])
        )
        if name in ("like", "ilike"):
            fold = name == "ilike"
            return Condition(
                getattr(tag, name)(text), lambda facts: like(at(facts, path), text, fold)
            )
        cut: dict[str, Callable[[str], bool]] = {
            "startswith": lambda value: value.startswith(text),
            "endswith": lambda value: value.endswith(text),
            "contains": lambda value: text in value,
            "icontains": lambda value: lowered(text) in lowered(value),
        }

        def holds(facts: Facts) -> bool | None:
            value = at(facts, path)
            return cut[name](value) if isinstance(value, str) else None

        return Condition(getattr(tag, name)(text), holds)
    return draw(casts(path))


def lowered(text: str) -> str:
    """Convert ASCII letters to lower case."""
    return "".join(one.lower() if one.isascii() else one for one in text)


@st.composite
def casts(draw: st.DrawFn, path: Path) -> Condition:
    tag = element(path)
    which = draw(st.sampled_from(["string", "integer", "float", "boolean", "lower", "length"]))

    def text(facts: Facts) -> str | None:
        value = at(facts, path)
        return value if isinstance(value, str) else None

    def number(facts: Facts) -> float | None:
        value = at(facts, path)
        return float(value) if kind(value) == "number" else None

    def integer(facts: Facts) -> int | None:
        value = at(facts, path)
        fits = type(value) is int and -(2**63) <= value < 2**63
        return value if fits else None

    match which:
        case "string":
            return Condition(
                tag.as_string() != "hard", lambda facts: compare(operator.ne, text(facts), "hard")
            )
        case "integer":
            value = draw(st.sampled_from([1, 2**53 + 1, 2**63 - 1]))
            return Condition(
                tag.as_integer() >= value, lambda facts: compare(operator.ge, integer(facts), value)
            )
        case "float":
            return Condition(
                tag.as_float() / 2 - 1 < 0.5,
                lambda facts: None if (found := number(facts)) is None else found / 2 - 1 < 0.5,
            )
        case "boolean":
            return Condition(
                tag.as_boolean(),
                lambda facts: found if type(found := at(facts, path)) is bool else None,
            )
        case "lower":
            return Condition(
                sa.func.lower(tag) == "hard",
                lambda facts: None if (found := text(facts)) is None else lowered(found) == "hard",
            )
    return Condition(
        sa.func.length(sa.func.coalesce(tag, "")) > 1,
        lambda facts: len(text(facts) or "") > 1,
    )


def combined(parts: st.SearchStrategy[Condition]) -> st.SearchStrategy[Condition]:
    def both(one: Condition, other: Condition) -> Condition:
        return Condition(
            one.sql & other.sql,
            lambda facts: negated(any_of([negated(one.holds(facts)), negated(other.holds(facts))])),
        )

    def either(one: Condition, other: Condition) -> Condition:
        return Condition(
            one.sql | other.sql, lambda facts: any_of([one.holds(facts), other.holds(facts)])
        )

    def opposite(one: Condition) -> Condition:
        return Condition(~one.sql, lambda facts: negated(one.holds(facts)))

    return (
        st.builds(both, parts, parts) | st.builds(either, parts, parts) | st.builds(opposite, parts)
    )


conditions = st.recursive(simple(), combined, max_leaves=4)
