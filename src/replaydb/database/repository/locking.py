"""Context managers that lock a buffer or its tasks for changes.

Locks are always taken in the same order: the buffer, its tasks by id, then groups. Inside a block,
groups of the locked tasks and the counters of these tasks can be changed. When the block ends,
cursors are written, history is trimmed, and changed task counters are written back; the counters of
packs come last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from replaydb.database.repository import buffers, lineage, maintenance, packs, retention, tasks
from replaydb.database.repository.locked import Found, LockedBuffer, Scope
from replaydb.database.runtime.prepared import Bound
from replaydb.database.runtime.protocol import LostRaceError
from replaydb.database.statements.lease import select_leased
from replaydb.database.statements.task import (
    lock_aging_tasks,
    lock_all_tasks,
    lock_buffer_and_tasks,
    lock_expiring_tasks,
    lock_leased_tasks,
    lock_tasks,
)


@contextmanager
def tasks_locked(
    connection: Connection,
    scope: Scope,
    names: Collection[str] | None,
    *,
    draws: bool = False,
    leases: bool = False,
    reads: Sequence[Bound[Any]] = (),
    sweeps: bool = True,
) -> Iterator[LockedBuffer]:
    """Lock some or all tasks, or the whole buffer if its settings require that.

    Maintenance of the tasks is done first: leases, deadlines, time to live. Tasks that do not
    exist are omitted.

    Args:
        connection: Connection of the transaction.
        scope: Buffer and run of the call.
        names: Names of the tasks; None: all.
        draws: Whether a draw is made, which will be recorded.
        leases: Whether a lease is made.
        reads: Statements that the block runs first: see `lock_and_read`.
        sweeps: Whether to do maintenance.

    Raises:
        LostRaceError: The settings were changed, and now require other locks than were taken.
        UnfinishedMaintenanceError: There is too much maintenance to do it first.
    """
    cached = scope.row.settings
    if cached.is_exclusive:
        statement = lock_buffer_and_tasks(scope.buffer_id, draws, leases)
    elif names is None:
        statement = lock_all_tasks(scope.buffer_id, draws, leases)
    else:
        statement = lock_tasks(scope.buffer_id, sorted(names), draws, leases)
    with _locked(connection, scope, statement, reads) as buffer:
        if buffer.settings.is_exclusive != cached.is_exclusive:
            raise LostRaceError("another transaction changed settings that determine the locks")
        if sweeps:
            maintenance.sweep(buffer)
        yield buffer


@contextmanager
def buffer_locked(
    connection: Connection, scope: Scope, *, reads: Sequence[Bound[Any]] = ()
) -> Iterator[LockedBuffer]:
    """Lock the buffer and all its tasks."""
    statement = lock_buffer_and_tasks(scope.buffer_id, False, False)
    with _locked(connection, scope, statement, reads) as buffer:
        yield buffer


@contextmanager
def lease_locked(
    connection: Connection, scope: Scope, lease_id: int, ids: Sequence[int] | None = None
) -> Iterator[LockedBuffer]:
    """Lock the tasks of the groups of a lease. `ids` are the groups that are used; None: all."""
    statement = lock_leased_tasks(scope.buffer_id, lease_id)
    reads = [select_leased(scope.buffer_id, lease_id, ids)]
    with _locked(connection, scope, statement, reads) as buffer:
        yield buffer


@contextmanager
def behind_locked(
    connection: Connection, scope: Scope, most: int, *, expiring: bool
) -> Iterator[LockedBuffer]:
    """Lock up to `most` tasks that are behind the policy version: see `aging`."""
    lock = lock_expiring_tasks if expiring else lock_aging_tasks
    with _locked(connection, scope, lock(scope.buffer_id, most)) as buffer:
        yield buffer


@contextmanager
def _locked(
    connection: Connection, scope: Scope, statement: Bound[Any], reads: Sequence[Bound[Any]] = ()
) -> Iterator[LockedBuffer]:
    """Lock tasks, and perhaps the buffer, with a statement. Write changes back at the end."""
    rows, task_states = tasks.lock(connection, statement, reads)
    # Read while the locks are held, so no other transaction can advance the policy.
    row = scope.row = buffers.checked(rows, scope.buffer_name)
    scope.on_read(row)
    scope.messages.clear()  # a transaction that lost a race is run again
    before = {name: replace(task) for name, task in task_states.items()}
    counted = (row.limited_inserts, row.limited_samples)
    found = Found(rows[0].has_overdue, rows[0].draw_id, rows[0].lease_id)
    buffer = LockedBuffer(connection, scope, row, found, task_states)
    yield buffer
    lineage.set_cursors(buffer, buffer.cursors)
    retention.trim(buffer, before)
    row = buffer.row  # another object after a savepoint that was rolled back
    if (row.limited_inserts, row.limited_samples) != counted:
        buffers.save_limits(connection, row)
    changed = [task for name, task in buffer.task_states.items() if task != before[name]]
    tasks.save(connection, changed)
    packs.save(connection, buffer.shares, lambda: buffer.now)
    scope.messages.extend(buffer.messages)
