"""Keeping history within bounds: archived groups, and the record of draws.

Whoever has tasks locked lets the oldest go, some at a time. A call lets more go than it has added,
so that what is kept stays at its bound, or comes down to it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from replaydb.database.column_types import Damaged
from replaydb.database.prepared import execute
from replaydb.database.repository import transitions
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.tasks import TaskAccount
from replaydb.database.statements.history import (
    delete_draws,
    select_archived,
    select_archived_beyond,
    select_draws_beyond,
    select_draws_over,
)
from replaydb.settings import Keep

#: What a call lets go beyond twice what it has added.
GROUPS_IN_PASSING = 16
DRAWS_IN_PASSING = 4
#: Tasks in which a call looks for what is too old.
TASKS = 16


def trim(buffer: LockedBuffer, before: Mapping[str, TaskAccount]) -> None:
    """Let go of some history that is beyond its bounds.

    Args:
        buffer: In which all else is done.
        before: Its accounts as the call found them.
    """
    keep = buffer.settings.keep_archived
    if keep is not None and keep.count is not None:
        _count_archived(buffer, before, keep.count)
    if keep is not None and keep.seconds is not None:
        _age_archived(buffer, before, keep.seconds)
    keep = buffer.settings.keep_draws
    if keep is not None:
        _trim_draws(buffer, before, keep)


def _count_archived(buffer: LockedBuffer, before: Mapping[str, TaskAccount], count: int) -> None:
    """Keep the newest so many of each task into which groups came.

    They are counted with every so many groups that come in: more rows cannot have become archived,
    in the long run.
    """
    period = _period(count)
    for name, account in buffer.accounts.items():
        passed = account.num_inserted // period - before[name].num_inserted // period
        if passed > 0:
            most = GROUPS_IN_PASSING + 2 * passed * period
            rows = execute(buffer.connection, select_archived_beyond(buffer.id, name, count, most))
            transitions.erase(buffer, [row.id for row in rows])


def _age_archived(buffer: LockedBuffer, before: Mapping[str, TaskAccount], seconds: float) -> None:
    """Keep, of some tasks, what was put since then."""
    names = list(buffer.accounts)
    for name in random.sample(names, min(TASKS, len(names))):
        added = buffer.accounts[name].num_inserted - before[name].num_inserted
        most = GROUPS_IN_PASSING + 2 * added
        rows = execute(buffer.connection, select_archived(buffer.id, name, most))
        transitions.erase(buffer, _before(rows, buffer.now - timedelta(seconds=seconds)))


def _trim_draws(buffer: LockedBuffer, before: Mapping[str, TaskAccount], keep: Keep) -> None:
    ids: list[int] = []
    if keep.seconds is not None:
        rows = execute(buffer.connection, select_draws_over(buffer.id, DRAWS_IN_PASSING))
        ids += _before(rows, buffer.now - timedelta(seconds=keep.seconds))
    drew = any(
        account.num_sampled > before[name].num_sampled for name, account in buffer.accounts.items()
    )
    if drew and keep.count is not None:
        period = _period(keep.count)
        if random.randrange(period) == 0:  # noqa: S311 - their ids are those of all buffers
            most = DRAWS_IN_PASSING + 2 * period
            beyond = select_draws_beyond(buffer.id, keep.count, most)
            ids += [row.id for row in execute(buffer.connection, beyond)]
    if ids:
        execute(buffer.connection, delete_draws(sorted(set(ids))))


def _period(count: int) -> int:
    """With how many that come in they are counted, which takes a walk past all that is kept."""
    return min(max(count // 16, 1), 64)


def _before(rows: Sequence[Any], cutoff: datetime) -> list[int]:
    """Ids of what is older; they ascend with age, but for what was put while a clock was wrong."""
    known = (row for row in rows if not isinstance(row.created_at, Damaged))
    return [row.id for row in known if row.created_at < cutoff]
