"""Bounded retention of history: archived groups and recorded draws.

Each call that locks tasks deletes some of the oldest. It deletes more than it adds, so the history
stays within its bound, or shrinks to it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, select

from replaydb.database.repository import transitions
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.tasks import TaskState
from replaydb.database.runtime.prepared import prepared
from replaydb.database.statements.draw import LEASED, delete_draws
from replaydb.database.tables.column_types import Damaged
from replaydb.database.tables.schema import draw, group
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.settings import Keep

#: A call deletes up to this many more than twice the number that it has added.
EXTRA_GROUPS = 16
EXTRA_DRAWS = 4
#: Tasks in which a call searches for archived groups that are too old.
TASKS = 16

_ARCHIVED = GroupStatus.ARCHIVED.value
#: Orders that are the order of ids within one status, and within one buffer. Each is the order of
#: an index. Sorted by id alone, PostgreSQL may scan the primary key past all other rows.
_BY_AGE = (group.group_status, group.id)
_DRAWN_FIRST = (draw.c.buffer_id, draw.c.id)


def trim(buffer: LockedBuffer, before: Mapping[str, TaskState]) -> None:
    """Delete some of the history that is beyond its bounds.

    Args:
        buffer: The buffer, after all other changes of the call.
        before: States of its tasks before the call.
    """
    keep = buffer.settings.keep_archived
    if keep is not None and keep.count is not None:
        _trim_archived_by_count(buffer, before, keep.count)
    if keep is not None and keep.seconds is not None:
        _trim_archived_by_age(buffer, before, keep.seconds)
    keep = buffer.settings.keep_draws
    if keep is not None:
        _trim_draws(buffer, before, keep)


def _trim_archived_by_count(
    buffer: LockedBuffer, before: Mapping[str, TaskState], count: int
) -> None:
    """Keep the newest `count` archived groups of each task that groups were put into.

    They are counted once per `_period(count)` groups put. In the long run, no more groups are
    archived than are put.
    """
    period = _period(count)
    for name, task in buffer.task_states.items():
        passed = task.num_inserted // period - before[name].num_inserted // period
        if passed > 0:
            most = EXTRA_GROUPS + 2 * passed * period
            read = select_archived_beyond(buffer.id, name, count, most + len(buffer.kept))
            _erase(buffer, [row.id for row in buffer.session.run(read)], most)


def _trim_archived_by_age(
    buffer: LockedBuffer, before: Mapping[str, TaskState], seconds: float
) -> None:
    """Delete archived groups of some tasks that were put more than `seconds` ago."""
    names = list(buffer.task_states)
    for name in random.sample(names, min(TASKS, len(names))):
        added = buffer.task_states[name].num_inserted - before[name].num_inserted
        most = EXTRA_GROUPS + 2 * added
        read = select_archived(buffer.id, name, most + len(buffer.kept))
        rows = buffer.session.run(read)
        _erase(buffer, _before(rows, buffer.now - timedelta(seconds=seconds)), most)


def _erase(buffer: LockedBuffer, ids: Sequence[int], most: int) -> None:
    """Delete up to `most` archived groups, except those that the call reports as stored."""
    others = [group_id for group_id in ids if group_id not in buffer.kept]
    transitions.erase(buffer, others[:most])


def _trim_draws(buffer: LockedBuffer, before: Mapping[str, TaskState], keep: Keep) -> None:
    ids: list[int] = []
    if keep.seconds is not None:
        rows = buffer.session.run(select_ended_draws(buffer.id, EXTRA_DRAWS))
        ids += _before(rows, buffer.now - timedelta(seconds=keep.seconds))
    drew = any(
        task.num_sampled > before[name].num_sampled for name, task in buffer.task_states.items()
    )
    if drew and keep.count is not None:
        period = _period(keep.count)
        if random.randrange(period) == 0:  # noqa: S311 - ids of draws are shared by all buffers
            most = EXTRA_DRAWS + 2 * period
            beyond = select_draws_beyond(buffer.id, keep.count, most)
            ids += [row.id for row in buffer.session.run(beyond)]
    if ids:
        buffer.session.run(delete_draws(sorted(set(ids))))


def _period(count: int) -> int:
    """Return how many insertions happen between two counts, since a count scans all entries."""
    return min(max(count // 16, 1), 64)


def _before(rows: Sequence[Any], cutoff: datetime) -> list[int]:
    """Return the ids of rows created before a time. Rows without a readable time are omitted.

    Every row is compared: ids are not in order of age if rows were put while a clock was wrong.
    """
    known = (row for row in rows if not isinstance(row.created_at, Damaged))
    return [row.id for row in known if row.created_at < cutoff]


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
        .where(_of(buffer_id), ~LEASED.exists())
        .order_by(*_DRAWN_FIRST)
        .limit(most)
    )


@prepared
def select_draws_beyond(buffer_id: Any, count: Any, most: Any) -> Select[Any]:
    """As `select_ended_draws`, without the newest `count` draws."""
    newest_first = (column.desc() for column in _DRAWN_FIRST)
    last = select(draw.c.id).where(_of(buffer_id)).order_by(*newest_first).limit(1).offset(count)
    return select_ended_draws.build(buffer_id, most).where(draw.c.id <= last.scalar_subquery())


def _archived(buffer_id: Any, task_name: Any, *columns: ColumnElement[Any]) -> Select[Any]:
    return select(*columns).where(
        group.buffer_id == buffer_id,
        group.task_name == task_name,
        group.group_status.between(_ARCHIVED, _ARCHIVED),
    )


def _of(buffer_id: Any) -> ColumnElement[bool]:
    return draw.c.buffer_id.between(buffer_id, buffer_id)
