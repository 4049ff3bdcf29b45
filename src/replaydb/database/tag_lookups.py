"""What a filter asks of tags, as questions to their index.

The index of a tag (`group_tag`) has the beginning of its text, or a double. What it gives for a
comparison is every group that meets it, and maybe some that do not: the filter itself, by which
those who look up decide, tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from sqlalchemy import Boolean, ColumnElement, and_
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import operators
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import BooleanClauseList, Grouping
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.operators import OperatorType

from replaydb.database.expressions import among
from replaydb.database.schema import group_tag

#: Characters of a text that the index has.
PREFIX = 100

_tag = group_tag.c


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where in the index of a tag groups are.

    Attributes:
        name: The tag.
        is_text: Whether it is a text; otherwise a number, or true or false.
        condition: Over the columns of `group_tag`.
    """

    name: str
    is_text: bool
    condition: ColumnElement[bool]


class tag_condition(FunctionElement[bool]):
    """A condition on a tag that knows how to look it up. To the engine it is the condition."""

    name = "tag_condition"
    type = Boolean()
    inherit_cache = True

    def __init__(self, condition: ColumnElement[bool], lookup: Lookup) -> None:
        super().__init__(condition)
        self.lookup = lookup

    def self_group(self, against: OperatorType | None = None) -> Self:
        """As it is: it is in brackets."""
        return self


@compiles(tag_condition)
def _compile_tag_condition(element: tag_condition, compiler: SQLCompiler, **kw: Any) -> str:
    return f"({compiler.process(element.clauses, **kw)})"


def lookup_of(
    name: str, operator: Callable[[Any, Any], Any], values: Sequence[str | float]
) -> Lookup | None:
    """A comparison of a tag with constants of one type, where it is one that an index answers."""
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


#: Bounds that a range leaves out stay in: of two texts, or integers, the index may not tell which
#: is the greater.
_RANGES: dict[Callable[[Any, Any], Any], Callable[[Any, Any], ColumnElement[bool]]] = {
    operators.eq: operators.eq,
    operators.lt: operators.le,
    operators.le: operators.le,
    operators.gt: operators.ge,
    operators.ge: operators.ge,
}


def lookups_in(where: ColumnElement[bool] | None, names: Collection[str]) -> list[Lookup]:
    """What all groups that meet a filter have in the indexes of these tags: each says that."""
    together: dict[tuple[str, bool], list[ColumnElement[bool]]] = {}
    for part in conjuncts(where):
        if isinstance(part, tag_condition) and part.lookup.name in names:
            lookup = part.lookup
            together.setdefault((lookup.name, lookup.is_text), []).append(lookup.condition)
    return [Lookup(name, is_text, and_(*several)) for (name, is_text), several in together.items()]


def conjuncts(where: Any) -> Iterator[ColumnElement[bool]]:
    """Conditions all of which a group meets that meets a filter."""
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
