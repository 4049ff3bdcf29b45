"""Time-based maintenance (lease expiry, deadlines, TTL), run at the start of write transactions."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection

from replaydb.database.prepared import execute
from replaydb.database.repository import aging, capacity, incremental_groups, leases
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.statements.lease import select_any_overdue


def sweep(buffer: LockedBuffer) -> None:
    """Apply lease expiry, deadlines, time to live and policy versions to the locked tasks."""
    if buffer.row.may_have_overdue:
        if any(task.num_leased or task.num_pending for task in buffer.task_states.values()):
            leases.reap(buffer)
        if any(task.num_pending for task in buffer.task_states.values()):
            incremental_groups.close_overdue(buffer)
    capacity.evict_old(buffer)
    if any(task.is_behind for task in buffer.task_states.values()):
        aging.step(buffer, aging.GROUPS_PER_CALL)


def is_due(connection: Connection, row: BufferRow, now: datetime) -> bool:
    """Return whether `sweep` would change leases, deadlines or old groups. Takes no locks."""
    [(is_overdue,)] = execute(connection, select_any_overdue(row.id, now))
    return is_overdue or capacity.has_old(connection, row.id, row.settings, now)
