"""Keyset-paginated scans of whole tables, for analysis.

A scan reads a table by its primary key, in windows of a fixed number of rows, however many of them
match. Every statement thus reads a bounded number of rows, so that no snapshot lasts long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import (
    BinaryExpression,
    BindParameter,
    Column,
    ColumnElement,
    Select,
    Text,
    and_,
    func,
    literal,
    select,
    true,
    tuple_,
)
from sqlalchemy.sql import operators

from replaydb.database.filters.tag_lookups import conjuncts
from replaydb.database.tables.expressions import among, json_as_stored

#: Rows of a table in a window.
WINDOW = 4096
#: The condition that every row meets.
EVERY = true()
#: Operators of comparisons with a value that an index finds.
_INDEXED = {operators.eq, operators.lt, operators.le, operators.gt, operators.ge}


@dataclass(frozen=True, slots=True)
class Scan:
    """Rows of a query in the order of their keys.

    Attributes:
        rows: The query, without conditions.
        keys: Columns that identify a row; the first one is the value that windows are ranges of.
        window: The column of the table that is scanned, in whose order an index has its rows.
        size: Rows of that table in a window.
        condition: Only rows that meet this condition.
        same: Columns of other tables that are equal to the first key, for the planner to start at.
        of: Windows have only rows that meet this condition, which that index finds.
        start: A value below those of `window`.
    """

    rows: Select[Any]
    keys: Sequence[ColumnElement[Any]]
    window: Column[Any]
    size: int
    condition: ColumnElement[bool]
    same: Sequence[ColumnElement[int]] = ()
    of: ColumnElement[bool] = EVERY
    start: Any = 0

    def within(self, where: ColumnElement[bool] | None) -> Scan:
        """Return the scan of only the windows in which a filter can be met.

        A filter for one id thus reads one row, not the windows of the whole table.
        """
        limits = (part for part in conjuncts(where) if _compared(part) is self.window)
        return replace(self, of=and_(self.of, *limits))

    def page(self, start: Any, end: Any, after: Sequence[Any] | None, limit: int) -> Select[Any]:
        """Select the first rows of a window that come after a row.

        The keys are appended as the last columns.

        Args:
            start: The last value of the previous window.
            end: The last value of this window.
            after: Keys of the last row read; None for the first page of a window.
            limit: Maximum number of rows.
        """
        named = (key.label(f"key_{i}") for i, key in enumerate(self.keys))
        statement = self.rows.add_columns(*named).where(self.condition, self.of)
        for column in (self.keys[0], *self.same):
            least = column > start if after is None else column >= after[0]
            statement = statement.where(least, column <= end)
        if after is not None:
            last = (literal(value, key.type) for value, key in zip(after, self.keys, strict=True))
            statement = statement.where(tuple_(*self.keys) > tuple_(*last))
        return statement.order_by(*self.keys).limit(limit)

    def sizes(
        self, start: Any, end: Any, after: Sequence[Any] | None, limit: int
    ) -> Select[Any] | None:
        """Select the size of the texts of each row of such a page; None if no row has texts."""
        texts = [
            func.coalesce(func.length(json_as_stored(column)), 0)
            for column in self.rows.selected_columns
            if isinstance(column.type, Text)
        ]
        if not texts:
            return None
        page = self.page(start, end, after, limit)
        return page.with_only_columns(sum(texts, literal(0)), maintain_column_froms=True)

    def end_of_window(self, start: Any, top: Any) -> Select[Any]:
        """Select the last value of the window after a value; NULL without rows up to `top`."""
        values = select(self.window.label("value")).where(self.window > start, self.window <= top)
        some = values.where(self.of).order_by(self.window).limit(self.size).subquery()
        return select(func.max(some.c.value))

    @property
    def top(self) -> Select[Any]:
        """Select the last value; NULL without rows."""
        return select(func.max(self.window)).where(self.of)


def _compared(part: ColumnElement[bool]) -> ColumnElement[Any] | None:
    """Return the left side of a comparison with values that an index finds."""
    match part:
        case BinaryExpression(right=BindParameter()) if part.operator in _INDEXED:
            return part.left
        case among():
            return next(iter(part.clauses))
    return None
