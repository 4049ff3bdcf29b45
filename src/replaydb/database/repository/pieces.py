"""Groups whose episodes arrive one by one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection

from replaydb.database.prepared import execute, execute_many
from replaydb.database.records import EpisodeRecord, reward_facts
from replaydb.database.repository import capacity, groups, packs, transitions
from replaydb.database.repository.capacity import Size
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.tasks import GroupSums
from replaydb.database.repository.transitions import Change
from replaydb.database.statements.episode_group import (
    select_known_uids,
    select_scalars,
    update_each_group,
)
from replaydb.database.statements.payload import (
    insert_episodes,
    insert_payloads,
    insert_transcripts,
    select_episodes,
    select_positions,
)
from replaydb.database.statements.selections import TOO_STALE, past_deadline
from replaydb.episodes import GroupStatus
from replaydb.errors import (
    DuplicateEpisodeError,
    GroupClosedError,
    InvalidInputError,
    ReplayDBError,
    UnknownGroupError,
)


class _Placed(NamedTuple):
    """An episode, and where it goes."""

    group_id: int
    position: int
    record: EpisodeRecord


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


def targets(
    connection: Connection, buffer_id: int, additions: Sequence[Addition]
) -> dict[str, Any]:
    """Scalars of the groups that episodes are for, by uid; those that do not exist are left out."""
    uids = sorted({addition.group_uid for addition in additions})
    known = execute(connection, select_known_uids(buffer_id, uids))
    ids = {row.id: row.group_uid for row in known}
    return {ids[row.id]: row for row in groups.scalars(connection, buffer_id, sorted(ids))}


def add(
    buffer: LockedBuffer, ids: Mapping[str, int], additions: Sequence[Addition]
) -> list[GroupStatus | ReplayDBError]:
    """Add episodes to pending groups of locked tasks, and complete those that have all of theirs.

    Args:
        buffer: Where the groups are.
        ids: Ids of the groups, by uid.
        additions: The episodes.

    Returns:
        For each addition the status of its group afterwards, or why it was left out.
    """
    found = {
        row.id: row for row in groups.scalars(buffer.connection, buffer.id, sorted(ids.values()))
    }
    taken: dict[int, set[int]] = {group_id: set() for group_id in found}
    for row in execute(buffer.connection, select_positions(list(found))):
        taken[row.group_id].add(row.position)
    outcomes: list[GroupStatus | ReplayDBError] = []
    placed: list[_Placed] = []
    for addition in additions:
        group_id = ids.get(addition.group_uid, -1)
        try:
            position = _place(addition, found.get(group_id), taken)
        except ReplayDBError as error:
            outcomes.append(error)
            continue
        taken[group_id].add(position)
        placed.append(_Placed(group_id, position, addition.record))
        outcomes.append(GroupStatus.PENDING)
    counted = packs.enter(buffer.connection, [one.record.payload for one in additions])
    packs.settle(buffer.shares, counted, [one.record.payload for one in placed])
    if not placed:
        return outcomes

    incoming: dict[str, Size] = {}
    for group_id, _, record in placed:
        size = incoming.setdefault(found[group_id].task_name, Size())
        size.tokens += record.num_tokens
        size.bytes += record.num_bytes
    capacity.make_room(buffer, incoming)
    _insert(buffer.connection, placed)
    closed = _complete(buffer, _summarise(buffer, found, placed), {})
    return [
        closed.get(ids[addition.group_uid], outcome) if outcome is GroupStatus.PENDING else outcome
        for addition, outcome in zip(additions, outcomes, strict=True)
    ]


def close_overdue(buffer: LockedBuffer) -> None:
    """Complete, or fail, the groups of locked tasks whose deadline has passed."""
    overdue = past_deadline(buffer.id, buffer.accounts, buffer.now)
    for row in execute(buffer.connection, select_scalars(overdue)):
        expected, missing = row.expected_episodes, row.expected_episodes - row.num_episodes
        why = f"{missing} of {expected} episodes missing at the deadline"
        reason = {"status_reason": why}
        least = expected if row.min_episodes is None else row.min_episodes
        if row.num_episodes >= least:
            closed = _complete(buffer, [row.id], reason)
            level, status = logging.INFO, closed[row.id]
        else:
            transitions.move(buffer, [(row, reason)], GroupStatus.FAILED)
            level, status = logging.WARNING, GroupStatus.FAILED
        buffer.report(level, f"group {row.id} is {status.value}: {why}")


def _place(addition: Addition, group: Any, taken: Mapping[int, set[int]]) -> int:
    """The position an episode gets, if it may be added."""
    if group is None:
        raise UnknownGroupError([addition.group_uid])
    if addition.position is not None and addition.position in taken[group.id]:
        raise DuplicateEpisodeError(addition.group_uid, addition.position)
    full = len(taken[group.id]) >= (group.expected_episodes or 0)
    if group.group_status != GroupStatus.PENDING or full:
        raise GroupClosedError(addition.group_uid, group.group_status if not full else "full")
    if addition.position is None:
        return next(i for i in range(group.expected_episodes) if i not in taken[group.id])
    if addition.position >= group.expected_episodes:
        raise InvalidInputError(
            "position", f"below expected_episodes = {group.expected_episodes}", addition.position
        )
    return addition.position


def _insert(connection: Connection, placed: Sequence[_Placed]) -> None:
    """Each episode is a part of the payload of its own."""
    episodes, payloads, transcripts = [], [], []
    for group_id, position, record in placed:
        episodes.append({"group_id": group_id, "position": position, **record.facts})
        payloads.append(record.payload.row(group_id, position))
        if record.text is not None:
            transcripts.append({"group_id": group_id, "position": position, "text": record.text})
    execute_many(connection, insert_episodes(), episodes)
    execute_many(connection, insert_payloads(), payloads)
    execute_many(connection, insert_transcripts(), transcripts)


def _summarise(
    buffer: LockedBuffer, found: Mapping[int, Any], placed: Sequence[_Placed]
) -> list[int]:
    """Bring the scalars of groups in line with their episodes.

    Returns:
        Those that have all their episodes now.
    """
    policy_version = buffer.row.policy_version if buffer.compares else None
    members: dict[int, list[Any]] = {group_id: [] for group_id, _, _ in placed}
    for row in execute(buffer.connection, select_episodes(sorted(members))):
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
        account = buffer.accounts[group.task_name]
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
    execute_many(buffer.connection, update_each_group(), changes)
    return [
        group_id
        for group_id, rows in members.items()
        if len(rows) == found[group_id].expected_episodes
    ]


def _complete(
    buffer: LockedBuffer, ids: Sequence[int], values: Mapping[str, Any]
) -> dict[int, GroupStatus]:
    """Make groups samplable, but those that are too stale already. Returns what became of each."""
    if not ids:
        return {}
    # Attempts were those of who worked on it; a lease of what is whole begins to count anew.
    common = {"attempts": 0, "status_reason": None, **values}
    stale: list[Change] = []
    fresh: list[Change] = []
    for row in groups.scalars(buffer.connection, buffer.id, ids):
        if buffer.is_too_stale(row.task_name, row.staleness, row.version_span):
            stale.append((row, {**common, "status_reason": TOO_STALE}))
        else:
            fresh.append((row, {**common, "completed_at": buffer.now}))
    transitions.move(buffer, stale, GroupStatus.EXPIRED)
    transitions.reopen(buffer, fresh)
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
