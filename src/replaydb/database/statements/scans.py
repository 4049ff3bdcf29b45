"""Keyset-paginated scans of whole tables, for analysis.

A scan reads a table by its primary key, in windows of a fixed number of rows, however many of them
match. Every statement thus reads a bounded number of rows, so that no snapshot lasts long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, ColumnElement, Select, Text, func, literal, select, tuple_

from replaydb.database.tables.column_types import is_json
from replaydb.database.tables.expressions import json_as_stored

#: Rows of a table in a window.
WINDOW = 4096


@dataclass(frozen=True, slots=True)
class Scan:
    """Rows of a query in the order of their keys.

    Attributes:
        rows: The query, without conditions.
        keys: Columns that identify a row; the first one is the id that windows are ranges of.
        window: The primary key of the table that is scanned.
        size: Rows of that table in a window.
        condition: Only rows that meet this condition.
        same: Columns of other tables that are equal to the first key, for the planner to start at.
    """

    rows: Select[Any]
    keys: Sequence[ColumnElement[Any]]
    window: Column[int]
    size: int
    condition: ColumnElement[bool]
    same: Sequence[ColumnElement[int]] = ()

    def page(self, start: int, end: int, after: Sequence[Any] | None, limit: int) -> Select[Any]:
        """Select the first rows of a window that come after a row.

        The keys are appended as the last columns.

        Args:
            start: The last id of the previous window.
            end: The last id of this window.
            after: Keys of the last row read; None for the first page of a window.
            limit: Maximum number of rows.
        """
        named = (key.label(f"key_{i}") for i, key in enumerate(self.keys))
        statement = self.rows.add_columns(*named).where(self.condition)
        for column in (self.keys[0], *self.same):
            least = column > start if after is None else column >= after[0]
            statement = statement.where(least, column <= end)
        if after is not None:
            last = (literal(value, key.type) for value, key in zip(after, self.keys, strict=True))
            statement = statement.where(tuple_(*self.keys) > tuple_(*last))
        return statement.order_by(*self.keys).limit(limit)

    def sizes(
        self, start: int, end: int, after: Sequence[Any] | None, limit: int
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

    def end_of_window(self, start: int, top: int) -> Select[Any]:
        """Select the last id of the window after an id; NULL if there are no rows up to `top`."""
        ids = select(self.window).where(self.window > start, self.window <= top)
        return select(func.max(ids.order_by(self.window).limit(self.size).subquery().c.id))

    @property
    def top(self) -> Select[Any]:
        """Select the last id of the table."""
        return select(func.max(self.window))


def plain(rows: Select[Any]) -> Select[Any]:
    """Return the query with JSON columns as their stored text."""
    shown = [
        json_as_stored(column).label(column.key) if is_json(column.type) else column
        for column in rows.selected_columns
    ]
    return rows.with_only_columns(*shown)
