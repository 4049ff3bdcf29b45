"""The oldest of what is over: archived groups, and draws."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Delete, Select, delete, select

from replaydb.database.expressions import among
from replaydb.database.prepared import prepared
from replaydb.database.schema import IS_LEASED, draw, draw_group, group
from replaydb.episodes import GroupStatus

_ARCHIVED = GroupStatus.ARCHIVED.value
#: Of one status, and of one buffer, that is by id. Each is the order of one index; by id alone,
#: PostgreSQL may walk the primary key past all that is of others.
_BY_AGE = (group.group_status, group.id)
_DRAWN_FIRST = (draw.c.buffer_id, draw.c.id)


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
    # Of a draw of which nothing is leased now, nothing ever will be.
    held = select(draw_group.c.group_id).where(draw_group.c.draw_id == draw.c.id, IS_LEASED)
    return (
        select(draw.c.id, draw.c.created_at)
        .where(_of(buffer_id), ~held.exists())
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
