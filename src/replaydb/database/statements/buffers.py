"""Runs, buffers and the accounts of their tasks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import Insert, Select, Update, bindparam, func, insert, select, update

from replaydb.database.expressions import among
from replaydb.database.prepared import prepared
from replaydb.database.schema import buffer, episode_group, group, run, task
from replaydb.episodes import GroupStatus


def find_run(name: str) -> Select[Any]:
    """Row of a run."""
    return select(run).where(run.c.name == name)


def all_runs() -> Select[Any]:
    """Runs, the oldest first."""
    return select(run).order_by(run.c.id)


@cache
def insert_run() -> Insert:
    """One run, as a dict of its columns."""
    return insert(run)


def find_buffer(name: str) -> Select[Any]:
    """Row of a buffer, by name."""
    return select(buffer).where(buffer.c.name == name)


@prepared
def buffer_state(buffer_id: Any) -> Select[Any]:
    """Row of a buffer, by id."""
    return select(buffer).where(buffer.c.id == buffer_id)


@prepared
def lock_buffer(buffer_id: Any) -> Select[Any]:
    """Row of a buffer, by id, locked against every change of it."""
    return select(buffer).where(buffer.c.id == buffer_id).with_for_update(key_share=True)


def all_buffers() -> Select[Any]:
    """Buffers by name, with the number of their groups of any status."""
    groups = (
        select(func.count())
        .select_from(episode_group)
        .where(episode_group.c.buffer_id == buffer.c.id)
        .scalar_subquery()
    )
    return select(buffer, groups.label("num_groups")).order_by(buffer.c.name)


@cache
def insert_buffer() -> Insert:
    """One buffer, as a dict of its columns."""
    return insert(buffer)


def save_buffer(buffer_id: int, values: Mapping[str, Any]) -> Update:
    """Change settings, policy version or counters of one buffer."""
    return update(buffer).where(buffer.c.id == buffer_id).values(dict(values))


def task_names(buffer_id: int) -> Select[str]:
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
    return all_tasks.build(buffer_id).with_for_update(key_share=True)


@prepared
def lock_leased_tasks(buffer_id: Any, lease_id: Any) -> Select[Any]:
    """Accounts of the tasks of which a lease holds groups, in the same way."""
    names = select(group.task_name).where(group.lease_id == lease_id)
    return lock_all_tasks.build(buffer_id).where(task.c.task_name.in_(names))


@prepared
def all_tasks(buffer_id: Any) -> Select[Any]:
    """Accounts of all tasks, in the same order, not locked."""
    return select(task).where(task.c.buffer_id == buffer_id).order_by(task.c.id)


def available(buffer_id: int) -> Select[Any]:
    """How many groups of every task can be drawn, are leased, or are still arriving."""
    columns = (task.c.task_name, task.c.num_available, task.c.num_leased, task.c.num_pending)
    return select(*columns).where(task.c.buffer_id == buffer_id)


def total_weight(buffer_id: int, task_name: str) -> Select[float]:
    """Sum of the weights of the groups of a task that can be drawn."""
    return select(func.sum(group.weight)).where(
        group.buffer_id == buffer_id,
        group.task_name == task_name,
        group.group_status == GroupStatus.COMPLETED.value,
    )


def task_counters(buffer_id: int) -> Select[Any]:
    """What happened to every task."""
    columns = (
        task.c.task_name,
        task.c.max_staleness,
        task.c.num_available,
        task.c.num_pending,
        task.c.num_leased,
        task.c.num_inserted,
        task.c.num_sampled,
    )
    return select(*columns).where(task.c.buffer_id == buffer_id).order_by(task.c.task_name)


@cache
def save_tasks() -> Update:
    """Accounts, each a dict of `task_id` and the columns that change."""
    return update(task).where(task.c.id == bindparam("task_id"))
