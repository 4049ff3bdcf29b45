"""Stored groups: counts, reads and priorities."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Select, func, select, true

from replaydb.database.filters import compiling
from replaydb.database.repository import buffers, tags, tasks
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.tasks import waiting_times
from replaydb.database.runtime.prepared import Bound, Write, prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.buffer import select_buffer
from replaydb.database.statements.episode_group import (
    SHOWN,
    count_groups,
    select_ids,
    select_known_uids,
    select_scalars_by_id,
    update_each_group,
)
from replaydb.database.statements.payload import select_payloads
from replaydb.database.statements.selections import comparable_runs, selection
from replaydb.database.statements.statistics import select_by_status, select_task_counters
from replaydb.database.tables.expressions import among
from replaydb.database.tables.records import PUTTABLE, Facts, Stored, status
from replaydb.database.tables.schema import episode, episode_group, group, transcript
from replaydb.database.tables.staleness import current_staleness, staleness_of
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import BufferStats, EpisodeInfo, GroupTotals, TaskCounters

#: Columns that are not read with the episodes, from which most of them follow.
_NOT_LOADED = {
    *("min_policy_version", "max_policy_version", "min_episodes", "deadline", "lease_id"),
    *("reward_mean", "reward_std", "reward_min", "reward_max", "run_name"),
}


def stats(session: Session, buffer_id: int, name: str, *, sums: bool) -> BufferStats:
    """Return the statistics of a buffer; totals per task and status only with `sums`."""
    reads = [select_buffer(buffer_id), select_task_counters(buffer_id)]
    if sums:
        reads.append(select_totals(buffer_id))
    found, counters, *of_groups = session.read_together(reads)
    state = buffers.checked(found, name)
    totals = []
    for row in chain.from_iterable(of_groups):
        facts = row._asdict()
        mean = facts.pop("mean_staleness")
        totals.append(
            GroupTotals(
                status=status("group_status", facts.pop("group_status")),
                mean_staleness=None if mean is None else float(mean),
                **facts,
            )
        )
    return BufferStats(
        name,
        state.policy_version,
        state.settings,
        tuple(_counters(row._asdict(), state.policy_version) for row in counters),
        tuple(totals),
        state.limited_inserts,
        state.limited_samples,
    )


def _counters(facts: dict[str, Any], policy_version: int) -> TaskCounters:
    newest, oldest = facts.pop("max_version"), facts.pop("min_version")
    return TaskCounters(
        freshest=staleness_of(newest, policy_version),
        stalest=staleness_of(oldest, policy_version),
        **facts,
    )


def count(session: Session, condition: ColumnElement[bool], most: int | None = None) -> int:
    """Return the number of groups that meet a condition; `most` if there are more."""
    statement = count_groups(condition) if most is None else count_groups_up_to(condition, most)
    [(number,)] = session.run(statement)
    return int(number)


def select_number(
    session: Session,
    row: BufferRow,
    task_names: Collection[str] | None,
    status_names: Collection[str] | None,
    eligible: ColumnElement[bool] | None,
    most: int,
) -> Select[int]:
    """Return the statement that counts up to `most` groups that meet all conditions."""
    ids = tags.look_up(session, row, eligible, max(most, tags.MAX_LOOKUPS_IN_ORDER))
    if ids is None and task_names is None:  # named tasks and statuses are ranges of an index
        task_names = buffers.task_names(session, row.id)
    if ids is None and status_names is None:
        status_names = list(GroupStatus)
    condition = selection(row.id, ids=ids, tasks=task_names, statuses=status_names, where=eligible)
    return count_groups_up_to(condition, most)


def episodes(
    session: Session, buffer_id: int, group_id: int, position: int, limit: int
) -> list[EpisodeInfo]:
    """Return the scalars of up to `limit` episodes of a group, starting at a position."""
    rows = session.run(select_episode_page(buffer_id, group_id, position, limit))
    return [EpisodeInfo(**row._asdict()) for row in rows]


def texts(session: Session, buffer_id: int, group_ids: Sequence[int]) -> dict[int, dict[int, str]]:
    """Return the texts of episodes, by group id and position. Unknown ids are omitted."""
    known = ids(session, selection(buffer_id, ids=group_ids))
    found: dict[int, dict[int, str]] = {}
    for row in sorted(session.run(select_transcripts(known))):
        found.setdefault(row.group_id, {})[row.position] = row.text
    return found


#: Groups that can be copied to another buffer.
COPYABLE = group.group_status.in_(sorted(PUTTABLE - {GroupStatus.ARCHIVED}))


def ids_by_name(
    session: Session, buffer_id: int, names: Sequence[int] | Sequence[str]
) -> dict[int | str, int]:
    """Return the ids of groups named by id or by uid. Unknown uids are omitted."""
    if not names or isinstance(names[0], int):
        return {name: name for name in names if isinstance(name, int)}
    found = session.run(select_known_uids(buffer_id, names))
    known = {row.group_uid: row.id for row in found}
    return {name: known[name] for name in names if name in known}


def ids(session: Session, condition: ColumnElement[bool]) -> Sequence[int]:
    """Return the ids of the groups that meet a condition."""
    return [row.id for row in session.run(select_ids(condition))]


def scalars(session: Session, buffer_id: int, ids: Sequence[int]) -> Sequence[Any]:
    """Return the scalars of groups that scheduling uses. Ids not in the buffer are omitted."""
    return session.run(select_scalars_by_id(buffer_id, ids))


def select_number_in_flight(
    state: BufferRow,
    tasks: frozenset[str] | None,
    runs: frozenset[str] | None,
    max_staleness: int,
) -> Select[int]:
    """Return the statement that counts groups to be trained: pending, leased, or never drawn."""
    putters = of_lineage(state.policy_lineage) if runs is None else compiling.of_runs(sorted(runs))
    unfinished = (GroupStatus.PENDING.value, GroupStatus.LEASED.value)
    undrawn = (group.group_status == GroupStatus.COMPLETED.value) & (group.times_sampled == 0)
    staleness = current_staleness(state.id)
    fresh = staleness.is_(None) | (staleness <= max_staleness)
    mine = selection(state.id, tasks=tasks, where=fresh & putters)
    return count_groups(mine & (group.group_status.in_(unfinished) | undrawn))


def facts(session: Session, buffer_id: int, ids: Sequence[int]) -> Sequence[Facts]:
    """Return the rows of groups, without payloads. Ids not in the buffer are omitted."""
    return [row._asdict() for row in session.run(select_facts(buffer_id, ids))]


def stored(
    session: Session, rows: Sequence[Facts], fields: Collection[str] | None = None
) -> Stored:
    """Return everything stored of groups, given their rows; of extras only those in `fields`."""
    parts = session.read_payloads([row["id"] for row in rows], fields)
    with_text = [row["id"] for row in rows if row["has_transcript"]]
    return Stored(rows, parts, transcripts(session, with_text))


def transcripts(session: Session, ids: Sequence[int]) -> Sequence[Facts]:
    """Return the rows of the texts of groups."""
    if not ids:
        return ()
    return [row._asdict() for row in session.run(select_transcripts(ids))]


def fetch(
    session: Session,
    buffer_id: int,
    ids: Sequence[int],
    fields: Collection[str] | None = None,
) -> Stored:
    """Return everything stored of groups, as `stored`. Ids not in the buffer are omitted."""
    return stored(session, facts(session, buffer_id, ids), fields)


def select_stored(
    buffer_id: int,
    ids: Sequence[int],
    fields: Collection[str] | None,
    *,
    only_rows: bool = False,
) -> list[Bound[Any]]:
    """Return the statements that select everything stored of groups, or only their rows."""
    if only_rows:
        return [select_facts(buffer_id, ids)]
    return [select_facts(buffer_id, ids), select_payloads(ids, fields), select_transcripts(ids)]


def update_priorities(
    buffer: LockedBuffer, rows: Sequence[Any], priorities: Mapping[int, float]
) -> int:
    """Set the priorities of groups of locked tasks, and give them new exponential keys.

    Args:
        buffer: The buffer.
        rows: Scalars of the groups.
        priorities: New priorities, by group id.

    Returns:
        The number of groups.
    """
    by_task: dict[str, list[Any]] = {}
    for row in rows:
        by_task.setdefault(row.task_name, []).append(row)
    changes = []
    for task_name, mine in by_task.items():
        task = buffer.task_states[task_name]
        weights = np.array([buffer.settings.weight(priorities[row.id]) for row in mine])
        for row, weight in zip(mine, weights.tolist(), strict=True):
            if row.group_status == GroupStatus.COMPLETED.value:
                task.add_weight(-row.weight)
                task.add_weight(weight)
        tasks.set_back_if_late(buffer.session, task, "priority")
        variates = task.exponentials(buffer.settings, len(mine))
        keys = task.priority_clock + waiting_times(variates, weights)
        for row, weight, key in zip(mine, weights.tolist(), keys.tolist(), strict=True):
            changes.append(
                {
                    "group_id": row.id,
                    "priority": priorities[row.id],
                    "weight": weight,
                    "priority_key": key,
                }
            )
    buffer.session.postpone(Write(update_each_group(), changes))
    return len(changes)


def count_groups_up_to(condition: ColumnElement[bool], most: int) -> Select[int]:
    """Count up to `most` groups that meet a condition."""
    some = select(group.id).where(condition).limit(most).subquery()
    return select(func.count()).select_from(some)


@prepared
def select_facts(buffer_id: Any, ids: Any) -> Select[Any]:
    """Select the rows of groups, without payloads, by id."""
    loaded = (column for column in SHOWN if column.key not in _NOT_LOADED)
    return select(*loaded).where(selection(buffer_id, ids=ids))


@prepared
def select_transcripts(ids: Any) -> Select[Any]:
    """Select the texts of the episodes of groups."""
    return select(transcript).where(among(transcript.c.group_id, ids))


@prepared
def select_episode_page(buffer_id: Any, group_id: Any, position: Any, most: Any) -> Select[Any]:
    """Select the scalars of up to `most` episodes of a group, starting at a position."""
    shown = (column for column in episode.c if column is not episode.c.metadata)
    return (
        select(*shown)
        .join_from(episode, episode_group, group.id == episode.c.group_id)
        .where(
            episode.c.group_id == group_id,
            episode.c.position >= position,
            group.buffer_id == buffer_id,
        )
        .order_by(episode.c.position)
        .limit(most)
    )


def of_lineage(lineage: str | None) -> ColumnElement[bool]:
    """Return the condition for groups whose versions are comparable with those of a lineage.

    None: all groups.
    """
    if lineage is None:
        return true()
    return group.run_id.is_(None) | group.run_id.in_(comparable_runs(lineage))


@prepared
def select_totals(buffer_id: Any) -> Select[Any]:
    """Select counts, sizes, staleness and rewards per task and status."""
    staleness = current_staleness(buffer_id)
    return select_by_status(
        buffer_id,
        func.min(staleness).label("min_staleness"),
        func.avg(staleness).label("mean_staleness"),
        func.max(staleness).label("max_staleness"),
        func.avg(group.reward_mean).label("reward_mean"),
    )
