"""Statements on tasks: locks of tasks and their buffer, clocks and counters."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Delete,
    Insert,
    Select,
    Update,
    and_,
    bindparam,
    case,
    delete,
    false,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    type_coerce,
    update,
)

from replaydb.database.runtime.prepared import prepared
from replaydb.database.statements.buffer import BUFFERS, USES_PAYLOAD_STORE, turn_of_buffer
from replaydb.database.tables.expressions import (
    among,
    in_turn,
    joined,
    next_draw_id,
    next_lease_id,
    server_time,
)
from replaydb.database.tables.schema import buffer, group, lease, task
from replaydb.domain.episodes import GroupStatus

#: Columns of a buffer whose values may be large.
_LARGE = {"settings", "pending_tags"}
_IS_LAST = bindparam("is_last", type_=Boolean())
#: Kind of the advisory locks of tasks.
_TASK: ColumnElement[int] = literal_column("1919250540")  # "repl"


def select_task_names(buffer_id: int) -> Select[str]:
    """Select the names of the tasks of a buffer."""
    return select(task.c.task_name).where(task.c.buffer_id == buffer_id)


@cache
def insert_tasks() -> Insert:
    """Insert tasks, given as dicts of their columns."""
    return insert(task)


@prepared
def delete_tasks(buffer_id: Any, names: Any) -> Delete:
    """Delete tasks by name, which have no groups."""
    return delete(task).where(task.c.buffer_id == buffer_id, among(task.c.task_name, names))


@prepared
def lock_tasks(buffer_id: Any, names: Any, draws: Any, leases: Any) -> Select[Any]:
    """Lock some tasks, always in the same order, to avoid deadlocks. Select them and the buffer.

    Rows that refer to a locked row can still be inserted (`key_share`), as for buffers: a foreign
    key check must not wait for a lock that may itself wait for its transaction.

    Each row has a task and its buffer. If there are no such tasks, there is one row, with NULL in
    the columns of the task. Only the first row has the buffer's JSON values.
    """
    some = among(task.c.task_name, names)
    return _locked(_first_in_turn(buffer_id, some).where(some), buffer_id, draws, leases)


@prepared
def lock_all_tasks(buffer_id: Any, draws: Any, leases: Any) -> Select[Any]:
    """As `lock_tasks`, for all tasks."""
    return _locked(_first_in_turn(buffer_id), buffer_id, draws, leases)


@prepared
def lock_buffer_and_tasks(buffer_id: Any, draws: Any, leases: Any) -> Select[Any]:
    """As `lock_all_tasks`, with a lock of the buffer, which is taken first."""
    turn = or_(_IS_LAST, turn_of_buffer(buffer_id))
    mine = select(buffer.c.id).where(buffer.c.id == buffer_id, turn)
    held = mine.with_for_update(key_share=True).cte("held")
    every = select_tasks.build(buffer_id).where(task.c.buffer_id == held.c.id)
    return _locked(every, buffer_id, draws, leases).where(buffer.c.id == held.c.id)


@prepared
def lock_leased_tasks(buffer_id: Any, lease_id: Any) -> Select[Any]:
    """As `lock_tasks`, for the tasks of the groups of a lease."""
    some = task.c.task_name.in_(select(group.task_name).where(group.lease_id == lease_id))
    return _locked(_first_in_turn(buffer_id, some).where(some), buffer_id)


@prepared
def lock_expiring_tasks(buffer_id: Any, most: Any) -> Select[Any]:
    """As `lock_tasks`, for up to `most` tasks that may have groups that are too stale."""
    some = select_tasks.build(buffer_id).where(task.c.is_expiring).limit(most)
    return _locked(some, buffer_id)


@prepared
def lock_aging_tasks(buffer_id: Any, most: Any) -> Select[Any]:
    """As `lock_tasks`, for up to `most` tasks whose column `staleness` is behind."""
    some = select_tasks.build(buffer_id).where(task.c.aged_to.is_not(None)).limit(most)
    return _locked(some, buffer_id)


def _first_in_turn(buffer_id: Any, *some: ColumnElement[bool]) -> Select[Any]:
    """Select tasks in the order of their locks, once the turn for the first of these has come.

    One turn is enough, since transactions that lock the same tasks first lock the same task. Locks
    of this kind for each task could exceed the memory that PostgreSQL has for them.
    """
    first = select(in_turn(_TASK, func.min(task.c.id))).where(task.c.buffer_id == buffer_id, *some)
    return select_tasks.build(buffer_id).where(or_(_IS_LAST, first.scalar_subquery()))


def _locked(
    tasks: Select[Any], buffer_id: Any, draws: Any = None, leases: Any = None
) -> Select[Any]:
    """Select tasks, locked, with their buffer; the first time only the first of them.

    See `execute_locking`. If `draws` or `leases` is true, a new id of that table is selected.
    """
    locked = tasks.with_for_update(key_share=True, of=task).cte("locked")
    first = select(func.min(locked.c.task_id)).scalar_subquery()
    is_first = or_(locked.c.task_id.is_(None), locked.c.task_id == first)
    ids = joined(locked.c.task_id)  # reads all, and so locks them
    of_buffer = (
        case((is_first, column)).label(column.name) if column.name in _LARGE else column
        for column in buffer.c
    )
    new_ids = (
        select(new)
        .where(and_(_IS_LAST, false() if wanted is None else type_coerce(wanted, Boolean())))
        .scalar_subquery()
        .label(name)
        for name, new, wanted in (
            ("draw_id", next_draw_id(), draws),
            ("lease_id", next_lease_id(), leases),
        )
    )
    return (
        select(
            *of_buffer,
            USES_PAYLOAD_STORE,
            *locked.c,
            server_time().label("read_at"),
            case(
                (server_time().is_(None), null()),
                (and_(_IS_LAST, is_first), _is_overdue(buffer_id)),
            ).label("has_overdue"),
            *new_ids,
            case((is_first, select(ids).scalar_subquery())).label("locked_ids"),
            _IS_LAST.label("is_last"),
            is_first.label("is_first"),
        )
        .select_from(BUFFERS.outerjoin(locked, or_(_IS_LAST, locked.c.task_id == first)))
        .where(buffer.c.id == buffer_id)
        .order_by(locked.c.task_id)
    )


def _is_overdue(buffer_id: Any) -> ColumnElement[bool]:
    """Whether a lease has expired, or the deadline of a pending group has passed."""
    now = server_time()
    leases = select(lease.c.id).where(lease.c.buffer_id == buffer_id, lease.c.expires_at <= now)
    pending = group.group_status == literal_column(repr(GroupStatus.PENDING.value))
    late = select(group.id).where(
        group.buffer_id == buffer_id, pending, group.deadline <= now, group.deadline.is_not(None)
    )
    return leases.exists() | late.exists()


def any_expiring(buffer_id: int) -> ColumnElement[bool]:
    """Whether tasks of a buffer may have groups that are too stale and have not expired yet."""
    return select(task.c.id).where(task.c.buffer_id == buffer_id, task.c.is_expiring).exists()


def any_older(
    buffer_id: int, statuses: Collection[GroupStatus], cutoff: datetime
) -> ColumnElement[bool]:
    """Whether the first group of some status of a task of a buffer was put before a time."""
    firsts = (
        select(group.created_at)
        .where(
            group.buffer_id == buffer_id,
            group.task_name == task.c.task_name,
            group.group_status.between(status.value, status.value),
        )
        .order_by(group.group_status, group.id)  # the order of the index
        .limit(1)
        .correlate(task)
        .scalar_subquery()
        for status in statuses
    )
    old = or_(*(first < cutoff for first in firsts))
    return select(task.c.id).where(task.c.buffer_id == buffer_id, old).exists()


@prepared
def select_tasks(buffer_id: Any) -> Select[Any]:
    """Select all tasks in the same order, without locks."""
    others = (column for column in task.c if column is not task.c.id)
    every = select(task.c.id.label("task_id"), *others)
    return every.where(task.c.buffer_id == buffer_id).order_by(task.c.id)


def select_available(buffer_id: int) -> Select[Any]:
    """Select how many groups of every task can be drawn, are leased, or are pending."""
    columns = (task.c.task_name, task.c.num_available, task.c.num_leased, task.c.num_pending)
    return select(*columns).where(task.c.buffer_id == buffer_id)


def select_total_weight(buffer_id: int, task_name: str) -> Select[float]:
    """Select the sum of the weights of the samplable groups of a task."""
    return select(func.sum(group.weight)).where(
        group.buffer_id == buffer_id,
        group.task_name == task_name,
        group.group_status == GroupStatus.COMPLETED.value,
    )


@cache
def update_tasks() -> Update:
    """Update tasks, given as dicts of `task_id` and the columns to change."""
    return update(task).where(task.c.id == bindparam("task_id"))
