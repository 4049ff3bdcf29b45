"""Context managers that lock a buffer or its tasks for changes.

Locks are always taken in the same order: the buffer, its tasks by id, then groups. Inside a block,
groups of the locked tasks and the counters of these tasks can be changed. When the block ends,
cursors are written, history is trimmed, and changed task counters are written back; the counters of
packs come last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Select,
    and_,
    bindparam,
    case,
    false,
    func,
    literal_column,
    null,
    or_,
    select,
    type_coerce,
)

from replaydb.database.repository import buffers, cursors, maintenance, packs, retention, tasks
from replaydb.database.repository.locked import Found, LockedBuffer, Scope
from replaydb.database.repository.maintenance import is_overdue
from replaydb.database.repository.tasks import select_tasks
from replaydb.database.runtime.prepared import Bound, prepared
from replaydb.database.runtime.protocol import LostRaceError
from replaydb.database.runtime.session import Session
from replaydb.database.statements.buffer import BUFFERS, OF_STORE, turn_of_buffer
from replaydb.database.statements.lease import select_leased
from replaydb.database.tables.expressions import (
    among,
    in_turn,
    joined,
    next_draw_id,
    next_lease_id,
    server_time,
)
from replaydb.database.tables.schema import buffer, group, task

#: Columns of a buffer whose values may be large.
_LARGE = {"settings", "pending_tags"}
_IS_LAST = bindparam("is_last", type_=Boolean())
#: Kind of the advisory locks of tasks.
_TASK: ColumnElement[int] = literal_column("1919250540")  # "repl"


def tasks_locked(
    session: Session,
    scope: Scope,
    names: Collection[str] | None,
    *,
    draws: bool = False,
    leases: bool = False,
    reads: Sequence[Bound[Any]] = (),
    sweeps: bool = True,
) -> AbstractContextManager[LockedBuffer]:
    """Lock some or all tasks, or the whole buffer if its settings require that.

    Maintenance of the tasks is done first: leases, deadlines, time to live. Tasks that do not
    exist are omitted.

    Args:
        session: The transaction.
        scope: Buffer and run of the call.
        names: Names of the tasks; None: all.
        draws: Whether a draw is made, which will be recorded.
        leases: Whether a lease is made.
        reads: Statements that the block runs first: see `Session.lock`.
        sweeps: Whether to do maintenance.

    Raises:
        LostRaceError: The settings were changed, and now require other locks than were taken.
        UnfinishedMaintenanceError: There is too much maintenance to do it first.
    """
    if scope.row.settings.is_exclusive:
        statement = lock_buffer_and_tasks(scope.buffer_id, draws, leases)
    elif names is None:
        statement = lock_all_tasks(scope.buffer_id, draws, leases)
    else:
        statement = lock_tasks(scope.buffer_id, sorted(names), draws, leases)
    return _locked(session, scope, statement, reads, by_settings=True, sweeps=sweeps)


def buffer_locked(
    session: Session, scope: Scope, *, reads: Sequence[Bound[Any]] = ()
) -> AbstractContextManager[LockedBuffer]:
    """Lock the buffer and all its tasks."""
    return _locked(session, scope, lock_buffer_and_tasks(scope.buffer_id, False, False), reads)


def lease_locked(
    session: Session, scope: Scope, lease_id: int, ids: Sequence[int] | None = None
) -> AbstractContextManager[LockedBuffer]:
    """Lock the tasks of the groups of a lease. `ids` are the groups that are used; None: all."""
    reads = [select_leased(scope.buffer_id, lease_id, ids)]
    return _locked(session, scope, lock_leased_tasks(scope.buffer_id, lease_id), reads)


def groups_locked(
    session: Session, scope: Scope, uids: Sequence[str], *, reads: Sequence[Bound[Any]]
) -> AbstractContextManager[LockedBuffer]:
    """Lock the tasks of groups, by uid. Groups that are renewed meanwhile can be of other tasks."""
    return _locked(session, scope, lock_tasks_of_groups(scope.buffer_id, uids), reads)


def behind_locked(
    session: Session, scope: Scope, most: int, *, expiring: bool
) -> AbstractContextManager[LockedBuffer]:
    """Lock up to `most` tasks that are behind the policy version: see `aging`."""
    lock = lock_expiring_tasks if expiring else lock_aging_tasks
    return _locked(session, scope, lock(scope.buffer_id, most))


@contextmanager
def _locked(
    session: Session,
    scope: Scope,
    statement: Bound[Any],
    reads: Sequence[Bound[Any]] = (),
    *,
    by_settings: bool = False,
    sweeps: bool = False,
) -> Iterator[LockedBuffer]:
    """Lock tasks, and perhaps the buffer, with a statement. Write changes back at the end.

    Args:
        session: The transaction.
        scope: Buffer and run of the call.
        statement: Locks the tasks.
        reads: Statements that the block runs first.
        by_settings: Whether the settings determine what is locked.
        sweeps: Whether to do maintenance first.
    """
    was_exclusive = scope.row.settings.is_exclusive
    rows = session.lock(statement, reads)
    # Read while the locks are held, so no other transaction can advance the policy.
    row = scope.row = buffers.checked(rows, scope.buffer_name)
    task_states = tasks.states_of(rows)
    scope.on_read(row)
    scope.messages.clear()  # a transaction that lost a race is run again
    before = {name: replace(task) for name, task in task_states.items()}
    counted = (row.limited_inserts, row.limited_samples)
    found = Found(rows[0].has_overdue, rows[0].draw_id, rows[0].lease_id)
    buffer = LockedBuffer(session, scope, row, found, task_states)
    if by_settings and buffer.settings.is_exclusive != was_exclusive:
        raise LostRaceError("another transaction changed settings that determine the locks")
    if sweeps:
        maintenance.sweep(buffer)
    yield buffer
    cursors.save(buffer, buffer.cursors)
    retention.trim(buffer, before)
    row = buffer.row  # another object after a savepoint that was rolled back
    if (row.limited_inserts, row.limited_samples) != counted:
        buffers.save_limits(session, row)
    changed = [task for name, task in buffer.task_states.items() if task != before[name]]
    tasks.save(session, changed)
    if buffer.shares:
        packs.save(session, buffer.shares, buffer.now)
    scope.messages.extend(buffer.messages)


@prepared
def lock_tasks(buffer_id: Any, names: Any, draws: Any, leases: Any) -> Select[Any]:
    """Lock some tasks, always in the same order, to avoid deadlocks. Select them and the buffer.

    Rows that refer to a locked row can still be inserted (`key_share`), as for buffers: a foreign
    key check must not wait for a lock that may itself wait for its transaction.

    Each row has a task and its buffer. If there are no such tasks, there is one row, with NULL in
    the columns of the task. Only the first row has the buffer's JSON values.
    """
    some = among(task.c.task_name, names)
    return _select_locked(_first_in_turn(buffer_id, some).where(some), buffer_id, draws, leases)


@prepared
def lock_all_tasks(buffer_id: Any, draws: Any, leases: Any) -> Select[Any]:
    """As `lock_tasks`, for all tasks."""
    return _select_locked(_first_in_turn(buffer_id), buffer_id, draws, leases)


@prepared
def lock_buffer_and_tasks(buffer_id: Any, draws: Any, leases: Any) -> Select[Any]:
    """As `lock_all_tasks`, with a lock of the buffer, which is taken first."""
    turn = or_(_IS_LAST, turn_of_buffer(buffer_id))
    mine = select(buffer.c.id).where(buffer.c.id == buffer_id, turn)
    held = mine.with_for_update(key_share=True).cte("held")
    every = select_tasks.build(buffer_id).where(task.c.buffer_id == held.c.id)
    return _select_locked(every, buffer_id, draws, leases).where(buffer.c.id == held.c.id)


@prepared
def lock_leased_tasks(buffer_id: Any, lease_id: Any) -> Select[Any]:
    """As `lock_tasks`, for the tasks of the groups of a lease."""
    some = task.c.task_name.in_(select(group.task_name).where(group.lease_id == lease_id))
    return _select_locked(_first_in_turn(buffer_id, some).where(some), buffer_id)


@prepared
def lock_tasks_of_groups(buffer_id: Any, uids: Any) -> Select[Any]:
    """As `lock_tasks`, for the tasks of groups."""
    names = select(group.task_name).where(
        group.buffer_id == buffer_id, among(group.group_uid, uids)
    )
    some = task.c.task_name.in_(names)
    return _select_locked(_first_in_turn(buffer_id, some).where(some), buffer_id)


@prepared
def lock_expiring_tasks(buffer_id: Any, most: Any) -> Select[Any]:
    """As `lock_tasks`, for up to `most` tasks that may have groups that are too stale."""
    some = select_tasks.build(buffer_id).where(task.c.is_expiring).limit(most)
    return _select_locked(some, buffer_id)


@prepared
def lock_aging_tasks(buffer_id: Any, most: Any) -> Select[Any]:
    """As `lock_tasks`, for up to `most` tasks whose column `staleness` is behind."""
    some = select_tasks.build(buffer_id).where(task.c.aged_to.is_not(None)).limit(most)
    return _select_locked(some, buffer_id)


def _first_in_turn(buffer_id: Any, *some: ColumnElement[bool]) -> Select[Any]:
    """Select tasks in the order of their locks, once the turn for the first of these has come.

    One turn is enough, since transactions that lock the same tasks first lock the same task. Locks
    of this kind for each task could exceed the memory that PostgreSQL has for them.
    """
    first = select(in_turn(_TASK, func.min(task.c.id))).where(task.c.buffer_id == buffer_id, *some)
    return select_tasks.build(buffer_id).where(or_(_IS_LAST, first.scalar_subquery()))


def _select_locked(
    tasks: Select[Any], buffer_id: Any, draws: Any = None, leases: Any = None
) -> Select[Any]:
    """Select tasks, locked, with their buffer; the first time only the first of them.

    See `Session.lock`. If `draws` or `leases` is true, a new id of that table is selected.
    """
    locked = tasks.with_for_update(key_share=True, of=task).cte("locked")
    first = select(func.min(locked.c.task_id)).scalar_subquery()
    is_first = or_(locked.c.task_id.is_(None), locked.c.task_id == first)
    ids = joined(locked.c.task_id)  # reads all, and so locks them
    of_buffer = (
        case((is_first, column)).label(column.name) if column.name in _LARGE else column
        for column in buffer.c
    )
    new_ids = (
        select(new)
        .where(and_(_IS_LAST, false() if wanted is None else type_coerce(wanted, Boolean())))
        .scalar_subquery()
        .label(name)
        for name, new, wanted in (
            ("draw_id", next_draw_id(), draws),
            ("lease_id", next_lease_id(), leases),
        )
    )
    return (
        select(
            *of_buffer,
            *OF_STORE,
            *locked.c,
            server_time().label("read_at"),
            case(
                (server_time().is_(None), null()),
                (and_(_IS_LAST, is_first), is_overdue(buffer_id)),
            ).label("has_overdue"),
            *new_ids,
            case((is_first, select(ids).scalar_subquery())).label("locked_ids"),
            _IS_LAST.label("is_last"),
            is_first.label("is_first"),
        )
        .select_from(BUFFERS.outerjoin(locked, or_(_IS_LAST, locked.c.task_id == first)))
        .where(buffer.c.id == buffer_id)
        .order_by(locked.c.task_id)
    )
