"""Reading groups in the order of an index, over several tasks and statuses at once."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection

from replaydb.database.schema import Damaged
from replaydb.database.statements import draws as statements
from replaydb.database.statements.draws import Order, Pool


def first(
    connection: Connection,
    pool: Pool,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None = None,
) -> list[Any]:
    """The first groups of a pool; those whose key is unknown come last."""
    rows: list[Any] = []
    for unknown in (False, True) if order.column.nullable else (False,):
        statement = statements.first_in_order(
            pool, order, limit - len(rows), eligible, unknown=unknown
        )
        rows.extend(connection.execute(*statement).all())
        if len(rows) == limit:
            break
    return rows


def sort_key(order: Order, row: Any) -> float:
    """The key of a row of `first` as a number, by which rows of several pools can be merged."""
    if row.key is None:
        return -np.inf if order.descending else np.inf
    if isinstance(row.key, Damaged):
        return -np.inf  # of a time: it was drawn, nobody knows when
    return row.key.timestamp() if isinstance(row.key, datetime) else float(row.key)


def first_of_all(
    connection: Connection,
    pools: Iterable[Pool],
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None = None,
) -> list[Any]:
    """The first groups of several pools together."""
    rows = [row for pool in pools for row in first(connection, pool, order, limit, eligible)]
    rows.sort(key=lambda row: (sort_key(order, row), row.id), reverse=order.descending)
    return rows[:limit]
