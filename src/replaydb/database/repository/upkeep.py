"""What time brings about: done by whoever comes by next, before anything else."""

from __future__ import annotations

from replaydb.database.repository import capacity, leases, pieces
from replaydb.database.repository.capacity import Room
from replaydb.database.repository.transitions import Accounts


async def sweep(room: Room, accounts: Accounts) -> None:
    """Bring groups of locked tasks up to date: leases, deadlines, time to live."""
    if any(account.num_leased for account in accounts.values()):
        await leases.reap(room, accounts)
    if any(account.num_pending for account in accounts.values()):
        await pieces.close_overdue(room, accounts)
    await capacity.evict_old(room, accounts)
