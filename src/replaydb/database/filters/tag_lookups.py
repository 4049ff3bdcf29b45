"""Rewriting of tag predicates as lookups in the tag index.

The index of a tag (`group_tag`) has the first characters of its text, or a double. So a lookup may
also find groups that do not meet the comparison. Callers apply the filter itself to what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import operators
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import BooleanClauseList, Grouping

from replaydb.database.tables.expressions import Condition, among
from replaydb.database.tables.schema import group_tag

#: Number of characters of a text that are in the index.
PREFIX = 100

_tag = group_tag.c


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup in the index of a tag.

    Attributes:
        name: Name of the tag.
        is_text: Whether its values are texts; if not, numbers or booleans.
        condition: A condition over the columns of `group_tag`.
    """

    name: str
    is_text: bool
    condition: ColumnElement[bool]


class tag_condition(Condition):
    """A condition on a tag with the index lookup for it. It compiles to the condition alone."""

    def __init__(self, condition: ColumnElement[bool], lookup: Lookup) -> None:
        super().__init__(condition)
        self.lookup = lookup


@compiles(tag_condition)
def _compile_tag_condition(element: tag_condition, compiler: SQLCompiler, **kw: Any) -> str:
    return f"({compiler.process(element.clauses, **kw)})"


def lookup_of(
    name: str, operator: Callable[[Any, Any], Any], values: Sequence[str | float]
) -> Lookup | None:
    """Return the index lookup for a comparison of a tag with constants; None if it has none."""
    texts = [value[:PREFIX] for value in values if isinstance(value, str)]
    numbers = [float(value) for value in values if not isinstance(value, str)]
    if bool(texts) == bool(numbers):
        return None
    column: ColumnElement[Any] = _tag.text if texts else _tag.number
    given: list[Any] = texts or numbers
    found: ColumnElement[bool]
    if operator is operators.in_op:
        found = among(column, texts) if texts else column.in_(numbers)
    elif operator in _RANGES:
        found = _RANGES[operator](column, given[0])
    else:
        return None
    return Lookup(name, bool(texts), found)


#: Exclusive bounds become inclusive, because different texts or integers may be equal in the index.
_RANGES: dict[Callable[[Any, Any], Any], Callable[[Any, Any], ColumnElement[bool]]] = {
    operators.eq: operators.eq,
    operators.lt: operators.le,
    operators.le: operators.le,
    operators.gt: operators.ge,
    operators.ge: operators.ge,
}


def lookups_in(where: ColumnElement[bool] | None, names: Collection[str]) -> list[Lookup]:
    """Return lookups in the indexes of these tags, each of which finds all groups of a filter."""
    together: dict[tuple[str, bool], list[ColumnElement[bool]]] = {}
    for part in conjuncts(where):
        if isinstance(part, tag_condition) and part.lookup.name in names:
            lookup = part.lookup
            together.setdefault((lookup.name, lookup.is_text), []).append(lookup.condition)
    return [Lookup(name, is_text, and_(*several)) for (name, is_text), several in together.items()]


def conjuncts(where: Any) -> Iterator[ColumnElement[bool]]:
    """Yield the conditions that a filter joins with AND."""
    match where:
        case Grouping():
            yield from conjuncts(where.element)
        case BooleanClauseList(operator=operators.and_):
            for clause in where.clauses:
                yield from conjuncts(clause)
        case None:
            pass
        case _:
            yield where
