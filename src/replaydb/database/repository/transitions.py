"""Groups changing status, with the accounts of their tasks changing alike.

Every function takes the accounts of locked tasks, and groups of no others: their scalars, read
under those locks, or a condition that selects them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.prepared import execute_many
from replaydb.database.repository import tasks
from replaydb.database.repository.tasks import GroupSums, TaskAccount
from replaydb.database.statements import groups as statements
from replaydb.database.statements import lineage
from replaydb.episodes import GroupStatus
from replaydb.settings import BufferSettings

Accounts = Mapping[str, TaskAccount]

#: A group's scalars, and what else is to change with its status: the same columns for all.
Change = tuple[Any, Mapping[str, Any]]


async def move(
    connection: AsyncConnection,
    accounts: Accounts,
    changes: Sequence[Change],
    status: GroupStatus,
) -> None:
    """Give groups, which nobody holds any more, a status from which they are not drawn."""
    _recount(accounts, [row for row, _ in changes], status)
    new = [_changed(row, status, values) for row, values in changes]
    await execute_many(connection, statements.change(), new)


async def reopen(
    connection: AsyncConnection,
    accounts: Accounts,
    settings: BufferSettings,
    changes: Sequence[Change],
) -> None:
    """Make groups, which nobody holds any more, samplable, with arrivals from now on."""
    status = GroupStatus.COMPLETED
    _recount(accounts, [row for row, _ in changes], status)
    by_task: dict[str, list[Change]] = {}
    for change in changes:
        by_task.setdefault(change[0].task_name, []).append(change)
    new = []
    for task_name, mine in by_task.items():
        account = accounts[task_name]
        for clock in tasks.CLOCKS:
            await tasks.set_back_if_late(connection, account, clock)
        weights = np.array([row.weight for row, _ in mine], np.float64)
        waits = (wait.tolist() for wait in account.waits(settings, weights))
        for (row, values), uniform, prioritized in zip(mine, *waits, strict=True):
            arrivals = {
                "uniform_key": account.uniform_clock + uniform,
                "priority_key": account.priority_clock + prioritized,
            }
            new.append(_changed(row, status, values) | arrivals)
    await execute_many(connection, statements.change(), new)


async def archive(
    connection: AsyncConnection,
    accounts: Accounts,
    rows: Sequence[Any],
    reason: str,
    now: datetime,
    *,
    keep_payload: bool,
) -> None:
    """Take groups, given by their scalars, out of use but not out of the tables."""
    if not rows:
        return
    _recount(accounts, rows, GroupStatus.ARCHIVED)
    ids = [row.id for row in rows]
    if keep_payload:
        await connection.execute(*statements.archive(ids, reason, now))
        return
    await connection.execute(*statements.archive_scalars(ids, reason, now))
    await connection.execute(*statements.delete_payloads(ids))
    await connection.execute(*statements.delete_transcripts(ids))


async def retire(
    connection: AsyncConnection,
    accounts: Accounts,
    settings: BufferSettings,
    rows: Sequence[Any],
    reason: str,
    now: datetime,
    *,
    keep_payload: bool,
) -> None:
    """Take groups out for good: archived, or deleted where nothing is to be left of what goes."""
    if settings.on_evict == "archive":
        await archive(connection, accounts, rows, reason, now, keep_payload=keep_payload)
        return
    _recount(accounts, rows, GroupStatus.ARCHIVED)
    await erase(connection, [row.id for row in rows])


async def erase(connection: AsyncConnection, ids: Sequence[int]) -> None:
    """Delete groups that no account has any more."""
    if ids:
        await connection.execute(*statements.erase(ids))


async def expire(
    connection: AsyncConnection,
    accounts: Accounts,
    condition: ColumnElement[bool],
    values: Mapping[str, Any],
) -> int:
    """Expire any number of groups, and give them other values. Returns how many."""
    expired = 0
    for row in await connection.execute(statements.sums(condition)):
        accounts[row.task_name].move(row.group_status, GroupStatus.EXPIRED, _sums(row))
        expired += row.num_groups
    if expired:
        new = {"group_status": GroupStatus.EXPIRED.value, **values}
        await connection.execute(statements.set_values(condition, new))
    return expired


async def delete(
    connection: AsyncConnection,
    accounts: Accounts,
    condition: ColumnElement[bool],
    reason: str,
    now: datetime,
) -> int:
    """Delete groups with everything that hangs on them. Returns how many.

    The reason goes to those who hold some of them.
    """
    condition &= statements.of_tasks(accounts)  # a task made since is not locked
    sums = (await connection.execute(statements.sums(condition))).all()
    for row in sums:
        accounts[row.task_name].leave(row.group_status, _sums(row))
    if any(row.group_status == GroupStatus.LEASED for row in sums):
        await connection.execute(lineage.lose_leased(condition, reason, now))
    return (await connection.execute(statements.delete_groups(condition))).rowcount


def _recount(accounts: Accounts, rows: Sequence[Any], status: GroupStatus) -> None:
    alike: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        alike.setdefault((row.task_name, row.group_status), []).append(row)
    for (task_name, before), some in alike.items():
        accounts[task_name].move(before, status, GroupSums.of(some))


def _changed(row: Any, status: GroupStatus, values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "group_id": row.id,
        "group_status": status.value,
        "lease_id": None,
        "leased_from": None,
        **values,
    }


def _sums(row: Any) -> GroupSums:
    return GroupSums(row.num_groups, row.weight, row.num_tokens, row.num_bytes)
