"""Statements on tasks: locks, clocks and counters."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Insert, Select, Update, bindparam, func, insert, select, update

from replaydb.database.expressions import among
from replaydb.database.prepared import prepared
from replaydb.database.schema import group, task
from replaydb.episodes import GroupStatus


def select_task_names(buffer_id: int) -> Select[str]:
    """Select the names of the tasks of a buffer."""
    return select(task.c.task_name).where(task.c.buffer_id == buffer_id)


@cache
def insert_tasks() -> Insert:
    """Insert tasks, given as dicts of their columns."""
    return insert(task)


@prepared
def lock_tasks(buffer_id: Any, names: Any) -> Select[Any]:
    """Select and lock some tasks, always in the same order, to avoid deadlocks.

    Rows that refer to a locked row can still be inserted (`key_share`), as for buffers: a foreign
    key check must not wait for a lock that may itself wait for its transaction.
    """
    return lock_all_tasks.build(buffer_id).where(among(task.c.task_name, names))


@prepared
def lock_all_tasks(buffer_id: Any) -> Select[Any]:
    """As `lock_tasks`, for all tasks."""
    return select_tasks.build(buffer_id).with_for_update(key_share=True)


@prepared
def lock_leased_tasks(buffer_id: Any, lease_id: Any) -> Select[Any]:
    """As `lock_tasks`, for the tasks of the groups of a lease."""
    names = select(group.task_name).where(group.lease_id == lease_id)
    return lock_all_tasks.build(buffer_id).where(task.c.task_name.in_(names))


@prepared
def lock_expiring_tasks(buffer_id: Any, most: Any) -> Select[Any]:
    """As `lock_tasks`, for up to `most` tasks that may have groups that are too stale."""
    return lock_all_tasks.build(buffer_id).where(task.c.is_expiring).limit(most)


@prepared
def lock_aging_tasks(buffer_id: Any, most: Any) -> Select[Any]:
    """As `lock_tasks`, for up to `most` tasks whose column `staleness` is behind."""
    return lock_all_tasks.build(buffer_id).where(task.c.aged_to.is_not(None)).limit(most)


@prepared
def select_tasks(buffer_id: Any) -> Select[Any]:
    """Select all tasks in the same order, without locks."""
    return select(task).where(task.c.buffer_id == buffer_id).order_by(task.c.id)


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
