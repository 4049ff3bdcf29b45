"""Exclusive holds on groups: taken by a draw, ended by ack, nack or time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.repository import tasks, transitions
from replaydb.database.repository.rows import inserted_id
from replaydb.database.repository.transitions import RELEASED, Accounts
from replaydb.database.schema import group
from replaydb.database.statements import groups as group_statements
from replaydb.database.statements import leases as statements
from replaydb.database.statements.groups import TOO_STALE, selection
from replaydb.episodes import GroupStatus
from replaydb.errors import LeaseExpiredError
from replaydb.settings import BufferSettings


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease that has not expired.

    Attributes:
        id: Which.
        owner: Who holds it.
        acquired_at: Since when.
        expires_at: Until when, unless it is extended.
        num_groups: How many groups it still holds.
    """

    id: int
    owner: str
    acquired_at: datetime
    expires_at: datetime
    num_groups: int


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
    if (await connection.execute(statements.extend(lease_id, now, end))).rowcount == 0:
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
    if done:
        await transitions.archive(
            connection,
            accounts,
            selection(buffer_id, ids=done),
            done,
            "acked",
            now,
            keep_payload=settings.archived_payload == "keep",
        )
    if again:
        values = {**RELEASED, "attempts": 0}
        await _give_back(connection, accounts, buffer_id, settings, rows, again, values)
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
) -> None:
    """What was leased was not used: give it back, one attempt older (or so many).

    Raises:
        LeaseExpiredError: The lease is over, or does not hold one of the ids.
    """
    accounts, rows = await _held(connection, buffer_id, lease_id, ids, now)
    await _undo(connection, accounts, buffer_id, settings, rows, reason or "nacked", attempts)
    await _close(connection, lease_id, accounts)


async def reap(
    connection: AsyncConnection,
    accounts: Accounts,
    buffer_id: int,
    settings: BufferSettings,
    now: datetime,
) -> None:
    """Give back the groups, of locked tasks, whose lease has expired."""
    if (await connection.execute(statements.end_overdue(buffer_id, now))).rowcount == 0:
        return
    condition = statements.overdue(buffer_id, accounts, now)
    rows = (await connection.execute(group_statements.scalars(condition))).all()
    if rows:
        await _undo(connection, accounts, buffer_id, settings, rows, "lease expired")
    await connection.execute(statements.delete_overdue(buffer_id, now))


async def _held(
    connection: AsyncConnection,
    buffer_id: int,
    lease_id: int,
    ids: Sequence[int] | None,
    now: datetime,
) -> tuple[Accounts, Sequence[Any]]:
    """The groups that a lease holds, their tasks being locked."""
    names = (await connection.scalars(statements.tasks_of(lease_id))).all()
    accounts = await tasks.lock(connection, buffer_id, names)
    row = (await connection.execute(statements.find(lease_id))).one_or_none()
    if row is None or row.expires_at <= now:
        raise LeaseExpiredError(lease_id)
    condition = statements.held_by(lease_id, ids)
    rows = (await connection.execute(group_statements.scalars(condition))).all()
    if ids is not None and (lost := set(ids) - {row.id for row in rows}):
        raise LeaseExpiredError(lease_id, sorted(lost))
    return accounts, rows


async def _undo(
    connection: AsyncConnection,
    accounts: Accounts,
    buffer_id: int,
    settings: BufferSettings,
    rows: Sequence[Any],
    reason: str,
    attempts: int = 1,
) -> None:
    """End leases without an ack: the draw does not count, the attempt does."""
    values = {
        **RELEASED,
        "attempts": group.attempts + attempts,
        "times_sampled": group.times_sampled - 1,
        "status_reason": reason,
    }
    limit = settings.max_attempts
    failed, again = _split(rows, lambda row: limit is not None and row.attempts + attempts >= limit)
    if failed:
        why = {**values, "status_reason": f"{reason} (attempt {limit} of {limit})"}
        condition = selection(buffer_id, ids=failed)
        await transitions.move(connection, accounts, condition, GroupStatus.FAILED, why)
    if again:
        await _give_back(connection, accounts, buffer_id, settings, rows, again, values)


async def _give_back(
    connection: AsyncConnection,
    accounts: Accounts,
    buffer_id: int,
    settings: BufferSettings,
    rows: Sequence[Any],
    ids: Sequence[int],
    values: Mapping[str, Any],
) -> None:
    """Groups get the status they were leased from, unless they have become too stale for it."""
    wanted = set(ids)
    by_status: dict[GroupStatus, list[int]] = {}
    for row in rows:
        if row.id in wanted:
            status = GroupStatus(row.leased_from)
            if status in group_statements.EXPIRING and accounts[row.task_name].is_too_stale(
                row.staleness
            ):
                status = GroupStatus.EXPIRED
            by_status.setdefault(status, []).append(row.id)
    for status, members in by_status.items():
        condition = selection(buffer_id, ids=members)
        if status is GroupStatus.COMPLETED:
            await transitions.reopen(connection, accounts, settings, condition, values)
            continue
        new = dict(values)
        if status is GroupStatus.EXPIRED:
            new.setdefault("status_reason", TOO_STALE)
        await transitions.move(connection, accounts, condition, status, new)


async def _close(connection: AsyncConnection, lease_id: int, accounts: Accounts) -> None:
    await connection.execute(statements.delete_empty(lease_id))
    await tasks.save(connection, accounts.values())


def _split(rows: Sequence[Any], first: Callable[[Any], bool]) -> tuple[list[int], list[int]]:
    """Ids of the rows that meet a condition, and of the others."""
    return [row.id for row in rows if first(row)], [row.id for row in rows if not first(row)]
