"""Group metadata, sorted by any column, in pages (`Buffer.find`)."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, ColumnElement, Select, and_, literal, select, tuple_, union_all

from replaydb.database.repository import groups
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.tags import MAX_LOOKUPS, MAX_LOOKUPS_IN_ORDER, look_up_in_snapshot
from replaydb.database.runtime.prepared import prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.candidates import Order, Partition, verdict
from replaydb.database.statements.episode_group import SHOWN
from replaydb.database.statements.selections import selection
from replaydb.database.tables.column_types import Damaged
from replaydb.database.tables.expressions import among, comes_after, comes_before
from replaydb.database.tables.records import check_scalars
from replaydb.database.tables.schema import INDEXED, IS_IDLE, episode_group, group, run, task
from replaydb.database.tables.staleness import current_staleness
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


def find(session: Session, cached: BufferRow, listing: Listing) -> list[GroupInfo]:
    """Return the groups of a page.

    Args:
        session: A snapshot.
        cached: Row of the buffer as cached in this process.
        listing: Selection and order of the groups.

    Raises:
        CorruptPayloadError: Stored values of some groups cannot be read.
    """
    if listing.names is None:
        most = MAX_LOOKUPS if listing.limit is None else MAX_LOOKUPS_IN_ORDER
        ids = look_up_in_snapshot(session, cached, listing.eligible, most)
    else:
        ids = list(groups.ids_by_name(session, cached.id, listing.names).values())
    is_by_id = listing.order.column is group.id
    is_sorted = listing.order.column in INDEXED or (is_by_id and listing.limit is not None)
    rows: list[Any] | None = None
    if ids is not None:
        rows = _among(session, cached.id, ids, listing)
    elif is_by_id and listing.limit is not None and listing.tasks is None:
        rows = _in_window(session, cached.id, listing, listing.limit)
    if rows is None:
        is_partial = listing.tasks is not None or listing.statuses is not None
        read = _in_partitions if is_sorted or is_partial else _of_all
        rows = read(session, cached.id, listing)
    return _shown(session, cached.id, [row.id for row in rows[: listing.limit]])


def _in_window(session: Session, buffer_id: int, listing: Listing, limit: int) -> list[Any] | None:
    """Return a page in the order of ids, read from the next groups of the table.

    None if the page may contain groups beyond them: most are of other buffers, or do not meet the
    conditions.
    """
    skip, first = max(WINDOW, 2 * limit) - 1, 0
    select_end, after, until = select_end_of_next, operator.gt, operator.le
    if listing.order.descending:
        first = checks.INT64[1]
        select_end, after, until = select_end_of_previous, operator.lt, operator.ge
    start = first if listing.after is None else listing.after[1]
    found = session.run(select_end(start, skip))
    window = and_(after(group.id, start), *(until(group.id, row.id) for row in found))
    where = window if listing.eligible is None else window & listing.eligible
    condition = selection(buffer_id, statuses=listing.statuses, where=where, by_id=True)
    rows = list(session.run(select_page_by_id(condition, listing.order, limit)))
    return rows if not found or len(rows) == limit else None


def _in_partitions(session: Session, buffer_id: int, listing: Listing) -> list[Any]:
    """Return the first groups of each task and status, read from their indexes and merged."""
    order, limit = listing.order, listing.limit
    partitions = _partitions(session, buffer_id, listing)
    rows: list[Any] = []
    for unknown, after, equals in _reads(order, listing.after):
        for start in range(0, len(partitions), PARTITIONS):
            some = partitions[start : start + PARTITIONS]
            statement = select_pages(
                some, order, limit, listing.eligible, after, unknown=unknown, equals=equals
            )
            rows += session.run(statement)
        counts = Counter((row.task_name, row.group_status) for row in rows)
        partitions = [
            one for one in partitions if limit is None or counts[one.task_name, one.status] < limit
        ]
    return _sorted(rows, order)


def _partitions(session: Session, buffer_id: int, listing: Listing) -> list[Partition]:
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
            for task in session.run(found)
            for status in statuses
            if getattr(task, status)
        ]
    return [Partition(buffer_id, name, str(status)) for name, status in pairs]


def _of_all(session: Session, buffer_id: int, listing: Listing) -> list[Any]:
    """Return the first groups of all tasks and statuses, read by one scan and sorted."""
    rows: list[Any] = []
    for unknown, after, _ in _reads(listing.order, listing.after):
        if listing.limit is None or len(rows) < listing.limit:
            statement = select_page_of_all(
                buffer_id, listing.order, listing.limit, listing.eligible, after, unknown=unknown
            )
            rows += session.run(statement)
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


def _among(session: Session, buffer_id: int, ids: Sequence[int], listing: Listing) -> list[Any]:
    """Return the groups with these ids that meet the conditions of a listing, sorted in Python."""
    condition = selection(
        buffer_id,
        ids=ids,
        tasks=listing.tasks,
        statuses=listing.statuses,
        where=listing.eligible,
    )
    rows = session.run(select_keys(condition, listing.order.column))
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


def _shown(session: Session, buffer_id: int, ids: Sequence[int]) -> list[GroupInfo]:
    found = session.run(select_shown(buffer_id, ids))
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


@prepared
def select_shown(buffer_id: Any, ids: Any) -> Select[Any]:
    """Select the columns of groups that users can see, by id."""
    statement = select(*SHOWN).outerjoin_from(episode_group, run, group.run_id == run.c.id)
    return statement.where(selection(buffer_id, ids=ids))


@prepared
def select_partitions(buffer_id: Any) -> Select[Any]:
    """Select the tasks of a buffer, and for every status whether there are groups of it.

    Each is one lookup in `ix_episode_group_arrival`, forced by an order that no other index has.
    Otherwise PostgreSQL might scan all groups for a first match, and there may be none.
    """
    mine = select(group.id).where(group.buffer_id == buffer_id, group.task_name == task.c.task_name)
    first = mine.order_by(group.group_status, group.id).limit(1)
    there = (
        first.where(group.group_status.between(status.value, status.value))
        .scalar_subquery()
        .is_not(None)
        .label(status.value)
        for status in GroupStatus
    )
    return select(task.c.task_name, *there).where(task.c.buffer_id == buffer_id)


@prepared
def select_partitions_of(buffer_id: Any, names: Any) -> Select[Any]:
    """As `select_partitions`, for some tasks."""
    return select_partitions.build(buffer_id).where(among(task.c.task_name, names))


def select_keys(condition: ColumnElement[bool], column: Column[Any]) -> Select[Any]:
    """Select the groups that meet a condition, as (id, key), in no order."""
    return select(group.id, _key(column).label("key")).where(condition)


def _key(column: Column[Any]) -> ColumnElement[Any]:
    """Return the expression that groups are sorted by for a column."""
    return current_staleness() if column is group.staleness else column


def select_pages(
    partitions: Iterable[Partition],
    order: Order,
    limit: int | None,
    eligible: ColumnElement[bool] | None,
    after: tuple[Any, int] | None,
    **which: bool,
) -> Select[Any]:
    """Select the rows of `select_page` for several partitions, with their task and status."""
    pages = [
        select_page(one, order, limit, eligible, after, **which).subquery(f"page_{number}")
        for number, one in enumerate(partitions)
    ]
    return select(union_all(*map(select, pages)).subquery())


def select_page(
    partition: Partition,
    order: Order,
    limit: int | None,
    eligible: ColumnElement[bool] | None,
    after: tuple[Any, int] | None,
    *,
    unknown: bool,
    equals: bool = False,
) -> Select[Any]:
    """Select a page of the groups of a partition in an order, as (id, key, task, status).

    Args:
        partition: The groups.
        order: Sort order.
        limit: Maximum number of rows.
        eligible: Only groups that meet this condition.
        after: Key and id of the group before the page; None for the first page.
        unknown: Select the groups whose key is NULL instead of the others.
        equals: For an indexed column, select groups with the key of `after` and later ids;
            otherwise groups with later keys. These are two reads, since SQLite seeks an id in an
            index only if the column before it has a single value.
    """
    column = order.column
    key = _key(column)
    by_age = column is group.id or (unknown and column is group.last_sampled_at)
    condition = (group.buffer_id == partition.buffer_id) & (group.task_name == partition.task_name)
    if by_age:
        # Only `ix_episode_group_arrival` has this order: a range of statuses, then ids.
        columns: list[ColumnElement[Any]] = [group.group_status, group.id]
        if after is None:
            condition &= group.group_status.between(partition.status, partition.status)
    else:
        columns = [key, group.id]
        condition &= group.group_status == partition.status
        condition = condition & IS_IDLE if partition.is_idle else condition
    if column.nullable:
        condition &= key.is_(None) if unknown else key.is_not(None)
    if after is not None and by_age:
        status = literal(partition.status, group.group_status.type)
        later = comes_before if order.descending else comes_after
        condition &= later(group.group_status, status, group.id, after[1])
    elif after is not None:
        condition &= _beyond(order, after, unknown=unknown, equals=equals)
    return _page(condition, order, columns, limit, eligible)


def select_page_of_all(
    buffer_id: int,
    order: Order,
    limit: int | None,
    eligible: ColumnElement[bool] | None,
    after: tuple[Any, int] | None,
    *,
    unknown: bool,
) -> Select[Any]:
    """As `select_page`, of all tasks and statuses together.

    Without an index of the order, each page of a partition would read all groups.
    """
    key = _key(order.column)
    condition = group.buffer_id == buffer_id
    if order.column.nullable:
        condition &= key.is_(None) if unknown else key.is_not(None)
    if after is not None:
        condition &= _beyond(order, after, unknown=unknown, equals=False)
    return _page(condition, order, (key, group.id), limit, eligible)


def _page(
    condition: ColumnElement[bool],
    order: Order,
    columns: Sequence[ColumnElement[Any]],
    limit: int | None,
    eligible: ColumnElement[bool] | None,
) -> Select[Any]:
    """Select the first groups that meet a condition in an order, which is that of some columns."""
    condition &= verdict(eligible)
    ordered = (column.desc() if order.descending else column for column in columns)
    page = select_keys(condition, order.column).add_columns(group.task_name, group.group_status)
    return page.order_by(*ordered).limit(limit)


@prepared
def select_end_of_next(after: Any, skip: Any) -> Select[int]:
    """Select the group, of any buffer, that follows an id after `skip` others; none if too few."""
    return select(group.id).where(group.id > after).order_by(group.id).offset(skip).limit(1)


@prepared
def select_end_of_previous(before: Any, skip: Any) -> Select[int]:
    """As `select_end_of_next`, in descending order of ids."""
    ids = select(group.id).where(group.id < before).order_by(group.id.desc())
    return ids.offset(skip).limit(1)


def select_page_by_id(condition: ColumnElement[bool], order: Order, limit: int) -> Select[Any]:
    """Select the first groups that meet a condition in an order of ids, as (id, key)."""
    by_id = group.id.desc() if order.descending else group.id
    return select_keys(condition, group.id).order_by(by_id).limit(limit)


def _beyond(
    order: Order, after: tuple[Any, int], *, unknown: bool, equals: bool
) -> ColumnElement[bool]:
    """Condition for groups that come after a key and an id."""
    key, last = _key(order.column), literal(after[0], order.column.type)
    of_equals = comes_before if order.descending else comes_after
    if equals:
        return of_equals(key, last, group.id, after[1])
    here: ColumnElement[Any]
    there: ColumnElement[Any]
    if unknown:
        here, there = group.id, literal(after[1], group.id.type)
    elif order.column in INDEXED:
        here, there = key, last
    else:
        here = tuple_(key, group.id)
        there = tuple_(last, literal(after[1], group.id.type))
    return here < there if order.descending else here > there
