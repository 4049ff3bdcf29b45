"""Incremental expiry and staleness updates after the policy version advances.

An advance changes the buffer's version, from which the staleness of every group is computed, and
marks every task (`is_expiring`, `aged_to`). The rows are then updated in steps, each a short
transaction, by the process that advanced the version and by other calls that lock the tasks. The
marks record where the next step resumes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, false, func

from replaydb import checks
from replaydb.database.prepared import execute
from replaydb.database.repository import transitions
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.tasks import TaskState
from replaydb.database.schema import IDLE, group
from replaydb.database.statements.episode_group import (
    age_groups,
    select_all_too_stale,
    select_end_of_step,
    select_too_stale,
)
from replaydb.database.statements.selections import TOO_STALE, too_stale

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


def mark(buffer: LockedBuffer) -> None:
    """Mark every task as behind the policy version."""
    for task in buffer.task_states.values():
        task.is_expiring = task.max_staleness is not None
        task.aged_to = 0


def step(buffer: LockedBuffer, most: int) -> None:
    """Expire groups of the locked tasks, and update their staleness, up to about `most` groups."""
    behind = [task for task in buffer.task_states.values() if task.is_behind]
    for task in behind:
        if task.is_expiring and most > 0:
            most -= COST_PER_TASK + expire(buffer, task, most)
    for task in behind:
        if not task.is_expiring and task.aged_to is not None and most > 0:
            most -= COST_PER_TASK + _age(buffer, task, task.aged_to, most)


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


def expire(buffer: LockedBuffer, task: TaskState, most: int) -> int:
    """Expire up to `most` groups of a task that are too stale. Return the number."""
    limit = task.max_staleness
    rows: list[Any] = []
    if limit is not None:
        by_newest = buffer.settings.expire_by == "newest_token"
        select = select_all_too_stale if by_newest else select_too_stale
        oldest_fresh = buffer.row.policy_version - limit
        for status in IDLE:
            found = select(buffer.id, task.task_name, status.value, oldest_fresh, most - len(rows))
            rows.extend(execute(buffer.connection, found))
    transitions.expire(buffer, rows, TOO_STALE)
    task.num_outdated += len(rows)
    task.is_expiring = len(rows) == most
    return len(rows)


def _age(buffer: LockedBuffer, task: TaskState, after: int, most: int) -> int:
    """Update the staleness of groups after an id, up to `most` of each status.

    Returns:
        A lower bound of the number of groups.
    """
    version = buffer.row.policy_version
    end = select_end_of_step(buffer.id, task.task_name, after, most - 1)
    [(task.aged_to,)] = execute(buffer.connection, end)
    last = checks.INT64[1] if task.aged_to is None else task.aged_to
    aged = age_groups(buffer.id, task.task_name, after, last, version)
    changed = execute(buffer.connection, aged)
    return changed if task.aged_to is None else most
