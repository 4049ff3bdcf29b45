"""Recomputation of task counters from the stored groups, and of columns of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sqlalchemy import Select, case, func, select

from replaydb.database.repository import buffers, groups, tasks
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.incremental_groups import facts_of
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.locking import lock_buffer_and_tasks
from replaydb.database.repository.tasks import TaskState
from replaydb.database.runtime.prepared import prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.episode_group import update_each_group
from replaydb.database.statements.payload import select_episodes
from replaydb.database.tables.expressions import among, number_of, total_or_zero
from replaydb.database.tables.schema import group
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import InvalidInputError

#: Columns of a task that can be computed from its groups.
COUNTED = (
    "num_available",
    "total_weight",
    "num_pending",
    "num_leased",
    "stored_groups",
    "stored_tokens",
    "stored_bytes",
)

_NOTHING: Mapping[str, Any] = dict.fromkeys(COUNTED, 0) | {"total_weight": 0.0}

#: Columns of a group that follow from its episodes, besides those of `select_miscounted_groups`.
_OF_EPISODES = (
    *("reward_mean", "reward_std", "reward_min", "reward_max"),
    *("min_policy_version", "max_policy_version"),
)

#: Wrong columns of a row, by name: the stored value and the right one.
Wrong = dict[str, tuple[Any, Any]]


def wrong_counters(session: Session, buffer_id: int) -> dict[str, Wrong]:
    """Return the wrong counters of each task. The transaction must be a snapshot."""
    task_states = tasks.read(session, buffer_id)
    return {name: wrong for name, (_, wrong) in _wrong(session, buffer_id, task_states).items()}


def repair_counters(session: Session, buffer_id: int, buffer_name: str) -> int:
    """Correct the counters of tasks, with the buffer and its tasks locked.

    Returns:
        The number of tasks that had wrong counters.
    """
    found = session.lock(lock_buffer_and_tasks(buffer_id, False, False))
    task_states = tasks.states_of(found)
    buffers.checked(found, buffer_name)
    wrong = _wrong(session, buffer_id, task_states)
    tasks.save(session, [task for task, _ in wrong.values()])
    return len(wrong)


def wrong_columns(
    session: Session, rows: Mapping[int, BufferRow], ids: Sequence[int]
) -> dict[Any, Wrong]:
    """Return wrong columns of groups that follow from the episodes or the priority, by row.

    Args:
        session: In any transaction.
        rows: Rows of the buffers by id. Groups of other buffers are omitted.
        ids: Ids of groups.
    """
    members: dict[int, list[Any]] = {}
    for episode in session.run(select_episodes(ids)):
        members.setdefault(episode.group_id, []).append(episode)
    found = {}
    for one in session.run(select_derived(ids)):
        if one.id in members and one.buffer_id in rows:
            facts = facts_of(members[one.id], None)
            right = {name: facts[name] for name in _OF_EPISODES}
            if one.comparable_version is not None:
                right["comparable_version"] = facts["min_policy_version"]
            with suppress(InvalidInputError):  # the priority is wrong
                right["weight"] = rows[one.buffer_id].settings.weight(one.priority)
            pairs = {name: (getattr(one, name), value) for name, value in right.items()}
            if wrong := {name: pair for name, pair in pairs.items() if not _agree(*pair)}:
                found[one] = wrong
    return found


def repair_columns(buffer: LockedBuffer, ids: Sequence[int]) -> set[str]:
    """Correct columns that `wrong_columns` returned. Return the tasks whose staleness is wrong."""
    names, priorities = set(), {}
    for one, wrong in wrong_columns(buffer.session, {buffer.id: buffer.row}, ids).items():
        values = {name: right for name, (_, right) in wrong.items()}
        if "comparable_version" in values:
            names.add(one.task_name)
        if values.pop("weight", None) is not None:
            priorities[one.id] = one.priority
        if values:
            buffer.session.run_many(update_each_group(), [{"group_id": one.id, **values}])
    rows = groups.scalars(buffer.session, buffer.id, sorted(priorities))
    groups.update_priorities(buffer, rows, priorities)
    return names


def _wrong(
    session: Session, buffer_id: int, task_states: Mapping[str, TaskState]
) -> dict[str, tuple[TaskState, Wrong]]:
    """Return the tasks with wrong counters: their corrected states, and the differences."""
    counted = {row.task_name: row._asdict() for row in session.run(recount_tasks(buffer_id))}
    found = {}
    for name, task in task_states.items():
        right = {each: counted.get(name, _NOTHING)[each] for each in COUNTED}
        pairs = {each: (getattr(task, each), right[each]) for each in COUNTED}
        if wrong := {each: pair for each, pair in pairs.items() if not _agree(*pair)}:
            found[name] = (replace(task, **right, weight_error=_error_of(right)), wrong)
    return found


def _error_of(counted: Mapping[str, Any]) -> float:
    """Return a bound of the rounding error of a sum of weights."""
    return float(counted["num_available"] * math.ulp(counted["total_weight"]))


def _agree(stored: Any, found: Any) -> bool:
    """Compare values. Sums of weights may differ by the rounding of earlier additions."""
    if None in (stored, found):
        return stored is found
    return math.isclose(stored, found, rel_tol=1e-9, abs_tol=1e-9)


def recount_tasks(buffer_id: int) -> Select[Any]:
    """Compute the counters of the tasks of a buffer, except tasks without groups."""
    status = group.group_status
    is_stored = status != GroupStatus.ARCHIVED.value
    weight = case((status == GroupStatus.COMPLETED.value, group.weight), else_=0.0)
    return (
        select(
            group.task_name,
            number_of(status == GroupStatus.COMPLETED.value).label("num_available"),
            func.sum(weight).label("total_weight"),
            number_of(status == GroupStatus.PENDING.value).label("num_pending"),
            number_of(status == GroupStatus.LEASED.value).label("num_leased"),
            number_of(is_stored).label("stored_groups"),
            total_or_zero(case((is_stored, group.num_tokens), else_=0)).label("stored_tokens"),
            total_or_zero(case((is_stored, group.num_bytes), else_=0)).label("stored_bytes"),
        )
        .where(group.buffer_id == buffer_id)
        .group_by(group.task_name)
    )


@prepared
def select_derived(ids: Any) -> Select[Any]:
    """Select the columns of groups that follow from others, by id."""
    columns = (
        group.id,
        group.buffer_id,
        group.task_name,
        group.priority,
        group.weight,
        group.comparable_version,
        *(group[name] for name in _OF_EPISODES),
    )
    return select(*columns).where(among(group.id, ids))
