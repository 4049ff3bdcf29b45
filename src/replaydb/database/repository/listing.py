"""Group metadata, sorted by any column, in pages (`Buffer.find`)."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, true

from replaydb.database.repository import groups
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.tags import (
    MAX_LOOKUPS,
    MAX_LOOKUPS_IN_ORDER,
    look_up_in_snapshot,
)
from replaydb.database.runtime.prepared import execute
from replaydb.database.statements.candidates import Order, Partition
from replaydb.database.statements.pages import (
    INDEXED,
    select_end_of_next,
    select_end_of_previous,
    select_keys,
    select_page_by_id,
    select_page_of_all,
    select_pages,
    select_partitions,
    select_partitions_of,
    select_shown,
)
from replaydb.database.statements.selections import selection
from replaydb.database.tables.column_types import Damaged
from replaydb.database.tables.records import check_scalars
from replaydb.database.tables.schema import group
from replaydb.domain import checks
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import GroupInfo
from replaydb.errors import CorruptPayloadError

#: Number of groups, of all buffers, among which a page in the order of ids is looked for first. The
#: other way costs an index lookup for each task and status.
WINDOW = 1000
#: One statement reads pages of up to this many tasks and statuses.
PARTITIONS = 32
#: Up to this many are read without asking first which of them have groups: a statement takes longer
#: than lookups of groups that do not exist.
FEW_PARTITIONS = 4


@dataclass(frozen=True, slots=True)
class Listing:
    """Selection and order of the groups of a page.

    Attributes:
        names: Groups by id or by uid; None: all groups.
        tasks: Only groups of these tasks.
        statuses: Only groups of these statuses.
        eligible: Only groups that meet this condition.
        order: Sort order; groups without a value come last.
        after: Key and id of the last group of the previous page.
        limit: Maximum number of groups.
    """

    names: Sequence[int] | Sequence[str] | None
    tasks: Collection[str] | None
    statuses: Collection[str] | None
    eligible: ColumnElement[bool] | None
    order: Order
    after: tuple[Any, int] | None
    limit: int | None


def find(connection: Connection, cached: BufferRow, listing: Listing) -> list[GroupInfo]:
    """Return the groups of a page.

    Args:
        connection: A snapshot.
        cached: Row of the buffer as cached in this process.
        listing: Selection and order of the groups.

    Raises:
        CorruptPayloadError: Stored values of some groups cannot be read.
    """
    if listing.names is None:
        most = MAX_LOOKUPS if listing.limit is None else MAX_LOOKUPS_IN_ORDER
        ids = look_up_in_snapshot(connection, cached, listing.eligible, most)
    else:
        ids = list(groups.ids_by_name(connection, cached.id, listing.names).values())
    is_by_id = listing.order.column is group.id
    is_sorted = listing.order.column in INDEXED or (is_by_id and listing.limit is not None)
    rows: list[Any] | None = None
    if ids is not None:
        rows = _among(connection, cached.id, ids, listing)
    elif is_by_id and listing.limit is not None and listing.tasks is None:
        rows = _in_window(connection, cached.id, listing, listing.limit)
    if rows is None:
        is_partial = listing.tasks is not None or listing.statuses is not None
        read = _in_partitions if is_sorted or is_partial else _of_all
        rows = read(connection, cached.id, listing)
    return _shown(connection, cached.id, [row.id for row in rows[: listing.limit]])


def _in_window(
    connection: Connection, buffer_id: int, listing: Listing, limit: int
) -> list[Any] | None:
    """Return a page in the order of ids, read from the next groups of the table.

    None if the page may contain groups beyond them: most are of other buffers, or do not meet the
    conditions.
    """
    after = None if listing.after is None else listing.after[1]
    skip = max(WINDOW, 2 * limit) - 1
    if listing.order.descending:
        start = checks.INT64[1] if after is None else after
        found = execute(connection, select_end_of_previous(start, skip))
        window = group.id < start
        bounds = [group.id >= row.id for row in found]
    else:
        start = 0 if after is None else after
        found = execute(connection, select_end_of_next(start, skip))
        window = group.id > start
        bounds = [group.id <= row.id for row in found]
    eligible = listing.eligible
    where = and_(window, *bounds, true() if eligible is None else eligible)
    condition = selection(buffer_id, statuses=listing.statuses, where=where, by_id=True)
    rows = list(execute(connection, select_page_by_id(condition, listing.order, limit)))
    return rows if not found or len(rows) == limit else None


def _in_partitions(connection: Connection, buffer_id: int, listing: Listing) -> list[Any]:
    """Return the first groups of each task and status, read from their indexes and merged."""
    order, limit = listing.order, listing.limit
    partitions = _partitions(connection, buffer_id, listing)
    rows: list[Any] = []
    for unknown, after, equals in _reads(order, listing.after):
        for start in range(0, len(partitions), PARTITIONS):
            some = partitions[start : start + PARTITIONS]
            statement = select_pages(
                some, order, limit, listing.eligible, after, unknown=unknown, equals=equals
            )
            rows += execute(connection, statement)
        counts = Counter((row.task_name, row.group_status) for row in rows)
        partitions = [
            one for one in partitions if limit is None or counts[one.task_name, one.status] < limit
        ]
    return _sorted(rows, order)


def _partitions(connection: Connection, buffer_id: int, listing: Listing) -> list[Partition]:
    """Return tasks and statuses: those that have groups; or all, if few are named."""
    names = None if listing.tasks is None else sorted(listing.tasks)
    statuses = sorted(GroupStatus if listing.statuses is None else listing.statuses)
    if names is not None and len(names) * len(statuses) <= FEW_PARTITIONS:
        pairs = [(name, status) for name in names for status in statuses]
    else:
        found = select_partitions(buffer_id)
        if names is not None:
            found = select_partitions_of(buffer_id, names)
        pairs = [
            (task.task_name, status)
            for task in execute(connection, found)
            for status in statuses
            if getattr(task, status)
        ]
    return [Partition(buffer_id, name, str(status)) for name, status in pairs]


def _of_all(connection: Connection, buffer_id: int, listing: Listing) -> list[Any]:
    """Return the first groups of all tasks and statuses, read by one scan and sorted."""
    rows: list[Any] = []
    for unknown, after, _ in _reads(listing.order, listing.after):
        if listing.limit is None or len(rows) < listing.limit:
            statement = select_page_of_all(
                buffer_id, listing.order, listing.limit, listing.eligible, after, unknown=unknown
            )
            rows += execute(connection, statement)
    return _sorted(rows, listing.order)


def _reads(
    order: Order, after: tuple[Any, int] | None
) -> Iterator[tuple[bool, tuple[Any, int] | None, bool]]:
    """Yield the arguments `unknown`, `after` and `equals` of the reads of a page, in order."""
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
    """Return the groups with these ids that meet the conditions of a listing, sorted in Python."""
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
    """Sort rows, those without a key last; keep only rows that come after a key and an id."""
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
