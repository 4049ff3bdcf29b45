"""Storing groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.engines.protocol import Backend
from replaydb.database.prepared import execute_many
from replaydb.database.records import GroupRecord
from replaydb.database.repository import (
    buffers,
    capacity,
    limits,
    lineage,
    tasks,
    transitions,
    upkeep,
)
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.capacity import Room, Size
from replaydb.database.repository.locking import Scope
from replaydb.database.repository.tasks import GroupSums, TaskAccount
from replaydb.database.schema import Damaged
from replaydb.database.statements import groups as statements
from replaydb.episodes import GroupStatus
from replaydb.errors import DuplicateGroupError, ReplayDBError

OnDuplicate = Literal["error", "ignore", "replace"]


@dataclass(frozen=True, slots=True)
class Put:
    """Groups, and cursors, that are stored together or not at all; no uid occurs twice.

    Attributes:
        records: The groups.
        on_duplicate: What to do about those that are stored already.
        cursors: JSON values by name.
        was_refused: It did not fit, or was held back by a rate limit, when it was last tried.
    """

    records: Sequence[GroupRecord]
    on_duplicate: OnDuplicate
    cursors: Mapping[str, Any] = field(default_factory=dict)
    was_refused: bool = False


@dataclass(frozen=True, slots=True)
class _Ids:
    """Ids of groups by uid: those stored before, and those given to new ones."""

    stored: Mapping[str, int]
    new: Mapping[str, int]

    def __getitem__(self, record: GroupRecord) -> int:
        return self.stored.get(record.uid) or self.new[record.uid]


async def put(
    connection: AsyncConnection,
    backend: Backend,
    scope: Scope,
    known_tasks: frozenset[str],
    puts: Sequence[Put],
) -> list[list[int] | ReplayDBError]:
    """Store several puts in one transaction. No uid may occur in two of them.

    Returns:
        For each put the ids of its groups, in their order, or why it was left out whole.
    """
    uids = [record.uid for one in puts for record in one.records]
    found = await connection.execute(*statements.known_uids(scope.buffer_id, uids))
    stored = {row.group_uid: row.id for row in found}
    fresh = [uid for uid in uids if uid not in stored]
    new = await backend.allocate_group_ids(connection, len(fresh))
    ids = _Ids(stored, dict(zip(fresh, new, strict=True)))
    task_names = {record.task_name for one in puts for record in one.records}

    # What is large is written before the locks are taken: a client that is stuck in the middle of
    # it holds up nobody. Only what waits to be let in is not sent again with every try.
    early = [one for one in puts if not (_known(one, stored) or one.was_refused)]
    await _insert_children(connection, [record for one in early for record in one.records], ids)
    if unseen := task_names - known_tasks:
        await buffers.ensure_tasks(connection, scope.buffer_id, scope.buffer_name, unseen)
    replacing = any(one.on_duplicate == "replace" and _known(one, stored) for one in puts)
    state, accounts = await scope.lock(connection, None if replacing else task_names)
    now = await backend.now(connection)
    room = Room(connection, scope.buffer_id, state.settings, now, scope.news)
    await upkeep.sweep(room, accounts)
    session = _Session(room, scope, state, accounts, ids)
    outcomes: list[list[int] | ReplayDBError] = []
    for one in puts:
        try:
            await session.store(one, written=one in early)
            outcomes.append([ids[record] for record in one.records])
        except ReplayDBError as error:
            if one in early:
                if not state.settings.is_limited:
                    raise  # what it has written goes with the transaction
                await _delete_children(connection, [ids[record] for record in one.records])
            outcomes.append(error)
    await session.flush()
    await lineage.set_cursors(connection, scope.buffer_id, session.cursors, now)
    await buffers.save_limits(connection, state)
    await tasks.save(connection, accounts.values())
    return outcomes


@dataclass(slots=True)
class _Session:
    """Several puts on their way into a locked buffer.

    Attributes:
        room: Where, and by what settings.
        scope: Who puts.
        state: The buffer.
        accounts: Its locked tasks.
        ids: Ids of the groups.
        rows: Rows of `episode_group` that are not written yet.
        cursors: Cursors that are not written yet.
    """

    room: Room
    scope: Scope
    state: BufferRow
    accounts: dict[str, TaskAccount]
    ids: _Ids
    rows: list[dict[str, Any]] = field(default_factory=list)
    cursors: dict[str, Any] = field(default_factory=dict)

    async def store(self, put: Put, *, written: bool) -> None:
        """Take in one put, or raise and leave everything as it was."""
        known = _known(put, self.ids.stored)
        if put.on_duplicate == "error" and known:
            raise DuplicateGroupError([record.uid for record in known])
        if not self.state.settings.is_limited:
            await self._take_in(put, written=written)
            return
        accounts = {name: replace(account) for name, account in self.accounts.items()}
        limited_inserts = self.state.limited_inserts
        try:
            async with self.room.connection.begin_nested():
                await self._take_in(put, written=written)
                await self.flush()  # what is in can be a victim: of the next put, or at once
                await capacity.shed(self.room, self.accounts)
        except BaseException:
            self.rows.clear()
            self.accounts.update(accounts)
            self.state.limited_inserts = limited_inserts
            raise

    async def flush(self) -> None:
        """Write the rows taken in so far, with arrivals from now on."""
        for name in {row["task_name"] for row in self.rows}:
            for clock in tasks.CLOCKS:
                await tasks.set_back_if_late(self.room.connection, self.accounts[name], clock)
        for row in self.rows:
            account = self.accounts[row["task_name"]]
            row["uniform_key"] += account.uniform_clock
            row["priority_key"] += account.priority_clock
        await execute_many(self.room.connection, statements.insert_groups(), self.rows)
        self.rows = []

    async def _take_in(self, put: Put, *, written: bool) -> None:
        connection, stored = self.room.connection, self.ids.stored
        accepted = [
            record
            for record in put.records
            if put.on_duplicate == "replace" or record.uid not in stored
        ]
        replaced = [stored[record.uid] for record in accepted if record.uid in stored]
        limits.check_put(self.state, self.accounts, len(accepted) - len(replaced))
        kept: dict[int, Any] = {}
        if replaced:
            condition = statements.selection(self.scope.buffer_id, ids=replaced)
            found = await connection.execute(statements.kept_on_replace(condition))
            kept = {
                row["id"]: {key: one for key, one in row.items() if not isinstance(one, Damaged)}
                for row in found.mappings()
            }
            now = self.room.now
            await transitions.delete(connection, self.accounts, condition, "replaced", now)
        usable = [one for one in accepted if self._is_usable(one)]
        await capacity.make_room(self.room, self.accounts, _sizes(usable))
        if not written:
            await _insert_children(connection, accepted, self.ids)
        self.state.limited_inserts += len(accepted) - len(replaced)
        for row in self._group_rows(accepted):
            self.rows.append(row | kept.get(row["id"], {"times_replaced": 0}))
        self.cursors |= put.cursors

    def _group_rows(self, records: Sequence[GroupRecord]) -> list[dict[str, Any]]:
        """Rows as the buffer's state has it, entered in the accounts of their tasks."""
        rows = []
        for task_name in dict.fromkeys(record.task_name for record in records):
            account = self.accounts[task_name]
            members = [record for record in records if record.task_name == task_name]
            settings = self.state.settings
            weights = np.array([settings.weight(one.facts["priority"]) for one in members])
            waits = account.waits(settings, weights)
            for record, weight, uniform_wait, priority_wait in zip(
                members, weights.tolist(), *(wait.tolist() for wait in waits), strict=True
            ):
                row = record.facts | {
                    "id": self.ids[record],
                    "buffer_id": self.scope.buffer_id,
                    "run_id": self.scope.run.id,
                    "weight": weight,
                    "uniform_key": uniform_wait,  # from the clock of the moment of `flush`
                    "priority_key": priority_wait,
                    **self._standing(record, account),
                    "created_at": self.room.now,
                }
                row["completed_at"] = self.room.now if record.is_completed else None
                if record.time_limit is not None:
                    row["deadline"] = self.room.now + record.time_limit
                sums = GroupSums(1, weight, row["num_tokens"], row["num_bytes"])
                account.enter(row["group_status"], sums)
                account.num_inserted += 1
                rows.append(row)
        return sorted(rows, key=lambda row: int(row["id"]))

    def _is_usable(self, record: GroupRecord) -> bool:
        """Whether it is worth the place of another group."""
        standing = self._standing(record, self.accounts[record.task_name])
        return standing["group_status"] not in capacity.DEAD

    def _standing(self, record: GroupRecord, account: TaskAccount) -> dict[str, Any]:
        """How its version compares at arrival, and whether that is already too stale."""
        oldest = record.facts["min_policy_version"]
        if not self.scope.compares(self.state):
            oldest = None
        staleness = None if oldest is None else self.state.policy_version - oldest
        status, reason = record.facts["group_status"], None
        if status in statements.EXPIRING and account.is_too_stale(staleness):
            status, reason = GroupStatus.EXPIRED.value, statements.TOO_STALE
        return {
            "comparable_version": oldest,
            "staleness": staleness,
            "group_status": status,
            "status_reason": reason,
        }


def _known(put: Put, stored: Mapping[str, int]) -> list[GroupRecord]:
    """Groups of a put whose uid is stored already."""
    return [record for record in put.records if record.uid in stored]


def _sizes(records: Iterable[GroupRecord]) -> dict[str, Size]:
    """What groups take up, by task."""
    sizes: dict[str, Size] = {}
    for record in records:
        size = sizes.setdefault(record.task_name, Size())
        size.add(record.facts["num_tokens"], record.facts["num_bytes"])
    return sizes


async def _insert_children(
    connection: AsyncConnection, records: Iterable[GroupRecord], ids: _Ids
) -> None:
    """Everything large, which needs no lock."""
    rows = [(ids[record], record) for record in records]
    for statement, children in (
        (statements.insert_payloads(), [(i, child) for i, one in rows for child in one.payloads]),
        (statements.insert_episodes(), [(i, child) for i, one in rows for child in one.episodes]),
        (statements.insert_transcripts(), [(i, c) for i, one in rows for c in one.transcripts]),
    ):
        await execute_many(
            connection, statement, [{"group_id": group_id, **child} for group_id, child in children]
        )


async def _delete_children(connection: AsyncConnection, ids: Sequence[int]) -> None:
    """Of groups that do not come in after all."""
    for statement in (
        statements.delete_payloads,
        statements.delete_episodes,
        statements.delete_transcripts,
    ):
        await connection.execute(*statement(ids))
