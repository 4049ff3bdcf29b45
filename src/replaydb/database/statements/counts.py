"""Counts of groups. A limit also bounds the number of rows that are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, func, literal, select

from replaydb.database.statements.selections import selection
from replaydb.database.tables.expressions import among, bytewise
from replaydb.database.tables.schema import episode_group, group, lease
from replaydb.database.tables.staleness import current_staleness
from replaydb.domain.episodes import GroupStatus


def count_groups(condition: ColumnElement[bool]) -> Select[int]:
    """Count the groups that meet a condition."""
    return select(func.count()).select_from(episode_group).where(condition)


def count_groups_up_to(condition: ColumnElement[bool], most: int) -> Select[int]:
    """Count up to `most` groups that meet a condition."""
    some = select(group.id).where(condition).limit(most).subquery()
    return select(func.count()).select_from(some)


def count_groups_in_flight(
    buffer_id: int,
    tasks: Collection[str] | None,
    putters: ColumnElement[bool],
    max_staleness: int,
) -> Select[int]:
    """Count the groups still to be trained: pending, leased, or never drawn."""
    unfinished = (GroupStatus.PENDING.value, GroupStatus.LEASED.value)
    undrawn = (group.group_status == GroupStatus.COMPLETED.value) & (group.times_sampled == 0)
    mine = selection(buffer_id, tasks=tasks)
    staleness = current_staleness(buffer_id)
    fresh = staleness.is_(None) | (staleness <= max_staleness)
    return count_groups(mine & (group.group_status.in_(unfinished) | undrawn) & fresh & putters)


def count_status(
    buffer_id: int, tasks: Collection[str] | None, status: GroupStatus, most: int
) -> Select[int]:
    """Count up to `most` groups of a status."""
    some = _some(buffer_id, tasks, [status], most).subquery()
    return select(func.count()).select_from(some)


def count_leased_by_owner(buffer_id: int, tasks: Collection[str] | None, most: int) -> Select[Any]:
    """Count leased groups, and claimed pending ones, by the owner of the lease."""
    some = _some(buffer_id, tasks, [GroupStatus.LEASED, GroupStatus.PENDING], most)
    return (
        select(lease.c.owner, func.count().label("num_groups"))
        .join_from(lease, episode_group, group.lease_id == lease.c.id)
        .where(group.id.in_(some))
        .group_by(lease.c.owner)
        .order_by(func.count().desc(), bytewise(lease.c.owner))
    )


def count_passed(
    buffer_id: int,
    tasks: Collection[str] | None,
    statuses: Sequence[GroupStatus],
    conditions: Mapping[str, ColumnElement[bool]],
    most: int,
) -> Select[Any]:
    """Count groups by the first condition that they do not meet."""
    some = _some(buffer_id, tasks, statuses, most)
    columns: list[Any] = []
    met: list[ColumnElement[bool]] = []
    for name, condition in conditions.items():
        meets = func.coalesce(condition, literal(False))
        counts = case((and_(*met, ~meets), 1), else_=0)
        columns.append(func.coalesce(func.sum(counts), 0).label(name))
        met.append(meets)
    statement = select(*columns)
    return statement.select_from(episode_group).where(group.id.in_(some))


def _some(
    buffer_id: int,
    tasks: Collection[str] | None,
    statuses: Sequence[GroupStatus],
    most: int,
) -> Select[int]:
    groups = episode_group.alias()
    values = [status.value for status in statuses]
    condition = (groups.c.buffer_id == buffer_id) & groups.c.group_status.in_(values)
    if tasks is not None:
        condition &= among(groups.c.task_name, sorted(tasks))
    return select(groups.c.id).where(condition).limit(most)
