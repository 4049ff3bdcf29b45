"""Ordered index reads of groups, merged over several tasks and statuses."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement

from replaydb.database.runtime.session import Session
from replaydb.database.statements.candidates import Order, Partition, select_first
from replaydb.database.tables.column_types import Damaged


def first(
    session: Session,
    partition: Partition,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None = None,
) -> list[Any]:
    """Return the first groups of a partition. The order of groups with equal keys is unspecified.

    Groups whose key is NULL come last.
    """
    if order.descending and not order.newest_first:
        return _largest_and_oldest(session, partition, order, limit, eligible)
    rows: list[Any] = []
    for unknown in (False, True) if order.column.nullable else (False,):
        statement = select_first(partition, order, limit - len(rows), eligible, unknown=unknown)
        rows.extend(session.run(statement))
        if len(rows) == limit:
            break
    return rows


def _largest_and_oldest(
    session: Session,
    partition: Partition,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None,
) -> list[Any]:
    """Return the groups with the largest keys, the oldest first among equal keys.

    No index has this order: an index that is read backwards has the newest of equal keys first, so
    there may be older groups with the last key that was read. Reading one more row shows whether
    there are other groups with that key. The column must not contain NULL.
    """
    statement = select_first(partition, order, num_first(order, limit), eligible)
    rows: list[Any] = list(session.run(statement))
    if len(rows) <= limit:
        return rows
    following, last = rows.pop().key, rows[-1].key
    if following == last:
        rows = [row for row in rows if row.key != last]
        statement = select_first(partition, order, limit - len(rows), eligible, key=last)
        rows.extend(session.run(statement))
    return rows


def num_first(order: Order, limit: int) -> int:
    """Return how many rows the first read of `limit` groups of a partition selects."""
    return limit + 1 if order.descending and not order.newest_first else limit


def sort_key(order: Order, row: Any) -> float:
    """Return a number that sorts rows of `first`, also merged from several partitions."""
    if row.key is None:
        return np.inf
    if isinstance(row.key, Damaged):
        return -np.inf  # a time that cannot be read: the group was drawn at an unknown time
    key = row.key.timestamp() if isinstance(row.key, datetime) else float(row.key)
    return -key if order.descending else key


def first_of_all(
    session: Session,
    partitions: Iterable[Partition],
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None = None,
) -> list[Any]:
    """Return the first groups of several partitions, merged; of equals the oldest first."""
    rows = [
        row for partition in partitions for row in first(session, partition, order, limit, eligible)
    ]
    rows.sort(key=lambda row: (sort_key(order, row), row.id))
    return rows[:limit]
