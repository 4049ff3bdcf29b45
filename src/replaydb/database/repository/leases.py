"""Exclusive holds on groups: taken by a draw, ended by ack, nack or time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.repository import lineage, tasks, transitions
from replaydb.database.repository.capacity import Room
from replaydb.database.repository.rows import inserted_id
from replaydb.database.repository.transitions import Accounts, Change
from replaydb.database.statements import groups as group_statements
from replaydb.database.statements import leases as statements
from replaydb.database.statements.groups import TOO_STALE
from replaydb.episodes import GroupStatus
from replaydb.errors import LeaseExpiredError
from replaydb.results import DrawOutcome, LeaseInfo
from replaydb.settings import BufferSettings

LEASE_EXPIRED = "lease expired"


async def create(
    connection: AsyncConnection, buffer_id: int, owner: str, now: datetime, ttl: float
) -> int:
    """A lease that holds nothing yet. Returns its id."""
    values = {
        "buffer_id": buffer_id,
        "owner": owner,
        "acquired_at": now,
        "expires_at": now + timedelta(seconds=ttl),
    }
    return await inserted_id(connection, statements.insert_lease(), values)


async def live(connection: AsyncConnection, buffer_id: int, now: datetime) -> list[LeaseInfo]:
    """Leases that have not expired."""
    rows = await connection.execute(statements.live(buffer_id, now))
    return [LeaseInfo(row.id, row.owner, row.acquired_at, row.expires_at, row.held) for row in rows]


async def extend(connection: AsyncConnection, lease_id: int, now: datetime, ttl: float) -> None:
    """Let a lease last `ttl` seconds from now.

    Raises:
        LeaseExpiredError: It is over.
    """
    end = now + timedelta(seconds=ttl)
    if (await connection.execute(*statements.extend(lease_id, now, end))).rowcount == 0:
        raise LeaseExpiredError(lease_id)


async def ack(
    connection: AsyncConnection,
    buffer_id: int,
    settings: BufferSettings,
    lease_id: int,
    ids: Sequence[int] | None,
    now: datetime,
) -> None:
    """What was leased was used: archive it, or return it to be drawn again.

    Raises:
        LeaseExpiredError: The lease is over, or does not hold one of the ids.
    """
    accounts, rows = await _held(connection, buffer_id, lease_id, ids, now)
    limit = settings.draw_limit
    done, again = _split(
        rows,
        lambda row: (
            settings.on_ack == "archive" or (limit is not None and row.times_sampled >= limit)
        ),
    )
    keep = settings.archived_payload == "keep"
    await lineage.settle(connection, _ids(rows), DrawOutcome.ACKED, None, now)
    await transitions.retire(connection, accounts, settings, done, "acked", now, keep_payload=keep)
    await _give_back(connection, accounts, settings, [(row, {"attempts": 0}) for row in again])
    await _close(connection, lease_id, accounts)


async def nack(
    connection: AsyncConnection,
    buffer_id: int,
    settings: BufferSettings,
    lease_id: int,
    ids: Sequence[int] | None,
    reason: str | None,
    now: datetime,
    *,
    attempts: int = 1,
) -> list[int]:
    """What was leased was not used: give it back, one attempt older (or so many).

    Returns:
        Those that failed, since it was their last attempt.

    Raises:
        LeaseExpiredError: The lease is over, or does not hold one of the ids.
    """
    accounts, rows = await _held(connection, buffer_id, lease_id, ids, now)
    failed = await _undo(connection, accounts, settings, rows, reason or "nacked", attempts)
    await lineage.settle(connection, _ids(rows), DrawOutcome.NACKED, reason, now)
    await _close(connection, lease_id, accounts)
    return failed


async def reject(
    connection: AsyncConnection,
    buffer_id: int,
    lease_id: int,
    ids: Sequence[int] | None,
    reason: str,
    now: datetime,
) -> None:
    """What was leased is of no use, to anybody: it is not drawn again.

    Raises:
        LeaseExpiredError: The lease is over, or does not hold one of the ids.
    """
    accounts, rows = await _held(connection, buffer_id, lease_id, ids, now)
    changes = [(row, {"status_reason": reason}) for row in rows]
    await transitions.move(connection, accounts, changes, GroupStatus.FILTERED)
    await lineage.settle(connection, _ids(rows), DrawOutcome.REJECTED, reason, now)
    await _close(connection, lease_id, accounts)


async def reap(room: Room, accounts: Accounts) -> None:
    """Give back the groups, of locked tasks, whose lease has expired."""
    connection, now = room.connection, room.now
    if (await connection.execute(*statements.end_overdue(room.buffer_id, now))).rowcount == 0:
        return
    condition = statements.overdue(room.buffer_id, accounts, now)
    rows = (await connection.execute(group_statements.scalars(condition))).all()
    if rows:
        for one in await connection.execute(statements.holders(condition)):
            text = f"lease {one.id} of {one.owner!r} expired, {one.held} groups come back"
            room.news.append((logging.WARNING, text))
        failed = await _undo(connection, accounts, room.settings, rows, LEASE_EXPIRED)
        if failed:
            room.news.append((logging.WARNING, failure(failed, LEASE_EXPIRED)))
        await lineage.settle(connection, _ids(rows), DrawOutcome.EXPIRED, None, now)
    await connection.execute(statements.delete_overdue(room.buffer_id, now))


def failure(failed: Sequence[int], reason: str) -> str:
    """Groups that have no attempts left, for the log."""
    return f"groups {', '.join(map(str, failed))} failed at their last attempt: {reason}"


async def _held(
    connection: AsyncConnection,
    buffer_id: int,
    lease_id: int,
    ids: Sequence[int] | None,
    now: datetime,
) -> tuple[Accounts, Sequence[Any]]:
    """The groups that a lease holds, their tasks being locked."""
    accounts = await tasks.lock_leased(connection, buffer_id, lease_id)
    statement = statements.held(lease_id) if ids is None else statements.held_among(lease_id, ids)
    found = (await connection.execute(*statement)).all()
    if not found or found[0].expires_at <= now:
        raise LeaseExpiredError(lease_id)
    rows = [row for row in found if row.id is not None]
    if ids is not None and (lost := set(ids) - {row.id for row in rows}):
        raise LeaseExpiredError(lease_id, sorted(lost))
    return accounts, rows


async def _undo(
    connection: AsyncConnection,
    accounts: Accounts,
    settings: BufferSettings,
    rows: Sequence[Any],
    reason: str,
    attempts: int = 1,
) -> list[int]:
    """End leases without an ack: the draw does not count, the attempt does.

    Returns:
        Those that failed.
    """
    limit = settings.max_attempts

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

    failed, again = _split(rows, lambda row: limit is not None and row.attempts + attempts >= limit)
    last = undone(failed, f"{reason} (attempt {limit} of {limit})")
    await transitions.move(connection, accounts, last, GroupStatus.FAILED)
    await _give_back(connection, accounts, settings, undone(again, reason))
    return _ids(failed)


async def _give_back(
    connection: AsyncConnection,
    accounts: Accounts,
    settings: BufferSettings,
    changes: Sequence[Change],
) -> None:
    """Groups get the status they were leased from, unless they have become too stale for it."""
    by_status: dict[GroupStatus, list[Change]] = {}
    for row, values in changes:
        status = GroupStatus(row.leased_from)
        if status in group_statements.EXPIRING and accounts[row.task_name].is_too_stale(
            row.staleness
        ):
            status = GroupStatus.EXPIRED
        if status is GroupStatus.EXPIRED:
            values = {"status_reason": TOO_STALE, **values}
        by_status.setdefault(status, []).append((row, values))
    for status, members in by_status.items():
        if status is GroupStatus.COMPLETED:
            await transitions.reopen(connection, accounts, settings, members)
        else:
            await transitions.move(connection, accounts, members, status)


async def _close(connection: AsyncConnection, lease_id: int, accounts: Accounts) -> None:
    await connection.execute(*statements.delete_empty(lease_id))
    await tasks.save(connection, accounts.values())


def _ids(rows: Sequence[Any]) -> list[int]:
    return [row.id for row in rows]


def _split(rows: Sequence[Any], first: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """The rows that meet a condition, and the others."""
    return [row for row in rows if first(row)], [row for row in rows if not first(row)]
