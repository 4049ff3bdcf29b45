"""What is known of groups, in the order of any column, a page at a time."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection

from replaydb.database.column_types import Damaged
from replaydb.database.prepared import execute
from replaydb.database.records import check_scalars
from replaydb.database.repository import groups
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.tags import FEW, FEW_IN_ORDER, look_up_now
from replaydb.database.statements.pages import (
    INDEXED,
    select_keys,
    select_page,
    select_pools,
    select_pools_of,
    select_shown,
)
from replaydb.database.statements.pools import Order, Pool
from replaydb.database.statements.selections import selection
from replaydb.episodes import GroupStatus
from replaydb.errors import CorruptPayloadError
from replaydb.results import GroupInfo


@dataclass(frozen=True, slots=True)
class Listing:
    """Which groups to show.

    Attributes:
        names: Groups by id or by uid; None: all there are.
        tasks: Only groups of these tasks.
        statuses: Only groups of these statuses.
        eligible: Only groups that meet this.
        order: By what they are sorted; those without a value come last.
        after: Key and id of the group that was the last of the page before.
        limit: How many at most.
    """

    names: Sequence[int] | Sequence[str] | None
    tasks: Collection[str] | None
    statuses: Collection[str] | None
    eligible: ColumnElement[bool] | None
    order: Order
    after: tuple[Any, int] | None
    limit: int | None


def find(connection: Connection, seen: BufferRow, listing: Listing) -> list[GroupInfo]:
    """The groups of a page, of a buffer as this process last saw it.

    Raises:
        CorruptPayloadError: What is stored of some cannot be read.
    """
    if listing.names is None:
        most = FEW if listing.limit is None else FEW_IN_ORDER
        ids = look_up_now(connection, seen, listing.eligible, most)
    else:
        ids = list(groups.ids_by_name(connection, seen.id, listing.names).values())
    if ids is None:
        rows = _in_pools(connection, seen.id, listing)
    else:
        rows = _among(connection, seen.id, ids, listing)
    return _shown(connection, seen.id, [row.id for row in rows[: listing.limit]])


def _in_pools(connection: Connection, buffer_id: int, listing: Listing) -> list[Any]:
    """The first groups of each task and status, from their indexes, and of those the first."""
    statuses = list(GroupStatus) if listing.statuses is None else listing.statuses
    rows: list[Any] = []
    pools = select_pools(buffer_id)
    if listing.tasks is not None:
        pools = select_pools_of(buffer_id, sorted(listing.tasks))
    for task in execute(connection, pools):
        for status in statuses:
            if getattr(task, status):
                pool = Pool(buffer_id, task.task_name, str(status))
                rows.extend(_first(connection, pool, listing))
    return _sorted(rows, listing.order)


def _first(connection: Connection, pool: Pool, listing: Listing) -> list[Any]:
    order, limit = listing.order, listing.limit
    rows: list[Any] = []
    for unknown, after, equals in _reads(order, listing.after):
        left = None if limit is None else limit - len(rows)
        statement = select_page(
            pool, order, left, listing.eligible, after, unknown=unknown, equals=equals
        )
        rows.extend(execute(connection, statement))
        if limit is not None and len(rows) >= limit:
            break
    return rows


def _reads(
    order: Order, after: tuple[Any, int] | None
) -> Iterator[tuple[bool, tuple[Any, int] | None, bool]]:
    """The arguments `unknown`, `after` and `equals` of the reads that give a page, in order."""
    if after is None or after[0] is not None:
        if after is not None and order.column in INDEXED:
            yield False, after, True
        yield False, after, False
        after = None
    if order.column.nullable:
        yield True, after, False


def _among(
    connection: Connection, buffer_id: int, ids: Sequence[int], listing: Listing
) -> list[Any]:
    """Those of some groups, sorted here."""
    condition = selection(
        buffer_id,
        ids=ids,
        tasks=listing.tasks,
        statuses=listing.statuses,
        where=listing.eligible,
    )
    rows = execute(connection, select_keys(condition, listing.order.column))
    return _sorted(rows, listing.order, listing.after)


def _sorted(rows: Iterable[Any], order: Order, after: tuple[Any, int] | None = None) -> list[Any]:
    """Rows in order, those without a key last; only what comes after a key and an id."""
    known: list[Any] = []
    unknown: list[Any] = []
    for row in rows:
        (unknown if row.key is None or isinstance(row.key, Damaged) else known).append(row)
    known.sort(key=lambda row: (row.key, row.id), reverse=order.descending)
    unknown.sort(key=lambda row: row.id, reverse=order.descending)
    if after is not None:
        behind = operator.lt if order.descending else operator.gt
        if after[0] is None:
            known, unknown = [], [row for row in unknown if behind(row.id, after[1])]
        known = [row for row in known if behind((row.key, row.id), after)]
    return known + unknown


def _shown(connection: Connection, buffer_id: int, ids: Sequence[int]) -> list[GroupInfo]:
    found = execute(connection, select_shown(buffer_id, ids))
    rows = {row.id: row._asdict() for row in found}
    damaged = dict.fromkeys(
        set(ids) - rows.keys(), "an index lists the group, but its row is missing"
    )
    for group_id, row in rows.items():
        try:
            check_scalars(row)
        except CorruptPayloadError as error:
            damaged[group_id] = error.reason
            continue
        row["status"] = GroupStatus(row.pop("group_status"))
        row["leased_from"] = row["leased_from"] and GroupStatus(row["leased_from"])
    if damaged:
        raise CorruptPayloadError("; ".join(sorted(set(damaged.values()))), sorted(damaged))
    return [GroupInfo(**rows[group_id]) for group_id in ids]
