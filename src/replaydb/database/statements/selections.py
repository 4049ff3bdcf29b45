"""Conditions that select groups, for use in statements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Select, exists, select

from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import IDLE, group, run, trajectory


class Selection(NamedTuple):
    """The groups of a buffer that meet every condition given.

    `by_id`: their ids or a range of ids are known, and no index of buffers is to be read instead.
    """

    buffer_id: int
    ids: Sequence[int] | None = None
    uids: Sequence[str] | None = None
    tasks: Collection[str] | None = None
    statuses: Collection[str] | None = None
    where: ColumnElement[bool] | None = None
    by_id: bool = False

    @property
    def condition(self) -> ColumnElement[bool]:
        """All conditions as one."""
        return selection(**self._asdict())


def selection(
    buffer_id: int,
    *,
    ids: Sequence[int] | None = None,
    uids: Sequence[str] | None = None,
    tasks: Collection[str] | None = None,
    statuses: Collection[str] | None = None,
    where: ColumnElement[bool] | None = None,
    by_id: bool = False,
) -> ColumnElement[bool]:
    """Return the condition for groups of a buffer that meet every condition given."""
    condition = group.buffer_id == buffer_id
    if ids is not None or by_id:
        # Without statistics, SQLite would prefer an index of buffers to the primary key.
        condition = group.buffer_id + 0 == buffer_id
    if ids is not None:
        condition &= among(group.id, ids)
    if uids is not None:
        condition &= among(group.group_uid, uids)
    if tasks is not None:
        condition &= of_tasks(tasks)
    if statuses is not None:
        condition &= among(group.group_status, sorted(statuses))
    return condition if where is None else condition & where


#: Groups that are not leased, and of which no trajectory is claimed.
IS_FREE = group.lease_id.is_(None) & ~exists().where(
    trajectory.c.group_id == group.id, trajectory.c.claim_uid.is_not(None)
)


def of_tasks(names: Collection[str]) -> ColumnElement[bool]:
    """Return the condition for groups of tasks."""
    return among(group.task_name, sorted(names))


def comparable_runs(lineage: str) -> Select[int]:
    """Select the ids of runs whose versions are comparable with those of a lineage."""
    return select(run.c.id).where((run.c.lineage == lineage) | run.c.lineage.is_(None))


#: Statuses from which a group expires. Pending and leased groups do not: they are in use.
EXPIRING = tuple(status.value for status in IDLE)
TOO_STALE = "staler than max_staleness"
