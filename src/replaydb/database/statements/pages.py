"""Groups in the order of a column, a page at a time, without their payloads."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, ColumnElement, Select, func, literal, select, tuple_

from replaydb.database.expressions import among, as_stored, comes_after, comes_before
from replaydb.database.prepared import prepared
from replaydb.database.schema import IS_IDLE, episode_group, group, run, task
from replaydb.database.staleness import current_staleness
from replaydb.database.statements.pools import Order, Pool
from replaydb.database.statements.selections import selection
from replaydb.episodes import GroupStatus

#: All that a user may see of a group.
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
    """What a user may see of some groups."""
    statement = select(*SHOWN).outerjoin_from(episode_group, run, group.run_id == run.c.id)
    return statement.where(selection(buffer_id, ids=ids))


@prepared
def select_ids_of_prompt(buffer_id: Any, prompt_uid: Any, most: Any) -> Select[Any]:
    """The groups of a prompt, so many at most."""
    mine = (group.buffer_id == buffer_id) & (group.prompt_uid == prompt_uid)
    return select(group.id).where(mine).limit(most)


@prepared
def select_pools(buffer_id: Any) -> Select[Any]:
    """The tasks of a buffer, and for every status whether there are groups of it.

    One look into the index of arrivals each, whose order no other has, as for pages: PostgreSQL
    would hope that the first group of all is of the task, and read all where there is none.
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
def select_pools_of(buffer_id: Any, names: Any) -> Select[Any]:
    """The same of some tasks."""
    return select_pools.build(buffer_id).where(among(task.c.task_name, names))


def select_keys(condition: ColumnElement[bool], column: Column[Any]) -> Select[Any]:
    """The groups that meet a condition, as (id, key) in no order."""
    return select(group.id, _key(column).label("key")).where(condition)


def _key(column: Column[Any]) -> ColumnElement[Any]:
    """What groups are sorted by."""
    return current_staleness() if column is group.staleness else column


def select_page(
    pool: Pool,
    order: Order,
    limit: int | None,
    eligible: ColumnElement[bool] | None,
    after: tuple[Any, int] | None,
    *,
    unknown: bool,
    equals: bool = False,
) -> Select[Any]:
    """A page of the groups of a pool in an order, as (id, key).

    Args:
        pool: Of which groups.
        order: Sort order.
        limit: Rows at most.
        eligible: Only these.
        after: Key and id of the group before the page; None for the first page.
        unknown: Take the groups whose key is NULL instead of the others.
        equals: Of an indexed column, take those with the key of `after` and later ids; otherwise
            those with later keys. Two reads, as SQLite looks for an id in an index only where the
            column before it has one value.
    """
    column = order.column
    key = _key(column)
    by_age = column is group.id or (unknown and column is group.last_sampled_at)
    condition = (group.buffer_id == pool.buffer_id) & (group.task_name == pool.task_name)
    if by_age:
        # The index of arrivals has the order of a range of statuses, and no other has that of ids.
        columns: list[ColumnElement[Any]] = [group.group_status, group.id]
        if after is None:
            condition &= group.group_status.between(pool.status, pool.status)
    else:
        columns = [key, group.id]
        condition &= group.group_status == pool.status
        condition = condition & IS_IDLE if pool.is_idle else condition
    if column.nullable:
        condition &= key.is_(None) if unknown else key.is_not(None)
    if after is not None:
        condition &= _beyond(pool, order, after, by_age=by_age, unknown=unknown, equals=equals)
    if eligible is not None:
        condition &= func.coalesce(eligible, literal(False))  # no reason for another index
    ordered = (sorted_by.desc() if order.descending else sorted_by for sorted_by in columns)
    return select_keys(condition, column).order_by(*ordered).limit(limit)


#: Columns that have an index of their own, in which idle groups are in their order.
INDEXED = {group.priority, group.comparable_version, group.times_sampled, group.last_sampled_at}


def _beyond(
    pool: Pool,
    order: Order,
    after: tuple[Any, int],
    *,
    by_age: bool,
    unknown: bool,
    equals: bool,
) -> ColumnElement[bool]:
    """What comes after a key and an id."""
    key, last = _key(order.column), literal(after[0], order.column.type)
    of_equals = comes_before if order.descending else comes_after
    if by_age:
        status = literal(pool.status, group.group_status.type)
        return of_equals(group.group_status, status, group.id, after[1])
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
