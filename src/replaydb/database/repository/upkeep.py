"""What time brings about: done by whoever comes by next, before anything else."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection

from replaydb.database.prepared import execute
from replaydb.database.repository import aging, capacity, leases, pieces
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.statements.lease import select_any_overdue


def sweep(buffer: LockedBuffer) -> None:
    """Bring groups of locked tasks up to date: leases, deadlines, time to live, the policy."""
    if any(account.num_leased or account.num_pending for account in buffer.accounts.values()):
        leases.reap(buffer)
    if any(account.num_pending for account in buffer.accounts.values()):
        pieces.close_overdue(buffer)
    capacity.evict_old(buffer)
    if any(account.is_behind for account in buffer.accounts.values()):
        aging.step(buffer, aging.IN_PASSING)


def is_due(connection: Connection, row: BufferRow, now: datetime) -> bool:
    """Whether `sweep` would find something to do; a look that locks nothing."""
    [(is_overdue,)] = execute(connection, select_any_overdue(row.id, now))
    return is_overdue or capacity.has_old(connection, row.id, row.settings, now)
