"""Groups changing status, with the accounts of their tasks changing alike.

Every function takes the accounts of locked tasks, and a condition that selects groups of no
others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.repository.tasks import GroupSums, TaskAccount
from replaydb.database.statements import groups as statements
from replaydb.episodes import GroupStatus
from replaydb.settings import BufferSettings

Accounts = Mapping[str, TaskAccount]

#: Columns of a group that is in nobody's hands.
RELEASED: Mapping[str, Any] = {"lease_id": None, "leased_from": None}


async def move(
    connection: AsyncConnection,
    accounts: Accounts,
    condition: ColumnElement[bool],
    status: GroupStatus,
    values: Mapping[str, Any],
) -> int:
    """Give groups a status from which they are not drawn, and other values. Returns how many."""
    moved = 0
    for row in await connection.execute(statements.sums(condition)):
        sums = _sums(row)
        accounts[row.task_name].leave(row.group_status, sums)
        accounts[row.task_name].enter(status, sums)
        moved += sums.num_groups
    if moved:
        new = {"group_status": status.value, **values}
        await connection.execute(statements.set_values(condition, new))
    return moved


async def reopen(
    connection: AsyncConnection,
    accounts: Accounts,
    settings: BufferSettings,
    condition: ColumnElement[bool],
    values: Mapping[str, Any],
) -> None:
    """Make groups samplable, with arrivals from now on, and give them other values."""
    found = (await connection.execute(statements.scalars(condition))).all()
    changes: list[dict[str, Any]] = []
    for task_name, account in accounts.items():
        rows = [row for row in found if row.task_name == task_name]
        weights = np.array([row.weight for row in rows], np.float64)
        uniform, prioritized = account.arrival_keys(settings, weights)
        for row, *arrivals in zip(rows, uniform.tolist(), prioritized.tolist(), strict=True):
            sums = GroupSums.of(row)
            account.leave(row.group_status, sums)
            account.enter(GroupStatus.COMPLETED, sums)
            changes.append(
                {
                    "group_id": row.id,
                    "uniform_arrival": arrivals[0],
                    "priority_arrival": arrivals[1],
                }
            )
    if changes:
        new = {"group_status": GroupStatus.COMPLETED.value, **values}
        await connection.execute(statements.set_arrivals(new), changes)


async def archive(
    connection: AsyncConnection,
    accounts: Accounts,
    condition: ColumnElement[bool],
    ids: Sequence[int],
    reason: str,
    now: datetime,
    *,
    keep_payload: bool,
) -> None:
    """Take groups, given by condition and by id, out of use but not out of the tables."""
    values = {**RELEASED, "status_reason": reason, "archived_at": now}
    if not keep_payload:
        for statement in statements.delete_payloads(ids):
            await connection.execute(statement)
        values |= {"has_transcript": False, "num_bytes": 0}
    await move(connection, accounts, condition, GroupStatus.ARCHIVED, values)


async def delete(
    connection: AsyncConnection, accounts: Accounts, condition: ColumnElement[bool]
) -> int:
    """Delete groups with everything that hangs on them. Returns how many."""
    condition &= statements.of_tasks(accounts)  # a task made since is not locked
    for row in await connection.execute(statements.sums(condition)):
        accounts[row.task_name].leave(row.group_status, _sums(row))
    return (await connection.execute(statements.delete_groups(condition))).rowcount


def _sums(row: Any) -> GroupSums:
    return GroupSums(row.num_groups, row.weight, row.num_tokens, row.num_bytes)
