"""Groups changing status, with the accounts of their tasks changing alike.

Every function takes a locked buffer, and groups of its locked tasks only: their scalars, read
under those locks, or a condition that selects them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement

from replaydb.database.prepared import execute, execute_many
from replaydb.database.repository import packs, tasks
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.tasks import GroupSums, TaskAccount
from replaydb.database.staleness import LIVE
from replaydb.database.statements.draw import lose_leased
from replaydb.database.statements.episode_group import (
    age_groups_by_id,
    archive_groups,
    archive_scalars,
    delete_groups,
    delete_groups_by_id,
    expire_groups,
    select_ids,
    select_sums,
    update_each_group,
)
from replaydb.database.statements.lease import delete_lease_if_empty, select_leases_of
from replaydb.database.statements.payload import delete_payloads, delete_transcripts
from replaydb.database.statements.selections import of_tasks
from replaydb.episodes import GroupStatus

#: A group's scalars, and what else is to change with its status: the same columns for all.
Change = tuple[Any, Mapping[str, Any]]


def move(
    buffer: LockedBuffer,
    changes: Sequence[Change],
    status: GroupStatus,
) -> None:
    """Give groups, which nobody holds any more, a status from which they are not drawn."""
    _leave(buffer, [row for row, _ in changes], status)
    new = [_changed(row, status, values) for row, values in changes]
    execute_many(buffer.connection, update_each_group(), new)


def reopen(
    buffer: LockedBuffer,
    changes: Sequence[Change],
) -> None:
    """Make groups, which nobody holds any more, samplable, with arrivals from now on."""
    status = GroupStatus.COMPLETED
    _recount(buffer.accounts, [row for row, _ in changes], status)
    by_task: dict[str, list[Change]] = {}
    for change in changes:
        by_task.setdefault(change[0].task_name, []).append(change)
    new = []
    for task_name, mine in by_task.items():
        account = buffer.accounts[task_name]
        for clock in tasks.CLOCKS:
            tasks.set_back_if_late(buffer.connection, account, clock)
        weights = np.array([row.weight for row, _ in mine], np.float64)
        waits = (wait.tolist() for wait in account.waits(buffer.settings, weights))
        for (row, values), uniform, prioritized in zip(mine, *waits, strict=True):
            arrivals = {
                "uniform_key": account.uniform_clock + uniform,
                "priority_key": account.priority_clock + prioritized,
            }
            new.append(_changed(row, status, values) | arrivals)
    execute_many(buffer.connection, update_each_group(), new)


def archive(
    buffer: LockedBuffer,
    rows: Sequence[Any],
    reason: str | None,
    *,
    keep_payload: bool,
) -> None:
    """Take groups, given by their scalars, out of use but not out of the tables."""
    if not rows:
        return
    _leave(buffer, rows, GroupStatus.ARCHIVED)
    ids = [row.id for row in rows]
    if keep_payload:
        execute(buffer.connection, archive_groups(ids, reason, buffer.now))
        return
    execute(buffer.connection, archive_scalars(ids, reason, buffer.now))
    if buffer.row.outside:
        packs.release(buffer.connection, ids, buffer.shares)
    else:
        execute(buffer.connection, delete_payloads(ids))
    execute(buffer.connection, delete_transcripts(ids))


def retire(
    buffer: LockedBuffer,
    rows: Sequence[Any],
    reason: str,
    *,
    keep_payload: bool,
) -> None:
    """Take groups out for good: archived, or deleted where nothing is to be left of what goes."""
    if buffer.settings.on_evict == "archive":
        archive(buffer, rows, reason, keep_payload=keep_payload)
        return
    _recount(buffer.accounts, rows, GroupStatus.ARCHIVED)
    erase(buffer, [row.id for row in rows])


def erase(buffer: LockedBuffer, ids: Sequence[int]) -> None:
    """Delete groups that no account has any more."""
    if not ids:
        return
    if buffer.row.outside:
        packs.release(buffer.connection, ids, buffer.shares)
    execute(buffer.connection, delete_groups_by_id(ids))


def expire(buffer: LockedBuffer, rows: Sequence[Any], reason: str) -> None:
    """Expire idle groups, given by their scalars."""
    if rows:
        _recount(buffer.accounts, rows, GroupStatus.EXPIRED)
        ids = [row.id for row in rows]
        execute(buffer.connection, expire_groups(ids, reason, buffer.row.policy_version))


def delete(
    buffer: LockedBuffer,
    condition: ColumnElement[bool],
    reason: str,
) -> int:
    """Delete groups with everything that hangs on them. Returns how many.

    The reason goes to those who hold some of them. A lease of which nothing is left is over.
    """
    leases = execute(buffer.connection, select_leases_of(condition))
    num_deleted = _delete(buffer, condition, reason)
    for row in leases:
        execute(buffer.connection, delete_lease_if_empty(row.lease_id))
    return num_deleted


def replace(buffer: LockedBuffer, condition: ColumnElement[bool]) -> None:
    """Delete groups whose uids are put again. Leases stay: it may be their holder who does it."""
    _delete(buffer, condition, "replaced")


def _delete(buffer: LockedBuffer, condition: ColumnElement[bool], reason: str) -> int:
    condition &= of_tasks(buffer.accounts)  # a task made since is not locked
    sums = execute(buffer.connection, select_sums(condition))
    for row in sums:
        buffer.accounts[row.task_name].leave(row.group_status, _sums(row))
    if any(row.group_status == GroupStatus.LEASED for row in sums):
        execute(buffer.connection, lose_leased(condition, reason, buffer.now))
    if buffer.row.outside:
        going = [row.id for row in execute(buffer.connection, select_ids(condition))]
        packs.release(buffer.connection, going, buffer.shares)
    return int(execute(buffer.connection, delete_groups(condition)))


def _leave(buffer: LockedBuffer, rows: Sequence[Any], status: GroupStatus) -> None:
    """Enter in the accounts that groups get a status. What ages no more keeps its staleness."""
    _recount(buffer.accounts, rows, status)
    if status not in LIVE and any(account.is_behind for account in buffer.accounts.values()):
        ids = [row.id for row in rows if row.group_status in LIVE]
        execute(buffer.connection, age_groups_by_id(ids, buffer.row.policy_version))


def _recount(accounts: Mapping[str, TaskAccount], rows: Sequence[Any], status: GroupStatus) -> None:
    alike: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        alike.setdefault((row.task_name, row.group_status), []).append(row)
    for (task_name, before), some in alike.items():
        accounts[task_name].move(before, status, GroupSums.of(some))


def _changed(row: Any, status: GroupStatus, values: Mapping[str, Any]) -> dict[str, Any]:
    new = {"group_id": row.id, "group_status": status.value, "lease_id": None, "leased_from": None}
    if status is not GroupStatus.PENDING:
        new["deadline"] = None  # that was for what is still to arrive
    return new | dict(values)


def _sums(row: Any) -> GroupSums:
    return GroupSums(row.num_groups, row.weight, row.num_tokens, row.num_bytes)
