"""Incremental groups: episodes added one by one, and completion or deadline."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, NamedTuple

import numpy as np
from sqlalchemy import ColumnElement, Select, func, select

from replaydb.database.repository import (
    capacity,
    groups,
    missing_values,
    packs,
    tags,
    trajectories,
    transitions,
)
from replaydb.database.repository.capacity import Size
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.tasks import GroupSums
from replaydb.database.repository.transitions import Change
from replaydb.database.runtime.prepared import Write, prepared
from replaydb.database.runtime.protocol import LostRaceError
from replaydb.database.runtime.session import Session
from replaydb.database.statements.episode_group import SCALARS, select_known_uids, update_each_group
from replaydb.database.statements.insertion import insert_into
from replaydb.database.statements.payload import select_episodes
from replaydb.database.statements.selections import TOO_STALE
from replaydb.database.tables.expressions import among
from replaydb.database.tables.records import EpisodeRecord, PayloadRecord, reward_facts
from replaydb.database.tables.schema import (
    CONTEXT_PART,
    episode,
    group,
    payload,
    trajectory,
    transcript,
    turn,
)
from replaydb.database.tables.staleness import staleness_of
from replaydb.database.tables.turn_records import part_of
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import (
    DuplicateEpisodeError,
    GroupClosedError,
    InvalidInputError,
    ReplayDBError,
    UnknownGroupError,
)


@dataclass(frozen=True, slots=True)
class Addition:
    """The end of a trajectory: an episode to add to a group, or why there is none.

    Attributes:
        group_uid: Uid of the group.
        position: Position in the group; None: the first free one.
        record: The episode, encoded; None: the position cannot be used.
        reason: Why it cannot.
        claim_uid: The claim of the caller; None: it has none.
        num_turns: Number of appended turns that the episode consists of.
        discarded: Uids of those of them that are not trained on.
        tags: Merged into the tags of the group.
    """

    group_uid: str
    position: int | None
    record: EpisodeRecord | None
    reason: str | None = None
    claim_uid: str | None = None
    num_turns: int = 0
    discarded: Sequence[str] = ()
    tags: Mapping[str, Any] = field(default_factory=dict)
    new_task_names: ClassVar[frozenset[str]] = frozenset()  # its group has a task

    @property
    def payloads(self) -> list[PayloadRecord]:
        """The parts of its payload."""
        return [] if self.record is None else self.record.payloads

    @property
    def turn_uids(self) -> dict[str, int]:
        """Uids of the turns that are new to the group, with their indices in the episode."""
        if self.record is None or self.num_turns:
            return {}
        uids = (row["turn_uid"] for row in self.record.turns)
        return {uid: i for i, uid in enumerate(uids) if uid is not None}


class _Missing(NamedTuple):
    """A new row of `trajectory`: a value that an episode lacks."""

    group_id: int
    missing: str
    unusable_reason: None = None


class _Added(NamedTuple):
    """An addition, with the row of its trajectory."""

    row: Any
    addition: Addition

    @property
    def group_id(self) -> int:
        """Id of the group."""
        group_id: int = self.row.group_id
        return group_id


def targets(session: Session, buffer_id: int, additions: Sequence[Addition]) -> dict[str, Any]:
    """Return the scalars of the groups to add to, by uid. Unknown groups are omitted."""
    uids = sorted({addition.group_uid for addition in additions})
    known = session.run(select_known_uids(buffer_id, uids))
    ids = {row.id: row.group_uid for row in known}
    return {ids[row.id]: row for row in groups.scalars(session, buffer_id, sorted(ids))}


def add(
    buffer: LockedBuffer, ids: Mapping[str, int], additions: Sequence[Addition]
) -> list[GroupStatus | ReplayDBError]:
    """End trajectories of pending groups of locked tasks, and complete the groups without others.

    Args:
        buffer: The buffer.
        ids: Ids of the groups, by uid.
        additions: The episodes.

    Returns:
        For each addition the status of its group afterwards, or the error that prevented it.

    Raises:
        LostRaceError: Some groups were replaced or deleted before their tasks were locked, or some
            trajectories were changed meanwhile.
    """
    payloads = [part for addition in additions for part in addition.payloads]
    buffer.check_formats(payloads)
    found = {row.id: row for row in groups.scalars(buffer.session, buffer.id, sorted(ids.values()))}
    is_lost = set(ids.values()) - found.keys() - buffer.erased.keys()
    if is_lost or any(row.task_name not in buffer.task_states for row in found.values()):
        raise LostRaceError("another transaction replaced or deleted a group")
    places = _Places(buffer, list(found), additions)
    outcomes: list[GroupStatus | ReplayDBError] = []
    added: list[_Added] = []
    for addition in additions:
        try:
            row = places.take(addition, found.get(ids.get(addition.group_uid, -1)))
        except ReplayDBError as error:
            outcomes.append(error)
            continue
        added.append(_Added(row, addition))
        outcomes.append(GroupStatus.PENDING)
    counted = packs.enter(buffer.session, payloads)
    stored = [part for one in added for part in one.addition.payloads]
    packs.settle(buffer.shares, counted, stored)
    if not added:
        return outcomes

    incoming: dict[str, Size] = {}
    for row, addition in added:
        size = incoming.setdefault(found[row.group_id].task_name, Size())
        if addition.record is not None:
            size.tokens += addition.record.num_tokens
            size.bytes += addition.record.num_bytes
    capacity.evict_surplus(buffer)
    capacity.free_space(buffer, incoming)
    _end_trajectories(buffer.session, added)
    episodes = [(row, addition.record) for row, addition in added if addition.record is not None]
    _insert(buffer.session, found, episodes)
    _summarise(buffer, found, episodes)
    for one in added:
        if one.addition.tags:
            tags.merge(buffer, [one.group_id], one.addition.tags)
    changed = {one.group_id for one in added}
    left = places.left(changed)
    for missing in _insert_missing(buffer, found, episodes):
        left[missing.group_id].append(missing)
    closed = settle(buffer, left, begin=changed)
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
    settle_all(buffer, [row.id for row in rows], is_overdue=True)
    return len(rows) < most


def settle_all(
    buffer: LockedBuffer,
    ids: Collection[int],
    *,
    begin: Collection[int] = (),
    is_overdue: bool = False,
) -> None:
    """As `settle`, for pending groups by id."""
    left: dict[int, list[Any]] = {group_id: [] for group_id in sorted(ids)}
    if left:
        for row in buffer.session.run(trajectories.select_trajectories(sorted(left))):
            left[row.group_id].append(row)
    settle(buffer, left, begin=begin, is_overdue=is_overdue)


class _Places:
    """Open trajectories of pending groups, and the uids of turns that are taken."""

    def __init__(
        self, buffer: LockedBuffer, ids: Sequence[int], additions: Sequence[Addition]
    ) -> None:
        self._buffer = buffer
        self._free: dict[int, dict[int, Any]] = {group_id: {} for group_id in ids}
        self._missing: dict[int, list[Any]] = {group_id: [] for group_id in ids}
        for row in buffer.session.run(trajectories.select_trajectories(ids)):
            if row.missing == trajectories.EPISODE:
                self._free[row.group_id][row.position] = row
            else:
                self._missing[row.group_id].append(row)
        self._taken: set[tuple[int, int]] = set()
        names = {uid for one in additions for uid in one.turn_uids}
        self._uids: dict[tuple[str, str], int] = {}
        if names:
            uids = sorted({one.group_uid for one in additions if one.turn_uids})
            known = trajectories.select_known_turns(buffer.id, uids, sorted(names))
            self._uids = {
                (row.group_uid, row.turn_uid): row.position for row in buffer.session.run(known)
            }

    def left(self, ids: Collection[int]) -> dict[int, list[Any]]:
        """Return the rows of `trajectory` that are left, of groups by id."""
        return {i: [*self._free[i].values(), *self._missing[i]] for i in sorted(ids)}

    def take(self, addition: Addition, group: Any) -> Any:
        """Return the row of the trajectory that an addition to a group ends.

        Raises:
            UnknownGroupError: The group does not exist.
            DuplicateEpisodeError: The position is taken.
            GroupClosedError: The group is not pending, or has no free position.
            InvalidInputError: The position is not below `expected_episodes`, has turns, or is
                unusable, or another turn of the group has the uid of a turn.
            ClaimExpiredError: The claim of the caller has ended.
            TrajectoryClaimedError: Another process has claimed the position.
        """
        if group is None:
            raise UnknownGroupError([addition.group_uid])
        row = self._chosen(addition, group)
        for uid, i in addition.turn_uids.items():
            if (at := self._uids.get((addition.group_uid, uid))) is not None:
                expected = f"a uid that no other turn of the group has; position {at} has it"
                raise InvalidInputError(f"episode.turns[{i}].uid", expected, repr(uid))
        self._uids |= {(addition.group_uid, uid): row.position for uid in addition.turn_uids}
        del self._free[group.id][row.position]
        self._taken.add((group.id, row.position))
        return row

    def _chosen(self, addition: Addition, group: Any) -> Any:
        """Return the row of the position of an addition, or of the first unused one."""
        uid, buffer = addition.group_uid, self._buffer
        mine = self._free[group.id]
        if addition.position is None:
            unused = (row for row in mine.values() if is_unused(row, buffer.now))
            row = next(unused, None) if group.group_status == GroupStatus.PENDING else None
            if row is None:
                raise GroupClosedError(uid, group.group_status)
            return row
        row = mine.get(addition.position)
        if row is None:
            is_taken = (group.id, addition.position) in self._taken
            if group.group_status == GroupStatus.PENDING and is_taken:
                raise DuplicateEpisodeError(uid, addition.position)
            trajectories.explain_missing(buffer.session, buffer.id, uid, addition.position)
        trajectories.check_open(row, uid, group.group_status, addition.claim_uid, buffer.now)
        if row.num_turns != addition.num_turns and addition.record is not None:
            expected = f"the {row.num_turns} turns that were appended at position {row.position}"
            actual = f"an episode of {addition.num_turns} of them"
            raise InvalidInputError("episode", expected, actual)
        return row


def is_unused(row: Any, now: datetime) -> bool:
    """Whether a trajectory, given by its row, is open, has no turns, and is not claimed."""
    is_claimed = row.claim_uid is not None and row.expires_at > now
    return row.unusable_reason is None and not row.num_turns and not is_claimed


def _end_trajectories(session: Session, added: Sequence[_Added]) -> None:
    """Delete or close the rows of trajectories, and delete what the episodes replace.

    Raises:
        LostRaceError: A trajectory was changed meanwhile.
    """
    ended = [row for row, addition in added if addition.record is not None]
    if ended:
        ids = sorted({row.group_id for row in ended})
        done = session.run(trajectories.delete_trajectories(ids, trajectories.versions_of(ended)))
        if done < len(ended):
            raise LostRaceError("another transaction changed a trajectory")
    for row, addition in added:
        if addition.record is None and not session.run(
            trajectories.close_trajectory(row.group_id, row.position, addition.reason)
        ):
            raise LostRaceError("another transaction changed a trajectory")
        if addition.discarded:
            session.postpone(
                trajectories.discard_turns(row.group_id, row.position, addition.discarded)
            )


def _insert(
    session: Session, found: Mapping[int, Any], several: Sequence[tuple[Any, EpisodeRecord]]
) -> None:
    """Insert episodes, each as its own part of the payload, with a part for each heavy column."""
    episodes, payloads, transcripts, turns = [], [], [], []
    with_columns = sorted({row.group_id for row, record in several if len(record.payloads) > 1})
    lowest = dict.fromkeys(with_columns, CONTEXT_PART)
    if with_columns:
        lowest |= {
            row.group_id: min(row.part, CONTEXT_PART)
            for row in session.run(_select_lowest_parts(with_columns))
        }
    for row, record in several:
        key = {"group_id": row.group_id, "position": row.position}
        episodes.append({**key, **record.facts})
        core, *columns = record.payloads
        core.part = row.position
        for column in columns:
            lowest[row.group_id] -= 1
            column.part, column.of_part = lowest[row.group_id], row.position
        payloads += [part.row(row.group_id) for part in record.payloads]
        if record.text is not None:
            transcripts.append({**key, "text": record.text})
        if not row.num_turns:  # else they are there
            turns += [{**key, **one} for one in record.turns]
        else:
            expected = found[row.group_id].expected_episodes
            parts = [part_of(row.position, i, expected) for i in range(row.num_turns)]
            session.postpone(trajectories.delete_turn_parts(row.group_id, parts))
    session.run_many(insert_into(episode), episodes)
    session.run_many(insert_into(payload), payloads)
    session.run_many(insert_into(transcript), transcripts)
    session.run_many(insert_into(turn), turns)


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
    buffer: LockedBuffer,
    found: Mapping[int, Any],
    episodes: Sequence[tuple[Any, EpisodeRecord]],
) -> None:
    """Recompute the scalars of groups to which episodes were added, given with their rows."""
    policy_version = buffer.row.policy_version if buffer.is_comparable else None
    members: dict[int, list[Any]] = {row.group_id: [] for row, _ in episodes}
    if not members:
        return
    for row in buffer.session.run(select_episodes(sorted(members))):
        members[row.group_id].append(row)
    num_bytes = {group_id: found[group_id].num_bytes for group_id in members}
    with_text = {group_id for group_id in members if found[group_id].has_transcript}
    for row, record in episodes:
        num_bytes[row.group_id] += record.num_bytes
        if record.text is not None:
            with_text.add(row.group_id)
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


def _insert_missing(
    buffer: LockedBuffer,
    found: Mapping[int, Any],
    episodes: Sequence[tuple[Any, EpisodeRecord]],
) -> list[_Missing]:
    """Insert which required values new episodes lack."""
    rows = [
        one
        for row, record in episodes
        for one in missing_values.rows_of(
            buffer,
            found[row.group_id].task_name,
            row.group_id,
            [{"position": row.position, **record.facts}],
        )
    ]
    buffer.session.postpone(Write(insert_into(trajectory), rows))
    return [_Missing(row["group_id"], row["missing"]) for row in rows]


def settle(
    buffer: LockedBuffer,
    left: Mapping[int, Sequence[Any]],
    *,
    scalars: Mapping[int, Any] | None = None,
    changes: Mapping[int, Mapping[str, Any]] | None = None,
    begin: Collection[int] = (),
    is_overdue: bool = False,
) -> dict[int, GroupStatus]:
    """Decide what becomes of pending groups without open trajectories.

    They become samplable, expire if they are too stale, fail if they have few episodes, or wait for
    values of their episodes.

    Args:
        buffer: The buffer.
        left: What is missing in each group: its rows of `trajectory`, by its id.
        scalars: Scalars of the groups by id; None: they are read.
        changes: Other values to set, by id of the group.
        begin: Ids of groups that begin to wait if they do.
        is_overdue: Whether their deadline has passed. Those with open trajectories begin to wait,
            if they wait for a time of its own. Others do not wait any more.

    Returns:
        Their statuses by id. Groups with open trajectories are omitted.
    """
    ids = [one for one, rows in left.items() if is_overdue or not any(map(_is_open, rows))]
    into: dict[GroupStatus, list[Change]] = {}
    if scalars is None:
        rows = groups.scalars(buffer.session, buffer.id, sorted(ids)) if ids else ()
        scalars = {row.id: row for row in rows}
    for row in (scalars[one] for one in sorted(ids)):
        status, reason = _decide(buffer, row, left[row.id], is_overdue=is_overdue)
        values = {**(changes or {}).get(row.id, {}), "status_reason": reason}
        if status is GroupStatus.PENDING and (is_overdue or row.id in begin):
            _close_open(buffer.session, left[row.id])
            values |= missing_values.limits(buffer)
        if status is GroupStatus.COMPLETED:
            if buffer.is_too_stale(row.task_name, row.staleness, row.version_span):
                status, values = GroupStatus.EXPIRED, values | {"status_reason": TOO_STALE}
            else:
                values["completed_at"] = buffer.now
        if is_overdue and status is not GroupStatus.PENDING:
            level = logging.WARNING if status is GroupStatus.FAILED else logging.INFO
            buffer.report(level, f"group {row.id} is {status.value}: {values['status_reason']}")
        into.setdefault(status, []).append((row, values))
    are_closed = all(one.unusable_reason is not None for i in ids for one in left[i])
    for status, some in into.items():
        if status is GroupStatus.COMPLETED:
            transitions.reopen(buffer, some, are_closed=are_closed)
        elif status is GroupStatus.PENDING:
            _wait(buffer.session, some)
        else:
            transitions.move(buffer, some, status, are_closed=are_closed)
    return {row.id: status for status, some in into.items() for row, _ in some}


def _wait(session: Session, changes: Sequence[Change]) -> None:
    """Record what pending groups wait for. Those that begin to can get a deadline."""
    rows = [{"group_id": row.id, **values} for row, values in changes]
    for begin in (True, False):
        alike = [one for one in rows if ("deadline" in one) is begin]
        session.postpone(Write(update_each_group(), alike))


def _close_open(session: Session, left: Sequence[Any]) -> None:
    """Close the open trajectories among the rows of a group, because its deadline has passed."""
    for row in filter(_is_open, left):
        end = trajectories.close_trajectory(row.group_id, row.position, "the deadline has passed")
        session.postpone(end)


def _is_open(row: Any) -> bool:
    """Whether a trajectory is open, given by its row; not if the row is of another value."""
    return row.missing == trajectories.EPISODE and row.unusable_reason is None


def _decide(
    buffer: LockedBuffer, row: Any, left: Sequence[Any], *, is_overdue: bool
) -> tuple[GroupStatus, str | None]:
    """Return the status of a group without open trajectories, and the reason of it.

    Args:
        buffer: The buffer.
        row: Scalars of the group.
        left: What is missing in it.
        is_overdue: Whether its deadline has passed.
    """
    expected = row.expected_episodes or row.num_episodes
    needed = expected if row.min_episodes is None else row.min_episodes
    few = None
    if is_overdue and row.num_episodes < expected:
        few = f"{expected - row.num_episodes} of {expected} episodes missing at the deadline"
    if row.num_episodes < needed:
        return GroupStatus.FAILED, few or f"{row.num_episodes} of {expected} episodes are usable"
    lacking = [one for one in left if one.missing != trajectories.EPISODE]
    if not lacking:
        return GroupStatus.COMPLETED, few
    may_wait = not is_overdue or (
        buffer.settings.requires_timeout is not None and any(map(_is_open, left))
    )
    awaited = [one.missing for one in lacking if one.unusable_reason is None]
    if may_wait and awaited:
        text = missing_values.described(awaited, row.num_episodes)
        return GroupStatus.PENDING, f"waits for {text}"
    text = missing_values.described([one.missing for one in lacking], row.num_episodes)
    why = [one.unusable_reason for one in lacking if one.unusable_reason is not None]
    is_failed = buffer.settings.on_missing == "fail"
    status = GroupStatus.FAILED if is_failed else GroupStatus.COMPLETED
    return status, f"no {text}: {why[0] if why else 'the deadline has passed'}"


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
