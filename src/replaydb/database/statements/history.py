"""What is over, and goes: archived groups, draws, whole buffers and runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Column, ColumnElement, Delete, Select, delete, func, select

from replaydb.database.expressions import among
from replaydb.database.prepared import prepared
from replaydb.database.schema import IS_LEASED, buffer, draw, draw_group, group, run
from replaydb.database.statements.selections import UNHELD
from replaydb.episodes import GroupStatus

_ARCHIVED = GroupStatus.ARCHIVED.value
#: Of one status, and of one buffer, that is by id. Each is the order of one index; by id alone,
#: PostgreSQL may walk the primary key past all that is of others.
_BY_AGE = (group.group_status, group.id)
_DRAWN_FIRST = (draw.c.buffer_id, draw.c.id)
#: What is leased of a draw: once there is nothing, there never will be.
_HELD = select(draw_group.c.group_id).where(draw_group.c.draw_id == draw.c.id, IS_LEASED)


@prepared
def select_archived(buffer_id: Any, task_name: Any, most: Any) -> Select[Any]:
    """The archived groups of a task, the oldest first, as (id, created_at)."""
    columns = (group.id, group.created_at)
    return _archived(buffer_id, task_name, *columns).order_by(*_BY_AGE).limit(most)


@prepared
def select_archived_beyond(buffer_id: Any, task_name: Any, count: Any, most: Any) -> Select[Any]:
    """The same, without the newest so many."""
    newest_first = (column.desc() for column in _BY_AGE)
    last = _archived(buffer_id, task_name, group.id).order_by(*newest_first).limit(1).offset(count)
    statement = select_archived.build(buffer_id, task_name, most)
    return statement.where(group.id <= last.scalar_subquery())


@prepared
def select_draws_over(buffer_id: Any, most: Any) -> Select[Any]:
    """The draws of a buffer of which nothing is leased, the oldest first, as (id, created_at)."""
    return (
        select(draw.c.id, draw.c.created_at)
        .where(_of(buffer_id), ~_HELD.exists())
        .order_by(*_DRAWN_FIRST)
        .limit(most)
    )


@prepared
def select_draws_beyond(buffer_id: Any, count: Any, most: Any) -> Select[Any]:
    """The same, without the newest so many draws."""
    newest_first = (column.desc() for column in _DRAWN_FIRST)
    last = select(draw.c.id).where(_of(buffer_id)).order_by(*newest_first).limit(1).offset(count)
    return select_draws_over.build(buffer_id, most).where(draw.c.id <= last.scalar_subquery())


@prepared
def delete_draws(ids: Any) -> Delete:
    """Delete draws with what they say of groups, but for those that somebody else is deleting."""
    mine = select(draw.c.id).where(among(draw.c.id, ids)).with_for_update(skip_locked=True)
    return delete(draw).where(draw.c.id.in_(mine))


def _archived(buffer_id: Any, task_name: Any, *columns: ColumnElement[Any]) -> Select[Any]:
    return select(*columns).where(
        group.buffer_id == buffer_id,
        group.task_name == task_name,
        group.group_status.between(_ARCHIVED, _ARCHIVED),
    )


def _of(buffer_id: Any) -> ColumnElement[bool]:
    return draw.c.buffer_id.between(buffer_id, buffer_id)


def weigh_groups(condition: ColumnElement[bool]) -> Select[Any]:
    """How many groups meet a condition, how large they are, and the last of them."""
    columns: tuple[ColumnElement[Any], ...] = (
        func.count().label("number"),
        func.coalesce(func.sum(group.num_bytes), 0).label("size"),
        func.max(group.id).label("last"),
    )
    return select(*columns).where(condition)


def weigh_draws(condition: ColumnElement[bool]) -> Select[Any]:
    """How many draws meet a condition, and the last of them."""
    columns: tuple[ColumnElement[Any], ...] = (
        func.count().label("number"),
        func.max(draw.c.id).label("last"),
    )
    return select(*columns).where(condition)


def select_ids_between(
    key: Column[int], condition: ColumnElement[bool], after: int, last: int, most: int
) -> Select[Any]:
    """Ids of the groups or draws that meet a condition, in a range, so many at most."""
    in_range = key.between(after + 1, last)
    statement = select(key.label("id")).where(condition, in_range)
    return statement.order_by(key).limit(most)


def draws_over(
    buffer_id: int, *, before: datetime | None = None, runs: Sequence[str] | None = None
) -> ColumnElement[bool]:
    """The draws of a buffer of which nothing is leased, made before a time, by some runs."""
    condition = (draw.c.buffer_id == buffer_id) & ~_HELD.exists()
    if before is not None:
        condition &= draw.c.created_at < before
    if runs is not None:
        condition &= draw.c.run_id.in_(select(run.c.id).where(among(run.c.name, runs)))
    return condition


def select_held_by_run(name: str) -> Select[int]:
    """Groups that a lease holds, and that a run has put or drawn."""
    mine = select(run.c.id).where(run.c.name == name)
    drawn = select(draw_group.c.group_id).join_from(draw_group, draw)
    drawn = drawn.where(draw.c.run_id.in_(mine), IS_LEASED)
    return select(group.id).where(~UNHELD, group.run_id.in_(mine) | group.id.in_(drawn))


def delete_buffer(buffer_id: int) -> Delete:
    """Delete a buffer with everything that belongs to it."""
    return delete(buffer).where(buffer.c.id == buffer_id)


def delete_run(name: str) -> Delete:
    """Delete a run to which nothing refers."""
    put = select(group.id).where(group.run_id == run.c.id).exists()
    drew = select(draw.c.id).where(draw.c.run_id == run.c.id).exists()
    return delete(run).where(run.c.name == name, ~put, ~drew)
