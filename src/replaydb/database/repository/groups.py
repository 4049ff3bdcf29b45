"""Reading groups back, deleting them, and changing their priorities."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database import filters, records
from replaydb.database.prepared import execute_many
from replaydb.database.records import PUTTABLE, Decoded, Facts
from replaydb.database.repository import buffers, tasks
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.tasks import TaskAccount, waiting
from replaydb.database.schema import group
from replaydb.database.statements import buffers as buffer_statements
from replaydb.database.statements import groups as statements
from replaydb.episodes import GroupStatus
from replaydb.results import BufferStats, GroupTotals, TaskCounters
from replaydb.settings import BufferSettings

#: Payloads larger than this together are decoded in a thread: checksums and copies of megabytes
#: would hold up the event loop.
DECODE_INLINE_BYTES = 256 << 10


async def stats(connection: AsyncConnection, buffer_id: int, name: str) -> BufferStats:
    """Everything countable about a buffer."""
    state = await buffers.state(connection, buffer_id, name)
    counters = await connection.execute(buffer_statements.task_counters(buffer_id))
    found = await connection.execute(statements.totals(buffer_id))
    totals = []
    for row in found.mappings():
        facts = dict(row)
        mean = facts.pop("mean_staleness")
        totals.append(
            GroupTotals(
                status=GroupStatus(facts.pop("group_status")),
                mean_staleness=None if mean is None else float(mean),
                **facts,
            )
        )
    return BufferStats(
        name,
        state.policy_version,
        state.settings,
        tuple(TaskCounters(**row) for row in counters.mappings()),
        tuple(totals),
    )


async def count(connection: AsyncConnection, condition: ColumnElement[bool]) -> int:
    """How many groups meet a condition."""
    return (await connection.execute(statements.count(condition))).scalar_one()


_ARCHIVED = GroupStatus.ARCHIVED.value

#: Groups that can be put elsewhere.
COPYABLE = group.group_status.in_(sorted(PUTTABLE))


async def ids(connection: AsyncConnection, condition: ColumnElement[bool]) -> Sequence[int]:
    """Ids of the groups that meet a condition."""
    return (await connection.scalars(statements.ids(condition))).all()


async def scalars(connection: AsyncConnection, buffer_id: int, ids: Sequence[int]) -> Sequence[Any]:
    """What scheduling needs to know of groups. Ids that are not in the buffer are left out."""
    rows: Sequence[Any] = (await connection.execute(*statements.scalars_of(buffer_id, ids))).all()
    return rows


async def count_ahead(
    connection: AsyncConnection,
    state: BufferRow,
    tasks: frozenset[str] | None,
    runs: frozenset[str] | None,
    max_staleness: int,
) -> int:
    """Groups that are still to be trained: arriving, leased, or never drawn."""
    putters = (
        statements.of_lineage(state.policy_lineage)
        if runs is None
        else filters.of_runs(sorted(runs))
    )
    statement = statements.count_ahead(state.id, tasks, putters, max_staleness)
    return (await connection.execute(statement)).scalar_one()


async def facts(connection: AsyncConnection, buffer_id: int, ids: Sequence[int]) -> Sequence[Facts]:
    """Rows of groups, without payloads. Ids that are not in the buffer are left out."""
    return list((await connection.execute(*statements.facts(buffer_id, ids))).mappings())


async def with_payloads(connection: AsyncConnection, rows: Sequence[Facts]) -> Decoded:
    """Groups with their episodes, from their rows."""
    # A draw that archives a group may have dropped its text, which the snapshot still has.
    spoken = [row for row in rows if row["has_transcript"] or row["group_status"] == _ARCHIVED]
    ids, with_text = [row["id"] for row in rows], [row["id"] for row in spoken]
    return await decoded(rows, *await stored(connection, ids, with_text))


async def stored(
    connection: AsyncConnection, ids: Sequence[int], with_text: Sequence[int]
) -> tuple[Sequence[Facts], Sequence[Facts]]:
    """Payloads of groups, and texts of some of them."""
    parts = (await connection.execute(*statements.payloads(ids))).mappings().all()
    if not with_text:
        return parts, ()
    return parts, (await connection.execute(*statements.transcripts(with_text))).mappings().all()


async def decoded(rows: Sequence[Facts], parts: Sequence[Facts], texts: Sequence[Facts]) -> Decoded:
    """Groups from what is stored of them; in a thread if it is large."""
    if sum(row["num_bytes"] for row in rows) > DECODE_INLINE_BYTES:
        return await asyncio.to_thread(records.from_rows, rows, parts, texts)
    return records.from_rows(rows, parts, texts)


async def fetch(connection: AsyncConnection, buffer_id: int, ids: Sequence[int]) -> Decoded:
    """Groups with their episodes. Ids that are not in the buffer are left out."""
    return await with_payloads(connection, await facts(connection, buffer_id, ids))


async def update_priorities(
    connection: AsyncConnection,
    accounts: Mapping[str, TaskAccount],
    settings: BufferSettings,
    rows: Sequence[Any],
    priorities: Mapping[int, float],
) -> int:
    """Give groups of locked tasks, by their scalars, new priorities and, with them, new arrivals.

    Returns:
        How many.
    """
    by_task: dict[str, list[Any]] = {}
    for row in rows:
        if row.task_name in accounts:  # a task made since is not locked
            by_task.setdefault(row.task_name, []).append(row)
    changes = []
    for task_name, mine in by_task.items():
        account = accounts[task_name]
        weights = np.array([settings.weight(priorities[row.id]) for row in mine])
        for row, weight in zip(mine, weights.tolist(), strict=True):
            if row.group_status == GroupStatus.COMPLETED.value:
                account.add_weight(-row.weight)
                account.add_weight(weight)
        await tasks.set_back_if_late(connection, account, "priority")
        keys = account.priority_clock + waiting(account.exponentials(settings, len(mine)), weights)
        for row, weight, key in zip(mine, weights.tolist(), keys.tolist(), strict=True):
            changes.append(
                {
                    "group_id": row.id,
                    "priority": priorities[row.id],
                    "weight": weight,
                    "priority_key": key,
                }
            )
    await execute_many(connection, statements.change(), changes)
    return len(changes)
