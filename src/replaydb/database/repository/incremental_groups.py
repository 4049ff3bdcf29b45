"""Incremental groups: episodes added one by one, and completion or deadline."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, NamedTuple

import numpy as np
from sqlalchemy import ColumnElement, Select, func, select

from replaydb.database.repository import capacity, groups, packs, transitions
from replaydb.database.repository.capacity import Size
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.tasks import GroupSums
from replaydb.database.repository.transitions import Change
from replaydb.database.runtime.prepared import prepared
from replaydb.database.runtime.protocol import LostRaceError
from replaydb.database.runtime.session import Session
from replaydb.database.statements.episode_group import SCALARS, select_known_uids, update_each_group
from replaydb.database.statements.insertion import insert_into
from replaydb.database.statements.payload import select_episodes
from replaydb.database.statements.selections import TOO_STALE
from replaydb.database.tables.expressions import among
from replaydb.database.tables.records import EpisodeRecord, PayloadRecord, reward_facts
from replaydb.database.tables.schema import CONTEXT_PART, episode, group, payload, transcript
from replaydb.database.tables.staleness import staleness_of
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import (
    DuplicateEpisodeError,
    GroupClosedError,
    InvalidInputError,
    ReplayDBError,
    UnknownGroupError,
)


class _Added(NamedTuple):
    """An episode with its group and position."""

    group_id: int
    position: int
    record: EpisodeRecord


@dataclass(frozen=True, slots=True)
class Addition:
    """An episode to add to a group.

    Attributes:
        group_uid: Uid of the group.
        position: Position in the group; None: the first free one.
        record: The episode, encoded.
    """

    group_uid: str
    position: int | None
    record: EpisodeRecord
    new_task_names: ClassVar[frozenset[str]] = frozenset()  # its group has a task

    @property
    def payloads(self) -> list[PayloadRecord]:
        """The parts of its payload."""
        return self.record.payloads


def targets(session: Session, buffer_id: int, additions: Sequence[Addition]) -> dict[str, Any]:
    """Return the scalars of the groups to add to, by uid. Unknown groups are omitted."""
    uids = sorted({addition.group_uid for addition in additions})
    known = session.run(select_known_uids(buffer_id, uids))
    ids = {row.id: row.group_uid for row in known}
    return {ids[row.id]: row for row in groups.scalars(session, buffer_id, sorted(ids))}


def add(
    buffer: LockedBuffer, ids: Mapping[str, int], additions: Sequence[Addition]
) -> list[GroupStatus | ReplayDBError]:
    """Add episodes to pending groups of locked tasks, and complete the groups that have all.

    Args:
        buffer: The buffer.
        ids: Ids of the groups, by uid.
        additions: The episodes.

    Returns:
        For each addition the status of its group afterwards, or the error that prevented it.

    Raises:
        LostRaceError: Some groups were replaced or deleted before their tasks were locked.
    """
    payloads = [part for addition in additions for part in addition.payloads]
    buffer.check_formats(payloads)
    found = {row.id: row for row in groups.scalars(buffer.session, buffer.id, sorted(ids.values()))}
    is_lost = set(ids.values()) - found.keys() - buffer.erased.keys()
    if is_lost or any(row.task_name not in buffer.task_states for row in found.values()):
        raise LostRaceError("another transaction replaced or deleted a group")
    taken: dict[int, set[int]] = {group_id: set() for group_id in found}
    key = (episode.c.group_id, episode.c.position)
    for row in buffer.session.run(select(*key).where(among(episode.c.group_id, list(found)))):
        taken[row.group_id].add(row.position)
    outcomes: list[GroupStatus | ReplayDBError] = []
    added: list[_Added] = []
    for addition in additions:
        group_id = ids.get(addition.group_uid, -1)
        try:
            position = _choose_position(addition, found.get(group_id), taken)
        except ReplayDBError as error:
            outcomes.append(error)
            continue
        taken[group_id].add(position)
        added.append(_Added(group_id, position, addition.record))
        outcomes.append(GroupStatus.PENDING)
    counted = packs.enter(buffer.session, payloads)
    stored = [part for one in added for part in one.record.payloads]
    packs.settle(buffer.shares, counted, stored)
    if not added:
        return outcomes

    incoming: dict[str, Size] = {}
    for group_id, _, record in added:
        size = incoming.setdefault(found[group_id].task_name, Size())
        size.tokens += record.num_tokens
        size.bytes += record.num_bytes
    capacity.evict_surplus(buffer)
    capacity.free_space(buffer, incoming)
    _insert(buffer.session, added)
    full = _summarise(buffer, found, added)
    closed = _complete(buffer, {group_id: {} for group_id in full})
    return [
        closed.get(ids[addition.group_uid], outcome) if outcome is GroupStatus.PENDING else outcome
        for addition, outcome in zip(additions, outcomes, strict=True)
    ]


def close_overdue(buffer: LockedBuffer, most: int) -> bool:
    """Complete or fail up to `most` groups of locked tasks whose deadline has passed.

    Returns:
        Whether there are no others.
    """
    late = select_past_deadline(buffer.id, buffer.task_states, buffer.now, most)
    rows = buffer.session.run(late)
    enough: dict[int, Mapping[str, Any]] = {}
    failed: list[Change] = []
    for row in rows:
        expected, missing = row.expected_episodes, row.expected_episodes - row.num_episodes
        reason = {"status_reason": f"{missing} of {expected} episodes missing at the deadline"}
        if row.num_episodes >= (expected if row.min_episodes is None else row.min_episodes):
            enough[row.id] = reason
        else:
            failed.append((row, reason))
    closed = _complete(buffer, enough)
    transitions.lose_claims(buffer, [row for row, _ in failed], by_caller=False)
    transitions.move(buffer, failed, GroupStatus.FAILED)
    changes = enough | {row.id: values for row, values in failed}
    for group_id, values in sorted(changes.items()):
        status = closed.get(group_id, GroupStatus.FAILED)
        level = logging.INFO if group_id in closed else logging.WARNING
        buffer.report(level, f"group {group_id} is {status.value}: {values['status_reason']}")
    return len(rows) < most


def _choose_position(addition: Addition, group: Any, taken: Mapping[int, set[int]]) -> int:
    """Return the position of a new episode.

    Raises:
        UnknownGroupError: The group does not exist.
        DuplicateEpisodeError: The position is taken.
        GroupClosedError: The group is not pending, or has all its episodes.
        InvalidInputError: The position is not below `expected_episodes`.
    """
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


def _insert(session: Session, added: Sequence[_Added]) -> None:
    """Insert episodes, each as its own part of the payload, with a part for each heavy column."""
    episodes, payloads, transcripts = [], [], []
    with_columns = sorted({one.group_id for one in added if len(one.record.payloads) > 1})
    lowest = dict.fromkeys(with_columns, CONTEXT_PART)
    if with_columns:
        lowest |= {
            row.group_id: min(row.part, CONTEXT_PART)
            for row in session.run(_select_lowest_parts(with_columns))
        }
    for group_id, position, record in added:
        episodes.append({"group_id": group_id, "position": position, **record.facts})
        core, *columns = record.payloads
        core.part = position
        for column in columns:
            lowest[group_id] -= 1
            column.part, column.of_part = lowest[group_id], position
        payloads += [part.row(group_id) for part in record.payloads]
        if record.text is not None:
            transcripts.append({"group_id": group_id, "position": position, "text": record.text})
    session.run_many(insert_into(episode), episodes)
    session.run_many(insert_into(payload), payloads)
    session.run_many(insert_into(transcript), transcripts)


@prepared
def _select_lowest_parts(ids: Any) -> Select[Any]:
    """Select the lowest number of a part of each group."""
    lowest = func.min(payload.c.part).label("part")
    return (
        select(payload.c.group_id, lowest)
        .where(among(payload.c.group_id, ids))
        .group_by(payload.c.group_id)
    )


def _summarise(
    buffer: LockedBuffer, found: Mapping[int, Any], added: Sequence[_Added]
) -> list[int]:
    """Recompute the scalars of groups from their episodes.

    Returns:
        Ids of the groups that have all their episodes now.
    """
    policy_version = buffer.row.policy_version if buffer.is_comparable else None
    members: dict[int, list[Any]] = {group_id: [] for group_id, _, _ in added}
    for row in buffer.session.run(select_episodes(sorted(members))):
        members[row.group_id].append(row)
    num_bytes = {group_id: found[group_id].num_bytes for group_id in members}
    with_text = {group_id for group_id in members if found[group_id].has_transcript}
    for group_id, _, record in added:
        num_bytes[group_id] += record.num_bytes
        if record.text is not None:
            with_text.add(group_id)
    changes = []
    for group_id, rows in members.items():
        group = found[group_id]
        facts = facts_of(rows, policy_version)
        task = buffer.task_states[group.task_name]
        task.leave(group.group_status, GroupSums.of([group]))
        grown = GroupSums(1, group.weight, facts["num_tokens"], num_bytes[group_id])
        task.enter(group.group_status, grown)
        changes.append(
            {
                "group_id": group_id,
                "num_bytes": num_bytes[group_id],
                "has_transcript": group_id in with_text,
                **facts,
            }
        )
    buffer.session.run_many(update_each_group(), changes)
    return [
        group_id
        for group_id, rows in members.items()
        if len(rows) == found[group_id].expected_episodes
    ]


def _complete(
    buffer: LockedBuffer, changes: Mapping[int, Mapping[str, Any]]
) -> dict[int, GroupStatus]:
    """Make groups samplable, or expire those that are too stale.

    Args:
        buffer: The buffer.
        changes: Other values to set, by id of the group.

    Returns:
        Their statuses by id.
    """
    if not changes:
        return {}
    stale: list[Change] = []
    fresh: list[Change] = []
    for row in groups.scalars(buffer.session, buffer.id, sorted(changes)):
        # So far, attempts counted claims. For the completed group the count restarts.
        common = {"attempts": 0, "status_reason": None, **changes[row.id]}
        if buffer.is_too_stale(row.task_name, row.staleness, row.version_span):
            stale.append((row, {**common, "status_reason": TOO_STALE}))
        else:
            fresh.append((row, {**common, "completed_at": buffer.now}))
    transitions.move(buffer, stale, GroupStatus.EXPIRED)
    transitions.reopen(buffer, fresh)
    return {row.id: GroupStatus.EXPIRED for row, _ in stale} | {
        row.id: GroupStatus.COMPLETED for row, _ in fresh
    }


def facts_of(rows: Sequence[Any], policy_version: int | None) -> dict[str, Any]:
    """Return the scalars of a group with these episodes.

    Args:
        rows: Rows of the episodes.
        policy_version: Version of the buffer; None: versions of the group are not comparable.
    """
    rewards = np.array([row.reward for row in rows if row.reward is not None], np.float64)
    known = all(row.min_policy_version is not None for row in rows)
    oldest = min(row.min_policy_version for row in rows) if known else None
    comparable = None if policy_version is None else oldest
    return {
        "num_episodes": len(rows),
        "num_tokens": sum(row.num_tokens for row in rows),
        "min_policy_version": oldest,
        "max_policy_version": max(row.max_policy_version for row in rows) if known else None,
        "comparable_version": comparable,
        "staleness": None if policy_version is None else staleness_of(oldest, policy_version),
        **reward_facts(rewards),
    }


def select_past_deadline(
    buffer_id: int, tasks: Collection[str], now: datetime, most: int
) -> Select[Any]:
    """Select the scalars of up to `most` pending groups of tasks whose deadline has passed."""
    late = past_deadline(buffer_id, tasks, now)
    return select(*SCALARS).where(late).order_by(group.deadline, group.id).limit(most)


def past_deadline(buffer_id: int, tasks: Collection[str], now: datetime) -> ColumnElement[bool]:
    """Return the condition for pending groups of tasks whose deadline has passed."""
    return (
        (group.buffer_id == buffer_id)
        & (group.deadline <= now)
        & (group.group_status == GroupStatus.PENDING.value)
        & among(group.task_name, sorted(tasks))
    )
