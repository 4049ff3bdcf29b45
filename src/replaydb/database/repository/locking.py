"""Context managers that lock a buffer or its tasks for changes.

Locks are always taken in the same order: the buffer, its tasks by id, then groups. Inside a block,
groups of the locked tasks and the counters of these tasks can be changed. When the block ends,
cursors are written, history is trimmed, and changed task counters are written back; the counters of
packs come last.
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
    maintenance,
    packs,
    tasks,
)
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer, Scope
from replaydb.database.repository.tasks import TaskState


@contextmanager
def tasks_locked(
    connection: Connection,
    scope: Scope,
    names: Collection[str] | None,
    *,
    draws: bool = False,
) -> Iterator[LockedBuffer]:
    """Lock some or all tasks, or the whole buffer if its settings require that.

    Maintenance of the tasks is done first: leases, deadlines, time to live. Tasks that do not
    exist are omitted.

    Args:
        connection: Connection of the transaction.
        scope: Buffer and run of the call.
        names: Names of the tasks; None: all.
        draws: Whether a draw is made, which will be recorded.

    Raises:
        LostRaceError: The settings were changed, and now require other locks than were taken.
    """
    cached = scope.row.settings
    if cached.is_exclusive:
        # The buffer first. A transaction that inserts a task locks it too, so no task is missed.
        row = buffers.state(connection, scope.buffer_id, scope.buffer_name, lock=True)
        task_states = tasks.lock(connection, scope.buffer_id)
    else:
        task_states = tasks.lock(connection, scope.buffer_id, names)
        # Read while the locks are held, so no other transaction can advance the policy.
        row = buffers.state(connection, scope.buffer_id, scope.buffer_name, draws=draws)
    scope.row = row
    if row.settings.is_exclusive != cached.is_exclusive:
        raise LostRaceError("another transaction changed settings that determine the locks")
    with _writing_back(connection, scope, row, task_states) as buffer:
        maintenance.sweep(buffer)
        yield buffer


@contextmanager
def buffer_locked(connection: Connection, scope: Scope) -> Iterator[LockedBuffer]:
    """Lock the buffer and all its tasks."""
    row = buffers.state(connection, scope.buffer_id, scope.buffer_name, lock=True)
    task_states = tasks.lock(connection, scope.buffer_id)
    with _writing_back(connection, scope, row, task_states) as buffer:
        yield buffer


@contextmanager
def lease_locked(connection: Connection, scope: Scope, lease_id: int) -> Iterator[LockedBuffer]:
    """Lock the tasks of the groups of a lease."""
    task_states = tasks.lock_leased(connection, scope.buffer_id, lease_id)
    row = buffers.state(connection, scope.buffer_id, scope.buffer_name)
    with _writing_back(connection, scope, row, task_states) as buffer:
        yield buffer


@contextmanager
def behind_locked(
    connection: Connection, scope: Scope, most: int, *, expiring: bool
) -> Iterator[LockedBuffer]:
    """Lock up to `most` tasks that are behind the policy version: see `aging`."""
    task_states = tasks.lock_some_behind(connection, scope.buffer_id, most, expiring=expiring)
    row = buffers.state(connection, scope.buffer_id, scope.buffer_name)
    with _writing_back(connection, scope, row, task_states) as buffer:
        yield buffer


@contextmanager
def _writing_back(
    connection: Connection, scope: Scope, row: BufferRow, task_states: dict[str, TaskState]
) -> Iterator[LockedBuffer]:
    scope.on_read(row)
    scope.messages.clear()  # a transaction that lost a race is run again
    before = {name: replace(task) for name, task in task_states.items()}
    counted = (row.limited_inserts, row.limited_samples)
    buffer = LockedBuffer(connection, scope, row, task_states)
    yield buffer
    lineage.set_cursors(buffer, buffer.cursors)
    history.trim(buffer, before)
    row = buffer.row  # another object after a savepoint that was rolled back
    if (row.limited_inserts, row.limited_samples) != counted:
        buffers.save_limits(connection, row)
    changed = [task for name, task in buffer.task_states.items() if task != before[name]]
    tasks.save(connection, changed, buffer.last_writes)
    packs.save(connection, buffer.shares, lambda: buffer.now)
    scope.messages.extend(buffer.messages)
