"""What time brings about: done by whoever comes by next, before anything else."""

from __future__ import annotations

from replaydb.database.repository import capacity, leases, pieces
from replaydb.database.repository.locked import LockedBuffer


def sweep(buffer: LockedBuffer) -> None:
    """Bring groups of locked tasks up to date: leases, deadlines, time to live."""
    if any(account.num_leased or account.num_pending for account in buffer.accounts.values()):
        leases.reap(buffer)
    if any(account.num_pending for account in buffer.accounts.values()):
        pieces.close_overdue(buffer)
    capacity.evict_old(buffer)
