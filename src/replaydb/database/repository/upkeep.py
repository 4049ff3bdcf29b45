"""What time brings about: done by whoever comes by next, before anything else."""

from __future__ import annotations

from replaydb.database.backend import Backend
from replaydb.database.repository import capacity, leases, pieces
from replaydb.database.repository.capacity import Room
from replaydb.database.repository.transitions import Accounts


async def sweep(backend: Backend, room: Room, accounts: Accounts) -> None:
    """Bring groups of locked tasks up to date: leases, deadlines, time to live."""
    leased = any(account.num_leased for account in accounts.values())
    pending = any(account.num_pending for account in accounts.values())
    if leased or pending:
        now = await backend.now(room.connection)
        common = (room.connection, accounts, room.buffer_id, room.settings, now)
        if leased:
            await leases.reap(*common)
        if pending:
            await pieces.close_overdue(*common)
    await capacity.evict_old(room, accounts)
