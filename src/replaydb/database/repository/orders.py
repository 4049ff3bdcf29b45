"""Reading groups in the order of an index, over several tasks and statuses at once."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection

from replaydb.database.column_types import Damaged
from replaydb.database.prepared import execute
from replaydb.database.statements.pools import Order, Pool, select_first, select_oldest_equals


def first(
    connection: Connection,
    pool: Pool,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None = None,
) -> list[Any]:
    """The first groups of a pool, among which equals come in any order.

    Those whose key is unknown come last.
    """
    if order.descending and not order.newest_first:
        return _largest_and_oldest(connection, pool, order, limit, eligible)
    rows: list[Any] = []
    for unknown in (False, True) if order.column.nullable else (False,):
        statement = select_first(pool, order, limit - len(rows), eligible, unknown=unknown)
        rows.extend(execute(connection, statement))
        if len(rows) == limit:
            break
    return rows


def _largest_and_oldest(
    connection: Connection,
    pool: Pool,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None,
) -> list[Any]:
    """The first groups in an order that no index has, by a column that is never NULL.

    An index that is read backwards has the newest of equals first, so the last key that was read
    may have older groups. One row more tells whether it has others at all.
    """
    statement = select_first(pool, order, limit + 1, eligible)
    rows: list[Any] = list(execute(connection, statement))
    if len(rows) <= limit:
        return rows
    following, last = rows.pop().key, rows[-1].key
    if following == last:
        rows = [row for row in rows if row.key != last]
        statement = select_oldest_equals(pool, order, last, limit - len(rows), eligible)
        rows.extend(execute(connection, statement))
    return rows


def sort_key(order: Order, row: Any) -> float:
    """A number by which rows of `first` come in their order, those of several pools merged."""
    if row.key is None:
        return np.inf
    if isinstance(row.key, Damaged):
        return -np.inf  # of a time: it was drawn, nobody knows when
    key = row.key.timestamp() if isinstance(row.key, datetime) else float(row.key)
    return -key if order.descending else key


def first_of_all(
    connection: Connection,
    pools: Iterable[Pool],
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None = None,
) -> list[Any]:
    """The first groups of several pools together."""
    rows = [row for pool in pools for row in first(connection, pool, order, limit, eligible)]
    sign = -1 if order.newest_first else 1
    rows.sort(key=lambda row: (sort_key(order, row), sign * row.id))
    return rows[:limit]
