"""Retention statements: find and delete archived groups, draw history, buffers and runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Column, ColumnElement, Delete, Select, delete, func, select

from replaydb.database.runtime.prepared import prepared
from replaydb.database.statements.selections import WITHOUT_LEASE
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import IS_LEASED, buffer, draw, draw_group, group, run
from replaydb.domain.episodes import GroupStatus

_ARCHIVED = GroupStatus.ARCHIVED.value
#: Orders that are the order of ids within one status, and within one buffer. Each is the order of
#: an index. Sorted by id alone, PostgreSQL may scan the primary key past all other rows.
_BY_AGE = (group.group_status, group.id)
_DRAWN_FIRST = (draw.c.buffer_id, draw.c.id)
#: Groups of a draw that are still leased. Once there are none, there will never be any.
_LEASED = select(draw_group.c.group_id).where(draw_group.c.draw_id == draw.c.id, IS_LEASED)


@prepared
def select_archived(buffer_id: Any, task_name: Any, most: Any) -> Select[Any]:
    """Select archived groups of a task, oldest first, as (id, created_at)."""
    columns = (group.id, group.created_at)
    return _archived(buffer_id, task_name, *columns).order_by(*_BY_AGE).limit(most)


@prepared
def select_archived_beyond(buffer_id: Any, task_name: Any, count: Any, most: Any) -> Select[Any]:
    """As `select_archived`, without the newest `count` groups."""
    newest_first = (column.desc() for column in _BY_AGE)
    last = _archived(buffer_id, task_name, group.id).order_by(*newest_first).limit(1).offset(count)
    statement = select_archived.build(buffer_id, task_name, most)
    return statement.where(group.id <= last.scalar_subquery())


@prepared
def select_ended_draws(buffer_id: Any, most: Any) -> Select[Any]:
    """Select draws of a buffer without leased groups, oldest first, as (id, created_at)."""
    return (
        select(draw.c.id, draw.c.created_at)
        .where(_of(buffer_id), ~_LEASED.exists())
        .order_by(*_DRAWN_FIRST)
        .limit(most)
    )


@prepared
def select_draws_beyond(buffer_id: Any, count: Any, most: Any) -> Select[Any]:
    """As `select_ended_draws`, without the newest `count` draws."""
    newest_first = (column.desc() for column in _DRAWN_FIRST)
    last = select(draw.c.id).where(_of(buffer_id)).order_by(*newest_first).limit(1).offset(count)
    return select_ended_draws.build(buffer_id, most).where(draw.c.id <= last.scalar_subquery())


@prepared
def delete_draws(ids: Any) -> Delete:
    """Delete draws with the records of their groups. Draws locked by others are skipped."""
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
    """Select the number, total payload size and last id of the groups that meet a condition."""
    columns: tuple[ColumnElement[Any], ...] = (
        func.count().label("number"),
        func.coalesce(func.sum(group.num_bytes), 0).label("size"),
        func.max(group.id).label("last"),
    )
    return select(*columns).where(condition)


def weigh_draws(condition: ColumnElement[bool]) -> Select[Any]:
    """Select the number and last id of the draws that meet a condition."""
    columns: tuple[ColumnElement[Any], ...] = (
        func.count().label("number"),
        func.max(draw.c.id).label("last"),
    )
    return select(*columns).where(condition)


def select_ids_between(
    key: Column[int], condition: ColumnElement[bool], after: int, last: int, most: int
) -> Select[Any]:
    """Select up to `most` ids of the groups or draws that meet a condition, in a range of ids."""
    in_range = key.between(after + 1, last)
    statement = select(key.label("id")).where(condition, in_range)
    return statement.order_by(key).limit(most)


def ended_draws(
    buffer_id: int, *, before: datetime | None = None, runs: Sequence[str] | None = None
) -> ColumnElement[bool]:
    """Condition for draws of a buffer without leased groups, made before a time, by some runs."""
    condition = (draw.c.buffer_id == buffer_id) & ~_LEASED.exists()
    if before is not None:
        condition &= draw.c.created_at < before
    if runs is not None:
        condition &= draw.c.run_id.in_(select(run.c.id).where(among(run.c.name, runs)))
    return condition


def select_leased_of_run(name: str) -> Select[int]:
    """Select the leased or claimed groups that a run has put or drawn."""
    mine = select(run.c.id).where(run.c.name == name)
    drawn = select(draw_group.c.group_id).join_from(draw_group, draw)
    drawn = drawn.where(draw.c.run_id.in_(mine), IS_LEASED)
    return select(group.id).where(~WITHOUT_LEASE, group.run_id.in_(mine) | group.id.in_(drawn))


def delete_buffer(buffer_id: int) -> Delete:
    """Delete a buffer and everything that belongs to it."""
    return delete(buffer).where(buffer.c.id == buffer_id)


def delete_run(name: str) -> Delete:
    """Delete a run, unless groups or draws refer to it."""
    put = select(group.id).where(group.run_id == run.c.id).exists()
    drew = select(draw.c.id).where(draw.c.run_id == run.c.id).exists()
    return delete(run).where(run.c.name == name, ~put, ~drew)
