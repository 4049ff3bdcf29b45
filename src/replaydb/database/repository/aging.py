"""Groups follow the policy, some at a time: what is too stale expires, staleness is brought up.

An advance moves the buffer's version, from which the staleness of every group follows, and marks
every task: `is_expiring`, `aged_to`. The rest is steps, each a short transaction of its own, made
by whoever advances, and by everybody who comes by. The marks say where to go on.
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
from replaydb.database.repository.tasks import TaskAccount
from replaydb.database.schema import IDLE, group
from replaydb.database.statements.episode_group import (
    age_groups,
    select_all_too_stale,
    select_end_of_step,
    select_too_stale,
)
from replaydb.database.statements.selections import TOO_STALE, too_stale

#: What it takes to look for groups of a task, in groups.
LOOK = 16
#: Groups that a call takes along that comes by, for another purpose.
IN_PASSING = 256
#: Tasks that are locked together: many may have few groups each.
TASKS = 16
#: How long a step should hold its locks; it is of so many groups: at first, at least, at most.
STEP_SECONDS = 0.02
STEP_GROUPS = (500, 100, 20_000)


class StillExpiringError(Exception):
    """Raised by work that needs a task of which groups are left that are too stale.

    They expire, in steps of their own, and then the work is done again.
    """


def check_expired(buffer: LockedBuffer) -> None:
    """Let nobody draw from, or count, groups that are too stale.

    Raises:
        StillExpiringError: There may be some.
    """
    if any(account.is_expiring for account in buffer.accounts.values()):
        raise StillExpiringError


def progress(accounts: Collection[TaskAccount]) -> tuple[int, bool]:
    """How many groups of some tasks have ever expired, and whether any have still to follow."""
    num_outdated = sum(account.num_outdated for account in accounts)
    return num_outdated, any(account.is_behind for account in accounts)


def mark(buffer: LockedBuffer) -> None:
    """The policy has moved: the groups of every task are behind it."""
    for account in buffer.accounts.values():
        account.is_expiring = account.max_staleness is not None
        account.aged_to = 0


def step(buffer: LockedBuffer, most: int) -> None:
    """Let some groups of the locked tasks follow the policy: so many, or all that are left."""
    behind = [account for account in buffer.accounts.values() if account.is_behind]
    for account in behind:
        if account.is_expiring and most > 0:
            most -= LOOK + expire(buffer, account, most)
    for account in behind:
        if not account.is_expiring and account.aged_to is not None and most > 0:
            most -= LOOK + _age(buffer, account, account.aged_to, most)


def next_size(size: int, seconds: float) -> int:
    """Of how many groups the next step is, after one that took so long."""
    _, least, most = STEP_GROUPS
    wanted = size * STEP_SECONDS / max(seconds, STEP_SECONDS / 2)  # no more than doubled
    return min(max(int(wanted), least), most)


def has_to_expire(row: BufferRow, account: TaskAccount) -> ColumnElement[bool]:
    """The groups of a task that are too stale, and have not expired yet."""
    if account.max_staleness is None:
        return false()
    oldest_fresh = row.policy_version - account.max_staleness
    condition = too_stale(row.id, account.task_name, oldest_fresh)
    if row.settings.expire_by == "newest_token":
        condition &= group.max_policy_version < oldest_fresh
    return func.coalesce(condition, false())


def expire(buffer: LockedBuffer, account: TaskAccount, most: int) -> int:
    """Expire groups of a task that are too stale, up to so many. Returns how many."""
    limit = account.max_staleness
    rows: list[Any] = []
    if limit is not None:
        by_newest = buffer.settings.expire_by == "newest_token"
        select = select_all_too_stale if by_newest else select_too_stale
        oldest_fresh = buffer.row.policy_version - limit
        for status in IDLE:
            found = select(
                buffer.id, account.task_name, status.value, oldest_fresh, most - len(rows)
            )
            rows.extend(execute(buffer.connection, found))
    transitions.expire(buffer, rows, TOO_STALE)
    account.num_outdated += len(rows)
    account.is_expiring = len(rows) == most
    return len(rows)


def _age(buffer: LockedBuffer, account: TaskAccount, after: int, most: int) -> int:
    """Bring staleness up after an id, of each status up to so many. Returns how many at least."""
    version = buffer.row.policy_version
    end = select_end_of_step(buffer.id, account.task_name, after, most - 1)
    [(account.aged_to,)] = execute(buffer.connection, end)
    last = checks.INT64[1] if account.aged_to is None else account.aged_to
    aged = age_groups(buffer.id, account.task_name, after, last, version)
    changed = execute(buffer.connection, aged)
    return changed if account.aged_to is None else most
