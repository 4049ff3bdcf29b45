"""Incremental expiry and staleness updates after the policy version advances.

An advance changes the buffer's version, from which the staleness of every group is computed, and
marks every task (`is_expiring`, `aged_to`). The rows are then updated in steps, each a short
transaction, by the process that advanced the version and by other calls that lock the tasks. The
marks record where the next step resumes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import chain, islice
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Select,
    Update,
    and_,
    false,
    func,
    literal_column,
    select,
    union_all,
)

from replaydb.database.repository import tasks, transitions
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.tasks import TaskState
from replaydb.database.runtime.prepared import Bound, prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.episode_group import SCALARS, update_staleness
from replaydb.database.statements.selections import TOO_STALE
from replaydb.database.tables.expressions import comes_after
from replaydb.database.tables.schema import IDLE, IS_IDLE, episode_group, group, task
from replaydb.database.tables.staleness import IS_LIVE, LIVE, staleness_of
from replaydb.domain import checks

#: Cost of the queries for one task, in groups.
COST_PER_TASK = 16
#: Groups that a call made for another purpose updates.
GROUPS_PER_CALL = 256
#: Tasks locked together by a step: many tasks may have few groups each.
TASKS = 16
#: Target time for which a step holds its locks.
STEP_SECONDS = 0.02
#: Groups per step: initial, minimum and maximum.
STEP_GROUPS = (500, 100, 20_000)


class StillExpiringError(Exception):
    """Raised by work on a task that may still have groups that are too stale.

    Those groups are expired in transactions of their own, then the work is retried.
    """


def check_expired(buffer: LockedBuffer) -> None:
    """Check that every group of the locked tasks that is too stale has expired.

    Raises:
        StillExpiringError: Some may not have expired yet, so they must not be drawn or counted.
    """
    if any(task.is_expiring for task in buffer.task_states.values()):
        raise StillExpiringError


def progress(task_states: Collection[TaskState]) -> tuple[int, bool]:
    """Return how many groups of these tasks have ever expired, and whether any task is behind."""
    num_outdated = sum(task.num_outdated for task in task_states)
    return num_outdated, any(task.is_behind for task in task_states)


def mark(buffer: LockedBuffer, names: Collection[str]) -> None:
    """Mark tasks as behind the policy version."""
    for name in names:
        task = buffer.task_states[name]
        task.is_expiring = task.max_staleness is not None
        task.aged_to = 0


def outdated(session: Session, row: BufferRow) -> dict[str, str]:
    """Return tasks whose groups disagree with the policy version or a limit, and how, by name.

    The transaction must be a snapshot. Tasks that are marked as behind are correct.
    """
    by_newest = row.settings.expire_by == "newest_token"
    rows = session.run(count_outdated(row.id, row.policy_version, by_newest))
    found = {
        one.task_name: f"{one.number} groups have an outdated staleness or should have expired"
        for one in rows
    }
    for name, state in tasks.read(session, row.id).items():
        limit = row.settings.max_staleness_of(name)
        if state.max_staleness != limit:
            found[name] = f"max_staleness is {state.max_staleness}, expected {limit}"
    return found


def repair(buffer: LockedBuffer, task_name: str) -> None:
    """Let further steps correct a task that `outdated` returned."""
    buffer.task_states[task_name].max_staleness = buffer.settings.max_staleness_of(task_name)
    mark(buffer, [task_name])


def step(buffer: LockedBuffer, most: int) -> None:
    """Expire groups of the locked tasks, and update their staleness, up to about `most` groups."""
    behind = [task for task in buffer.task_states.values() if task.is_behind]
    behind = behind[: math.ceil(most / (COST_PER_TASK + 1))]
    if not behind:
        return
    share = max(most // len(behind) - COST_PER_TASK, 1)
    reads = [_too_stale(buffer, task, share) for task in behind]
    ends = [
        [] if task.aged_to is None
        else [select_end_of_step(buffer.id, task.task_name, task.aged_to, share - 1)]
        for task in behind
    ]  # fmt: skip
    found = iter(buffer.session.read_together([*chain(*reads), *chain(*ends)]))
    for one, mine in zip(behind, reads, strict=True):
        _expire(buffer, one, list(islice(found, len(mine))), share)
    for one, mine in zip(behind, ends, strict=True):
        for [(end,)] in islice(found, len(mine)):
            if not one.is_expiring:
                _age(buffer, one, end)


def next_size(size: int, seconds: float) -> int:
    """Return the number of groups of the next step, given the size and duration of the last."""
    _, least, most = STEP_GROUPS
    wanted = size * STEP_SECONDS / max(seconds, STEP_SECONDS / 2)  # no more than doubled
    return min(max(int(wanted), least), most)


def has_to_expire(row: BufferRow, task: TaskState) -> ColumnElement[bool]:
    """Condition for the groups of a task that are too stale and have not expired yet."""
    if task.max_staleness is None:
        return false()
    oldest_fresh = row.policy_version - task.max_staleness
    condition = too_stale(row.id, task.task_name, oldest_fresh)
    if row.settings.expire_by == "newest_token":
        condition &= group.max_policy_version < oldest_fresh
    return func.coalesce(condition, false())


def expire(buffer: LockedBuffer, task: TaskState, most: int) -> None:
    """Expire up to `most` groups of each status of a task that are too stale."""
    _expire(buffer, task, buffer.session.read_together(_too_stale(buffer, task, most)), most)


def _too_stale(buffer: LockedBuffer, task: TaskState, most: int) -> list[Bound[Any]]:
    """Return the statements that select up to `most` groups of each status that are too stale."""
    if not task.is_expiring or task.max_staleness is None:
        return []
    by_newest = buffer.settings.expire_by == "newest_token"
    select = select_all_too_stale if by_newest else select_too_stale
    oldest_fresh = buffer.row.policy_version - task.max_staleness
    return [select(buffer.id, task.task_name, status.value, oldest_fresh, most) for status in IDLE]


def _expire(
    buffer: LockedBuffer, task: TaskState, found: Sequence[Sequence[Any]], most: int
) -> None:
    rows = [row for of_status in found for row in of_status]
    transitions.expire(buffer, rows, TOO_STALE)
    task.num_outdated += len(rows)
    task.is_expiring = any(len(of_status) == most for of_status in found)


def _age(buffer: LockedBuffer, task: TaskState, end: int | None) -> None:
    """Update the staleness of the groups of a task up to an id; None: of all that remain."""
    after, task.aged_to = task.aged_to, end
    last = checks.INT64[1] if end is None else end
    aged = age_groups(buffer.id, task.task_name, after, last, buffer.row.policy_version)
    buffer.session.postpone(aged)


@prepared
def select_too_stale(
    buffer_id: Any, task_name: Any, status: Any, oldest_fresh: Any, most: Any
) -> Select[Any]:
    """Select the scalars of up to `most` idle groups of a task whose oldest version is too old."""
    condition = too_stale(buffer_id, task_name, oldest_fresh) & (group.group_status == status)
    in_order = group.comparable_version, group.id
    return select(*SCALARS).where(condition).order_by(*in_order).limit(most)


@prepared
def select_all_too_stale(
    buffer_id: Any, task_name: Any, status: Any, oldest_fresh: Any, most: Any
) -> Select[Any]:
    """As `select_too_stale`, but only groups whose newest version is too old as well."""
    some = select_too_stale.build(buffer_id, task_name, status, oldest_fresh, most)
    return some.where(group.max_policy_version < oldest_fresh)


@prepared
def select_end_of_step(buffer_id: Any, task_name: Any, after: Any, skip: Any) -> Select[int]:
    """Select an id up to which a task has `skip + 1` live groups of some status, after another id.

    NULL if it has fewer of every status.
    """
    ends = []
    for status in LIVE:
        value: ColumnElement[str] = literal_column(repr(status))
        ends.append(
            select(group.id)
            .where(
                group.buffer_id == buffer_id,
                group.task_name == task_name,
                comes_after(group.group_status, value, group.id, after),
            )
            .order_by(group.group_status, group.id)
            .limit(1)
            .offset(skip)
            .subquery()
        )
    found = union_all(*(select(end.c.id) for end in ends)).subquery()
    return select(func.min(found.c.id))


@prepared
def age_groups(of_buffer: Any, of_task: Any, after: Any, last: Any, policy_version: Any) -> Update:
    """Update the staleness of live groups of a task, in a range of ids."""
    return update_staleness(policy_version).where(
        group.buffer_id == of_buffer,
        group.task_name == of_task,
        group.id > after,
        group.id <= last,
    )


def count_outdated(buffer_id: int, policy_version: int, by_newest: bool) -> Select[Any]:
    """Count the groups of each task whose stored staleness is wrong, or that should have expired.

    Groups that a step is still to update are not counted. Tasks without such groups are omitted.
    """
    staleness = staleness_of(group.comparable_version, policy_version)
    is_wrong = IS_LIVE & group.staleness.is_distinct_from(staleness) & task.c.aged_to.is_(None)
    newest = group.max_policy_version if by_newest else group.comparable_version
    # An unknown version is NULL, and its group does not expire.
    is_late = IS_IDLE & ~task.c.is_expiring & (staleness > task.c.max_staleness)
    is_late &= staleness_of(newest, policy_version) > task.c.max_staleness
    mine = (task.c.buffer_id == group.buffer_id) & (task.c.task_name == group.task_name)
    return (
        select(group.task_name, func.count().label("number"))
        .join_from(episode_group, task, mine)
        .where(group.buffer_id == buffer_id, is_wrong | is_late)
        .group_by(group.task_name)
    )


def too_stale(buffer_id: Any, task_name: Any, oldest_fresh: Any) -> ColumnElement[bool]:
    """Return the condition for idle groups of a task whose oldest version is below a bound."""
    return and_(
        group.buffer_id == buffer_id,
        group.task_name == task_name,
        IS_IDLE,
        group.comparable_version < oldest_fresh,
    )
