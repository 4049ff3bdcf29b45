"""Keyset pages of groups, sorted by a column, without payloads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Column, ColumnElement, Select, func, literal, select, tuple_, union_all

from replaydb.database.runtime.prepared import prepared
from replaydb.database.statements.candidates import Order, Partition
from replaydb.database.statements.selections import selection
from replaydb.database.tables.expressions import among, as_stored, comes_after, comes_before
from replaydb.database.tables.schema import IS_IDLE, episode_group, group, run, task
from replaydb.database.tables.staleness import current_staleness
from replaydb.domain.episodes import GroupStatus

#: Columns of a group that users can see.
SHOWN: tuple[ColumnElement[Any], ...] = (
    group.id,
    group.group_uid,
    group.prompt_uid,
    group.task_name,
    group.group_status,
    group.status_reason,
    group.run_id,
    run.c.name.label("run_name"),
    group.priority,
    current_staleness().label("staleness"),
    group.min_policy_version,
    group.max_policy_version,
    group.comparable_version,
    group.num_episodes,
    group.expected_episodes,
    group.min_episodes,
    group.deadline,
    group.num_tokens,
    group.num_bytes,
    group.has_transcript,
    group.reward_mean,
    group.reward_std,
    group.reward_min,
    group.reward_max,
    group.times_sampled,
    group.times_replaced,
    group.attempts,
    group.lease_id,
    group.leased_from,
    as_stored(group.tags).label("tags"),  # the driver refuses text that is no UTF-8
    group.created_at,
    group.completed_at,
    group.first_sampled_at,
    group.last_sampled_at,
    group.archived_at,
)


@prepared
def select_shown(buffer_id: Any, ids: Any) -> Select[Any]:
    """Select the columns of groups that users can see, by id."""
    statement = select(*SHOWN).outerjoin_from(episode_group, run, group.run_id == run.c.id)
    return statement.where(selection(buffer_id, ids=ids))


@prepared
def select_ids_of_prompt(buffer_id: Any, prompt_uid: Any, most: Any) -> Select[Any]:
    """Select up to `most` ids of groups of a prompt."""
    mine = (group.buffer_id == buffer_id) & (group.prompt_uid == prompt_uid)
    return select(group.id).where(mine).limit(most)


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
    if eligible is not None:
        condition &= func.coalesce(eligible, literal(False))  # so that no other index is used
    ordered = (sorted_by.desc() if order.descending else sorted_by for sorted_by in columns)
    page = select_keys(condition, column).add_columns(group.task_name, group.group_status)
    return page.order_by(*ordered).limit(limit)


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
    if eligible is not None:
        condition &= func.coalesce(eligible, literal(False))
    columns: tuple[ColumnElement[Any], ...] = (key, group.id)
    ordered = (one.desc() if order.descending else one for one in columns)
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


#: Columns with an index in which idle groups are sorted by them.
INDEXED = {group.priority, group.comparable_version, group.times_sampled, group.last_sampled_at}


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
