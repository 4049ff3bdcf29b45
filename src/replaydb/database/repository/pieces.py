"""Groups whose episodes arrive one by one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.engines.protocol import Backend
from replaydb.database.prepared import execute_many
from replaydb.database.records import EpisodeRecord, reward_facts
from replaydb.database.repository import capacity, groups, tasks, transitions
from replaydb.database.repository.capacity import Room, Size
from replaydb.database.repository.locking import Scope
from replaydb.database.repository.tasks import GroupSums
from replaydb.database.repository.transitions import Accounts, Change
from replaydb.database.statements import groups as statements
from replaydb.database.statements.groups import TOO_STALE
from replaydb.episodes import GroupStatus
from replaydb.errors import (
    DuplicateEpisodeError,
    GroupClosedError,
    InvalidInputError,
    ReplayDBError,
    UnknownGroupError,
)
from replaydb.settings import BufferSettings


@dataclass(frozen=True, slots=True)
class Addition:
    """An episode for a group.

    Attributes:
        group_uid: Which group.
        position: Which of its episodes; None: the next free one.
        record: The episode, encoded.
    """

    group_uid: str
    position: int | None
    record: EpisodeRecord


async def add(
    connection: AsyncConnection, backend: Backend, scope: Scope, additions: Sequence[Addition]
) -> list[GroupStatus | ReplayDBError]:
    """Add episodes to pending groups, and complete those that have all of theirs.

    Returns:
        For each addition the status of its group afterwards, or why it was left out.
    """
    uids = sorted({one.group_uid for one in additions})
    known = statements.known_uids(scope.buffer_id, uids)
    ids = {row.group_uid: row.id for row in await connection.execute(*known)}
    mine = sorted(ids.values())
    names = {row.task_name for row in await groups.scalars(connection, scope.buffer_id, mine)}
    state, accounts = await scope.lock(connection, names)
    now = await backend.now(connection)
    room = Room(connection, scope.buffer_id, state.settings, now, scope.news)
    await close_overdue(room, accounts)

    found = {row.id: row for row in await groups.scalars(connection, scope.buffer_id, mine)}
    taken: dict[int, set[int]] = {group_id: set() for group_id in found}
    for row in await connection.execute(statements.positions(list(found))):
        taken[row.group_id].add(row.position)
    outcomes: list[GroupStatus | ReplayDBError] = []
    placed: list[tuple[int, int, EpisodeRecord]] = []
    for one in additions:
        group_id = ids.get(one.group_uid, -1)
        try:
            position = _place(one, found.get(group_id), taken)
        except ReplayDBError as error:
            outcomes.append(error)
            continue
        taken[group_id].add(position)
        placed.append((group_id, position, one.record))
        outcomes.append(GroupStatus.PENDING)
    if not placed:
        await tasks.save(connection, accounts.values())
        return outcomes

    incoming: dict[str, Size] = {}
    for group_id, _, record in placed:
        size = incoming.setdefault(found[group_id].task_name, Size())
        size.tokens += record.num_tokens
        size.bytes += record.num_bytes
    await capacity.make_room(room, accounts, incoming)
    await _insert(connection, placed)
    version = state.policy_version if scope.compares(state) else None
    whole = await _summarise(connection, accounts, found, placed, version)
    closed = await _complete(connection, accounts, scope.buffer_id, state.settings, whole, now, {})
    await tasks.save(connection, accounts.values())
    return [
        closed.get(ids[one.group_uid], outcome) if outcome is GroupStatus.PENDING else outcome
        for one, outcome in zip(additions, outcomes, strict=True)
    ]


async def close_overdue(room: Room, accounts: Accounts) -> None:
    """Complete, or fail, the groups of locked tasks whose deadline has passed."""
    connection, now = room.connection, room.now
    overdue = statements.past_deadline(room.buffer_id, accounts, now)
    for row in (await connection.execute(statements.scalars(overdue))).all():
        expected, missing = row.expected_episodes, row.expected_episodes - row.num_episodes
        why = f"{missing} of {expected} episodes missing at the deadline"
        reason = {"status_reason": why, "deadline": None}
        least = expected if row.min_episodes is None else row.min_episodes
        if row.num_episodes >= least:
            closed = await _complete(
                connection, accounts, room.buffer_id, room.settings, [row.id], now, reason
            )
            level, status = logging.INFO, closed[row.id]
        else:
            await transitions.move(connection, accounts, [(row, reason)], GroupStatus.FAILED)
            level, status = logging.WARNING, GroupStatus.FAILED
        room.news.append((level, f"group {row.id} is {status.value}: {why}"))


def _place(one: Addition, group: Any, taken: Mapping[int, set[int]]) -> int:
    """The position an episode gets, if it may be added."""
    if group is None:
        raise UnknownGroupError([one.group_uid])
    if one.position is not None and one.position in taken[group.id]:
        raise DuplicateEpisodeError(one.group_uid, one.position)
    full = len(taken[group.id]) >= (group.expected_episodes or 0)
    if group.group_status != GroupStatus.PENDING or full:
        raise GroupClosedError(one.group_uid, group.group_status if not full else "full")
    if one.position is None:
        return next(i for i in range(group.expected_episodes) if i not in taken[group.id])
    if one.position >= group.expected_episodes:
        raise InvalidInputError(
            "position", f"below expected_episodes = {group.expected_episodes}", one.position
        )
    return one.position


async def _insert(
    connection: AsyncConnection, placed: Sequence[tuple[int, int, EpisodeRecord]]
) -> None:
    """Each episode is a part of the payload of its own."""
    episodes, payloads, transcripts = [], [], []
    for group_id, position, record in placed:
        episodes.append({"group_id": group_id, "position": position, **record.facts})
        payloads.append({"group_id": group_id, "part": position, **record.payload})
        if record.text is not None:
            transcripts.append({"group_id": group_id, "position": position, "text": record.text})
    await execute_many(connection, statements.insert_episodes(), episodes)
    await execute_many(connection, statements.insert_payloads(), payloads)
    await execute_many(connection, statements.insert_transcripts(), transcripts)


async def _summarise(
    connection: AsyncConnection,
    accounts: Accounts,
    found: Mapping[int, Any],
    placed: Sequence[tuple[int, int, EpisodeRecord]],
    policy_version: int | None,
) -> list[int]:
    """Bring the scalars of groups in line with their episodes.

    Returns:
        Those that have all their episodes now.
    """
    members: dict[int, list[Any]] = {group_id: [] for group_id, _, _ in placed}
    for row in await connection.execute(statements.episodes_of(sorted(members))):
        members[row.group_id].append(row)
    num_bytes = {group_id: found[group_id].num_bytes for group_id in members}
    spoken = {group_id for group_id in members if found[group_id].has_transcript}
    for group_id, _, record in placed:
        num_bytes[group_id] += record.num_bytes
        if record.text is not None:
            spoken.add(group_id)
    changes = []
    for group_id, rows in members.items():
        group = found[group_id]
        facts = _facts(rows, policy_version)
        account = accounts[group.task_name]
        account.leave(group.group_status, GroupSums.of([group]))
        grown = GroupSums(1, group.weight, facts["num_tokens"], num_bytes[group_id])
        account.enter(group.group_status, grown)
        changes.append(
            {
                "group_id": group_id,
                "num_bytes": num_bytes[group_id],
                "has_transcript": group_id in spoken,
                **facts,
            }
        )
    await execute_many(connection, statements.change(), changes)
    return [
        group_id
        for group_id, rows in members.items()
        if len(rows) == found[group_id].expected_episodes
    ]


async def _complete(
    connection: AsyncConnection,
    accounts: Accounts,
    buffer_id: int,
    settings: BufferSettings,
    ids: Sequence[int],
    now: datetime,
    values: Mapping[str, Any],
) -> dict[int, GroupStatus]:
    """Make groups samplable, but those that are too stale already. Returns what became of each."""
    if not ids:
        return {}
    stale: list[Change] = []
    fresh: list[Change] = []
    for row in await groups.scalars(connection, buffer_id, ids):
        if accounts[row.task_name].is_too_stale(row.staleness):
            stale.append((row, {**values, "status_reason": TOO_STALE, "deadline": None}))
        else:
            fresh.append((row, {**values, "completed_at": now, "deadline": None}))
    await transitions.move(connection, accounts, stale, GroupStatus.EXPIRED)
    await transitions.reopen(connection, accounts, settings, fresh)
    return {row.id: GroupStatus.EXPIRED for row, _ in stale} | {
        row.id: GroupStatus.COMPLETED for row, _ in fresh
    }


def _facts(rows: Sequence[Any], policy_version: int | None) -> dict[str, Any]:
    """Scalars of a group of these episodes, at a policy version (None: theirs do not compare)."""
    rewards = np.array([row.reward for row in rows if row.reward is not None], np.float64)
    known = all(row.min_policy_version is not None for row in rows)
    oldest = min(row.min_policy_version for row in rows) if known else None
    comparable = staleness = None
    if policy_version is not None and oldest is not None:
        comparable, staleness = oldest, policy_version - oldest
    return {
        "num_episodes": len(rows),
        "num_tokens": sum(row.num_tokens for row in rows),
        "min_policy_version": oldest,
        "max_policy_version": max(row.max_policy_version for row in rows) if known else None,
        "comparable_version": comparable,
        "staleness": staleness,
        **reward_facts(rewards),
    }
