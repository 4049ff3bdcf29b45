"""Leases: creation by a draw, extension, and their end by ack, nack, revocation or expiry."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Delete, Select, Update, delete, func, select, update
from sqlalchemy.sql.dml import ReturningUpdate

from replaydb.database.repository import groups, lineage, transitions
from replaydb.database.repository.draw_request import Contents, Drawn
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.transitions import Change
from replaydb.database.runtime import revisions
from replaydb.database.runtime.prepared import Write, prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.episode_group import SCALARS
from replaydb.database.statements.insertion import insert_into, insert_one_into
from replaydb.database.statements.lease import select_expired, select_leased
from replaydb.database.statements.selections import EXPIRING, TOO_STALE, of_tasks, selection
from replaydb.database.tables.records import STATUSES
from replaydb.database.tables.schema import (
    IS_LEASED,
    compatibility,
    draw,
    draw_group,
    episode_group,
    group,
    lease,
)
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import AckReport, DrawOutcome, LeaseInfo, has_expired
from replaydb.errors import LeaseExpiredError

LEASE_EXPIRED = "lease expired"
OTHERS_FAILED = "other groups of the batch could not be processed"
#: Failures after which a group is `failed` in a buffer that sets no `max_attempts`.
DEFAULT_FAILURES = 3

_HAS_GROUPS = select(group.id).where(group.lease_id == lease.c.id).exists()


def create(buffer: LockedBuffer, owner: str, ttl: float) -> int:
    """Insert a lease without groups. Return its id."""
    values = {
        "buffer_id": buffer.id,
        "owner": owner,
        "acquired_at": buffer.now,
        "expires_at": buffer.now + timedelta(seconds=ttl),
    }
    lease_id = buffer.found.lease_id
    if lease_id is None:
        return buffer.session.inserted_id(insert_one_into(lease), values)
    buffer.session.postpone(Write(insert_into(lease), [{"id": lease_id, **values}]))
    return lease_id


def list_leases(
    session: Session, buffer_id: int, now: datetime, *, expired: bool
) -> list[LeaseInfo]:
    """Return leases that have not expired; with `expired`, also expired ones that have groups."""
    by_lease: dict[int, list[Any]] = {}
    for row in session.run(select_leases(buffer_id, now, expired=expired)):
        by_lease.setdefault(row.id, []).append(row)
    return [
        LeaseInfo(
            first.id,
            first.owner,
            first.acquired_at,
            first.expires_at,
            tuple(row.group_id for row in rows if row.group_id is not None),
            first.draw_id,
            first.step,
        )
        for rows in by_lease.values()
        for first in rows[:1]
    ]


def members(session: Session, buffer_id: int, lease_id: int) -> Sequence[Any]:
    """Return a row for each group of a lease, in the order of their draw.

    Raises:
        LeaseExpiredError: It is over, or there is none of that id in the buffer.
    """
    found = session.run(select_leases(buffer_id, session.now(), lease_id))
    if not found:
        raise LeaseExpiredError(lease_id)
    return [row for row in found if row.group_id is not None]


def fetch_leased(
    session: Session,
    buffer_id: int,
    lease_id: int,
    ids: Sequence[int] | None = None,
    fields: frozenset[str] | None = None,
) -> Drawn:
    """Return groups of a lease (None: all) and everything stored of them, in their draw's order.

    Raises:
        LeaseExpiredError: It is over, does not hold one of the ids, or is not of the buffer.
    """
    found = members(session, buffer_id, lease_id)
    if ids is not None:
        wanted = set(ids)
        found = [row for row in found if row.group_id in wanted]
        if lost := wanted - {row.group_id for row in found}:
            raise LeaseExpiredError(lease_id, sorted(lost))
    stored = groups.fetch(session, buffer_id, [row.group_id for row in found], fields)
    rows = {row["id"]: row for row in stored.groups}
    mine = [rows[row.group_id] for row in found]
    return Drawn(
        [row["id"] for row in mine],
        [row["task_name"] for row in mine],
        [row["staleness"] for row in mine],
        [row["times_replaced"] for row in mine],
        np.array([row.probability for row in found], np.float64),  # None becomes NaN
        np.array([row.weight for row in found], np.float64),
        contents=Contents(lambda: stored),
        draw_id=found[0].draw_id if found else None,
        lease_id=lease_id,
    )


def extend(session: Session, buffer_id: int, lease_id: int, now: datetime, ttl: float) -> None:
    """Extend a lease to `ttl` seconds from now.

    Raises:
        LeaseExpiredError: It is over.
        ClientTooOldError: The store has come to need a newer replaydb.
    """
    end = now + timedelta(seconds=ttl)
    rows: Any = session.run(extend_lease(buffer_id, lease_id, now, end))
    if not rows:
        raise LeaseExpiredError(lease_id)
    revisions.check_usable(rows[0].min_client)


def ack(buffer: LockedBuffer, lease_id: int, ids: Sequence[int] | None) -> tuple[AckReport, bool]:
    """Acknowledge leased groups: archive them, or return them to be drawn again.

    Returns:
        The groups, and whether the lease has ended: it has no others.

    Raises:
        LeaseExpiredError: The lease is over, or does not hold one of the ids.
    """
    rows, lost = _leased(buffer, lease_id, ids)
    settings, limit = buffer.settings, buffer.settings.draw_limit
    done, again = _split(
        rows,
        lambda row: (
            settings.on_ack == "archive" or (limit is not None and row.times_sampled >= limit)
        ),
    )
    keep = settings.archived_payload == "keep"
    lineage.settle(buffer, _ids(rows), DrawOutcome.ACKED, None)
    transitions.retire(buffer, done, "acked", keep_payload=keep)
    _return(buffer, [(row, {"attempts": 0}) for row in again])
    has_ended = _delete_if_empty(buffer, lease_id, ids)
    return AckReport(tuple(_ids(rows)), tuple(sorted(lost))), has_ended


def nack(
    buffer: LockedBuffer,
    lease_id: int,
    ids: Sequence[int] | None,
    reason: str | None,
    *,
    attempts: int = 1,
) -> bool:
    """Return leased groups unused; their attempt count is incremented (by `attempts`).

    Returns:
        Whether the lease has ended: it has no other groups, and has lost none.

    Raises:
        LeaseExpiredError: The lease is over, or does not hold one of the ids.
    """
    rows, lost = _leased(buffer, lease_id, ids)
    _undo(buffer, rows, reason or "nacked", attempts)
    lineage.settle(buffer, _ids(rows), DrawOutcome.NACKED, reason)
    return _delete_if_empty(buffer, lease_id, ids, lost)


def fail(buffer: LockedBuffer, lease_id: int, ids: Sequence[int], reason: str) -> None:
    """End a lease because some of its groups failed: only their attempt counts are incremented.

    Raises:
        LeaseExpiredError: The lease is over, or does not hold one of the ids.
    """
    (rows, _), wanted = _leased(buffer, lease_id, None), set(ids)
    if lost := wanted - set(_ids(rows)):
        raise LeaseExpiredError(lease_id, sorted(lost))
    failed, others = _split(rows, lambda row: row.id in wanted)
    limit = buffer.settings.max_attempts or DEFAULT_FAILURES
    _undo(buffer, failed, reason, limit=limit)
    lineage.settle(buffer, _ids(failed), DrawOutcome.NACKED, reason)
    _undo(buffer, others, OTHERS_FAILED, attempts=0)
    lineage.settle(buffer, _ids(others), DrawOutcome.NACKED, OTHERS_FAILED)
    _delete_if_empty(buffer, lease_id, None)


def reject(buffer: LockedBuffer, lease_id: int, ids: Sequence[int] | None, reason: str) -> bool:
    """Filter leased groups out: they are not drawn again.

    Returns:
        Whether the lease has ended: it has no other groups, and has lost none.

    Raises:
        LeaseExpiredError: The lease is over, or does not hold one of the ids.
    """
    rows, lost = _leased(buffer, lease_id, ids)
    changes = [(row, {"status_reason": reason}) for row in rows]
    transitions.move(buffer, changes, GroupStatus.FILTERED)
    lineage.settle(buffer, _ids(rows), DrawOutcome.REJECTED, reason)
    return _delete_if_empty(buffer, lease_id, ids, lost)


def revoke(buffer: LockedBuffer, lease_id: int, reason: str) -> list[int]:
    """End a lease, expired or not, and increment the attempt counts of its groups. Return ids."""
    found = buffer.session.run(select_leased(buffer.id, lease_id))
    if not found:
        return []
    rows = [row for row in found if row.id is not None]
    _undo(buffer, rows, reason)
    lineage.settle(buffer, _ids(rows), DrawOutcome.NACKED, reason)
    _delete_if_empty(buffer, lease_id, None)
    return _ids(rows)


def reap(buffer: LockedBuffer, most: int) -> bool:
    """Release up to `most` groups of locked tasks whose lease has expired.

    Returns:
        Whether there are no others.
    """
    session, now = buffer.session, buffer.now
    if session.run(end_overdue_leases(buffer.id, now)) == 0:
        return True
    rows = session.run(select_overdue(buffer.id, buffer.task_states, now, most))
    if rows:
        released = selection(buffer.id, ids=_ids(rows))
        for one in session.run(select_lease_owners(released)):
            text = f"lease {one.id} of {one.owner!r} expired, {one.num_groups} groups released"
            buffer.report(logging.WARNING, text)
        _undo(buffer, rows, LEASE_EXPIRED)
        lineage.settle(buffer, _ids(rows), DrawOutcome.EXPIRED, None)
    mine = delete(lease).where(lease.c.buffer_id == buffer.id)
    session.run(mine.where(has_expired(lease.c, now), ~_HAS_GROUPS))
    return len(rows) < most


def _leased(
    buffer: LockedBuffer, lease_id: int, ids: Sequence[int] | None
) -> tuple[Sequence[Any], Sequence[int]]:
    """Return the scalars of all or some groups of a lease that has not expired, and its losses."""
    found = buffer.session.run(select_leased(buffer.id, lease_id, ids))
    if not found or has_expired(found[0], buffer.now):
        raise LeaseExpiredError(lease_id)
    rows = [row for row in found if row.id is not None]
    if ids is not None and (lost := set(ids) - {row.id for row in rows}):
        raise LeaseExpiredError(lease_id, sorted(lost))
    return rows, found[0].lost_ids or ()


def _undo(
    buffer: LockedBuffer,
    rows: Sequence[Any],
    reason: str,
    attempts: int = 1,
    limit: int | None = None,
) -> None:
    """Release groups without an ack: their draw is uncounted, their attempts are incremented."""
    limit = buffer.settings.max_attempts if limit is None else limit

    def undone(rows: Sequence[Any], why: str) -> list[Change]:
        return [
            (
                row,
                {
                    "attempts": row.attempts + attempts,
                    "times_sampled": row.times_sampled - 1,
                    "status_reason": why,
                },
            )
            for row in rows
        ]

    # Without a new attempt none was the last, even if `max_attempts` was lowered meanwhile.
    failed, again = _split(
        rows,
        lambda row: attempts > 0 and limit is not None and row.attempts + attempts >= limit,
    )
    last = undone(failed, f"{reason} (attempt {limit} of {limit})")
    transitions.move(buffer, last, GroupStatus.FAILED)
    _return(buffer, undone(again, reason))
    if failed:
        ids = ", ".join(map(str, _ids(failed)))
        buffer.report(logging.WARNING, f"groups {ids} failed at their last attempt: {reason}")


def _return(buffer: LockedBuffer, changes: Sequence[Change]) -> None:
    """Return groups to the status they were leased from, or expire those that are too stale."""
    by_status: dict[GroupStatus, list[Change]] = {}
    for row, values in changes:
        before = row.leased_from
        status = GroupStatus(before) if before in STATUSES else GroupStatus.FAILED  # damaged
        if status in EXPIRING and buffer.is_too_stale(
            row.task_name, row.staleness, row.version_span
        ):
            status = GroupStatus.EXPIRED
        if status is GroupStatus.EXPIRED:
            values = {"status_reason": TOO_STALE, **values}
        by_status.setdefault(status, []).append((row, values))
    for status, members in by_status.items():
        if status is GroupStatus.COMPLETED:
            transitions.reopen(buffer, members)
        else:
            transitions.move(buffer, members, status)


def _delete_if_empty(
    buffer: LockedBuffer, lease_id: int, ids: Sequence[int] | None, lost: Sequence[int] = ()
) -> bool:
    """Delete a lease whose groups, or some of them, were settled, if no other is left.

    Args:
        buffer: The buffer.
        lease_id: Id of the lease.
        ids: The groups that were settled; None: all.
        lost: The groups that it has lost, unless the caller reports them. The lease is then kept,
            so that an ack can.

    Returns:
        Whether it was deleted.
    """
    if ids is None:
        buffer.session.postpone(delete_lease(lease_id))
        return True
    if lost:
        return False
    return bool(buffer.session.run(delete_lease_if_empty(lease_id)))


def _ids(rows: Sequence[Any]) -> list[int]:
    return [row.id for row in rows]


def _split(rows: Sequence[Any], first: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """Return the rows that meet a condition, and the others."""
    return [row for row in rows if first(row)], [row for row in rows if not first(row)]


def select_leases(
    buffer_id: int, now: datetime, lease_id: int | None = None, *, expired: bool = False
) -> Select[Any]:
    """Select leases that have not expired, or one of them: a row per group, in order of the draw.

    A lease without groups is one row without a group. With `expired`, expired leases that still
    have groups are included.
    """
    live = ~has_expired(lease.c, now)
    drawn = draw_group.c
    statement = (
        select(
            lease,
            group.id.label("group_id"),
            group.num_tokens,
            drawn.draw_id,
            drawn.probability,
            drawn.weight,
            draw.c.step,
        )
        .outerjoin_from(lease, episode_group, group.lease_id == lease.c.id)
        .outerjoin(draw_group, (drawn.group_id == group.id) & IS_LEASED)
        .outerjoin(draw, draw.c.id == drawn.draw_id)
        .where(lease.c.buffer_id == buffer_id, live | group.id.is_not(None) if expired else live)
        .order_by(lease.c.id, drawn.position, group.id)
    )
    return statement if lease_id is None else statement.where(lease.c.id == lease_id)


@prepared
def extend_lease(
    of_buffer: Any, lease_id: Any, now: Any, end: Any
) -> ReturningUpdate[*tuple[Any, ...]]:
    """Extend a lease that has not expired. Return what the store requires of clients."""
    mine = (lease.c.id == lease_id, lease.c.buffer_id == of_buffer)
    needed = select(compatibility.c.min_client).scalar_subquery().label("min_client")
    extended = update(lease).where(*mine, ~has_expired(lease.c, now)).values(expires_at=end)
    return extended.returning(needed)


@prepared
def end_overdue_leases(of_buffer: Any, now: Any) -> Update:
    """End expired leases, so that a concurrent heartbeat cannot extend them."""
    return (
        update(lease)
        .where(lease.c.buffer_id == of_buffer, has_expired(lease.c, now))
        .values(expires_at=lease.c.acquired_at)
    )


def select_overdue(buffer_id: int, tasks: Collection[str], now: datetime, most: int) -> Select[Any]:
    """Select the scalars of up to `most` groups of tasks whose lease has expired."""
    overdue = group.lease_id.in_(select_expired(buffer_id, now)) & of_tasks(tasks)
    # Not in order of ids alone, for which a planner may read the groups in that order.
    return select(*SCALARS).where(overdue).order_by(group.lease_id, group.id).limit(most)


def select_lease_owners(condition: ColumnElement[bool]) -> Select[Any]:
    """Select the leases of groups that meet a condition, with owner and number of groups."""
    return (
        select(lease.c.id, lease.c.owner, func.count().label("num_groups"))
        .join_from(lease, episode_group, group.lease_id == lease.c.id)
        .where(condition)
        .group_by(lease.c.id, lease.c.owner)
        .order_by(lease.c.id)
    )


@prepared
def delete_lease(lease_id: Any) -> Delete:
    """Delete a lease that has no groups."""
    return delete(lease).where(lease.c.id == lease_id)


@prepared
def delete_lease_if_empty(lease_id: Any) -> Delete:
    """Delete a lease if it has no groups."""
    return delete(lease).where(lease.c.id == lease_id, ~_HAS_GROUPS)
