"""Maintenance (lease expiry, deadlines, TTL), run at the start of write transactions."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, literal_column, or_, select

from replaydb.database.repository import (
    aging,
    capacity,
    claims,
    incremental_groups,
    leases,
    locked,
)
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer, UnfinishedMaintenanceError
from replaydb.database.runtime.prepared import prepared
from replaydb.database.statements.lease import select_expired
from replaydb.database.tables.expressions import server_time
from replaydb.database.tables.schema import group, task
from replaydb.domain.episodes import GroupStatus


def sweep(buffer: LockedBuffer) -> None:
    """Apply lease expiry, deadlines, time to live and policy versions to the locked tasks.

    Raises:
        UnfinishedMaintenanceError: There are too many groups for the transaction of a call.
    """
    if not _apply_times(buffer):
        raise UnfinishedMaintenanceError(buffer)
    if any(task.is_behind for task in buffer.task_states.values()):
        aging.step(buffer, aging.GROUPS_PER_CALL)


def step(buffer: LockedBuffer, *, evicts: bool) -> bool:
    """Do a part of what is left after `UnfinishedMaintenanceError`. Return whether it was all."""
    if not _apply_times(buffer):
        return False
    return not evicts or capacity.evict_some(buffer, locked.MAINTAINED_AT_ONCE)


def _apply_times(buffer: LockedBuffer) -> bool:
    """Apply lease expiry, deadlines and time to live. Return whether nothing is left."""
    most, done = locked.MAINTAINED_AT_ONCE, True
    if buffer.found.may_have_overdue:
        if any(task.num_leased or task.num_pending for task in buffer.task_states.values()):
            done = leases.reap(buffer, most)
        if any(task.num_pending for task in buffer.task_states.values()):
            done = claims.reap(buffer, most) and done
            done = incremental_groups.close_overdue(buffer, most) and done
    return capacity.evict_old(buffer, most) and done


def is_due(row: BufferRow, now: datetime) -> ColumnElement[bool]:
    """Return the expression for whether groups of a buffer have to be released or removed first.

    Leases have expired, deadlines have passed, or groups have outlived `time_to_live` or are too
    stale.
    """
    due = select_any_overdue.build(row.id, now).scalar_subquery() | any_expiring(row.id)
    if row.settings.time_to_live is not None:
        cutoff = now - timedelta(seconds=row.settings.time_to_live)
        due |= any_older(row.id, capacity.EVICTABLE, cutoff)
    return due


@prepared
def select_any_overdue(of_buffer: Any, now: Any) -> Select[bool]:
    """Select whether a lease with groups, a claim, or the deadline of a pending group is over."""
    expired = group.lease_id.in_(select_expired(of_buffer, now))
    leased = select(group.id).where(group.lease_id.is_not(None), expired)
    overdue = select(group.id).where(
        group.buffer_id == of_buffer,
        group.deadline <= now,
        group.group_status == GroupStatus.PENDING.value,
    )
    return select(
        leased.exists() | overdue.exists() | claims.overdue_claims(of_buffer, now).exists()
    )


def is_overdue(buffer_id: Any) -> ColumnElement[bool]:
    """Whether a lease or a claim has expired, or the deadline of a pending group has passed."""
    now = server_time()
    pending = group.group_status == literal_column(repr(GroupStatus.PENDING.value))
    late = select(group.id).where(
        group.buffer_id == buffer_id, pending, group.deadline <= now, group.deadline.is_not(None)
    )
    return (
        select_expired(buffer_id, now).exists()
        | late.exists()
        | claims.overdue_claims(buffer_id, now).exists()
    )


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
