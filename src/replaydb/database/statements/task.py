"""The accounts of tasks."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Insert, Select, Update, bindparam, func, insert, select, update

from replaydb.database.expressions import among
from replaydb.database.prepared import prepared
from replaydb.database.schema import group, task
from replaydb.episodes import GroupStatus


def select_task_names(buffer_id: int) -> Select[str]:
    """Tasks a buffer has seen."""
    return select(task.c.task_name).where(task.c.buffer_id == buffer_id)


@cache
def insert_tasks() -> Insert:
    """Tasks, as dicts of their columns."""
    return insert(task)


@prepared
def lock_tasks(buffer_id: Any, names: Any) -> Select[Any]:
    """Accounts of some tasks, locked; always in the same order, so nobody deadlocks.

    Rows that refer to a locked one may still be inserted (`key_share`), here as for buffers: a
    foreign key must not wait for what its own transaction may be holding up.
    """
    return lock_all_tasks.build(buffer_id).where(among(task.c.task_name, names))


@prepared
def lock_all_tasks(buffer_id: Any) -> Select[Any]:
    """Accounts of all tasks, in the same way."""
    return select_tasks.build(buffer_id).with_for_update(key_share=True)


@prepared
def lock_leased_tasks(buffer_id: Any, lease_id: Any) -> Select[Any]:
    """Accounts of the tasks of which a lease holds groups, in the same way."""
    names = select(group.task_name).where(group.lease_id == lease_id)
    return lock_all_tasks.build(buffer_id).where(task.c.task_name.in_(names))


@prepared
def lock_expiring_tasks(buffer_id: Any, most: Any) -> Select[Any]:
    """Accounts of some tasks that have groups left that are too stale, in the same way."""
    return lock_all_tasks.build(buffer_id).where(task.c.is_expiring).limit(most)


@prepared
def lock_aging_tasks(buffer_id: Any, most: Any) -> Select[Any]:
    """Accounts of some tasks of which a column is behind the policy, in the same way."""
    return lock_all_tasks.build(buffer_id).where(task.c.aged_to.is_not(None)).limit(most)


@prepared
def select_tasks(buffer_id: Any) -> Select[Any]:
    """Accounts of all tasks, in the same order, not locked."""
    return select(task).where(task.c.buffer_id == buffer_id).order_by(task.c.id)


def select_available(buffer_id: int) -> Select[Any]:
    """How many groups of every task can be drawn, are leased, or are still arriving."""
    columns = (task.c.task_name, task.c.num_available, task.c.num_leased, task.c.num_pending)
    return select(*columns).where(task.c.buffer_id == buffer_id)


def select_total_weight(buffer_id: int, task_name: str) -> Select[float]:
    """Sum of the weights of the groups of a task that can be drawn."""
    return select(func.sum(group.weight)).where(
        group.buffer_id == buffer_id,
        group.task_name == task_name,
        group.group_status == GroupStatus.COMPLETED.value,
    )


@cache
def update_tasks() -> Update:
    """Accounts, each a dict of `task_id` and the columns that change."""
    return update(task).where(task.c.id == bindparam("task_id"))
