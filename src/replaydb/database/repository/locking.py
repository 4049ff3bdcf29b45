"""The right to change groups: locks, in the one order that everybody takes them in.

The buffer comes first, then its tasks by id, then groups. Whoever is in one of these blocks may
change groups of the locked tasks and the accounts of those; when it ends, the accounts that have
changed are written back, and last of all those of packs. Before that, cursors are written and
history is trimmed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from sqlalchemy import Connection

from replaydb.database.engines.protocol import LostRaceError
from replaydb.database.repository import (
    buffers,
    history,
    lineage,
    packs,
    tasks,
    upkeep,
)
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer, Scope
from replaydb.database.repository.tasks import TaskAccount


@contextmanager
def tasks_locked(
    connection: Connection, scope: Scope, names: Collection[str] | None
) -> Iterator[LockedBuffer]:
    """Lock some or all tasks, or the whole buffer where its settings ask for that.

    What time has brought about in them is done first: leases, deadlines, time to live. Tasks
    that do not exist are left out.

    Raises:
        LostRaceError: The settings ask for other locks than were taken.
    """
    seen = scope.row.settings
    if seen.is_exclusive:
        # The buffer first: whoever makes a task locks it too, so there is none to miss.
        row = buffers.state(connection, scope.buffer_id, scope.buffer_name, lock=True)
        accounts = tasks.lock(connection, scope.buffer_id)
    else:
        accounts = tasks.lock(connection, scope.buffer_id, names)
        # Read after the locks are held: nobody can advance the policy now.
        row = buffers.state(connection, scope.buffer_id, scope.buffer_name)
    scope.row = row
    if row.settings.is_exclusive != seen.is_exclusive:
        raise LostRaceError("settings that decide what must be locked were changed")
    with _entered(connection, scope, row, accounts) as buffer:
        upkeep.sweep(buffer)
        yield buffer


@contextmanager
def buffer_locked(connection: Connection, scope: Scope) -> Iterator[LockedBuffer]:
    """Lock the buffer and all its tasks."""
    row = buffers.state(connection, scope.buffer_id, scope.buffer_name, lock=True)
    accounts = tasks.lock(connection, scope.buffer_id)
    with _entered(connection, scope, row, accounts) as buffer:
        yield buffer


@contextmanager
def lease_locked(connection: Connection, scope: Scope, lease_id: int) -> Iterator[LockedBuffer]:
    """Lock the tasks of which a lease holds groups."""
    accounts = tasks.lock_leased(connection, scope.buffer_id, lease_id)
    row = buffers.state(connection, scope.buffer_id, scope.buffer_name)
    with _entered(connection, scope, row, accounts) as buffer:
        yield buffer


@contextmanager
def behind_locked(
    connection: Connection, scope: Scope, most: int, *, expiring: bool
) -> Iterator[LockedBuffer]:
    """Lock some of the tasks that have not followed the policy: see `aging`."""
    accounts = tasks.lock_some_behind(connection, scope.buffer_id, most, expiring=expiring)
    row = buffers.state(connection, scope.buffer_id, scope.buffer_name)
    with _entered(connection, scope, row, accounts) as buffer:
        yield buffer


@contextmanager
def _entered(
    connection: Connection, scope: Scope, row: BufferRow, accounts: dict[str, TaskAccount]
) -> Iterator[LockedBuffer]:
    scope.saw(row)
    scope.news.clear()  # a transaction that lost a race is run again
    before = {name: replace(account) for name, account in accounts.items()}
    counted = (row.limited_inserts, row.limited_samples)
    buffer = LockedBuffer(connection, scope, row, accounts)
    yield buffer
    lineage.set_cursors(buffer, buffer.cursors)
    history.trim(buffer, before)
    row = buffer.row  # another object after a savepoint that was rolled back
    if (row.limited_inserts, row.limited_samples) != counted:
        buffers.save_limits(connection, row)
    changed = [account for name, account in buffer.accounts.items() if account != before[name]]
    tasks.save(connection, changed)
    packs.save(connection, buffer.shares, lambda: buffer.now)
    scope.news.extend(buffer.news)
