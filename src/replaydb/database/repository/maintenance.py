"""Maintenance (lease expiry, deadlines, TTL), run at the start of write transactions."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement

from replaydb.database.repository import aging, capacity, incremental_groups, leases, locked
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer, UnfinishedMaintenanceError
from replaydb.database.statements.lease import select_any_overdue
from replaydb.database.statements.task import any_expiring, any_older


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
