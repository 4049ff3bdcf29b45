"""Counts that explain why a draw found too few groups, read without locks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, func, literal, select

from replaydb.database.repository import groups
from replaydb.database.repository.draw_request import DrawRequest, Quota
from replaydb.database.runtime.session import Session
from replaydb.database.statements.selections import selection
from replaydb.database.tables.expressions import bytewise
from replaydb.database.tables.schema import episode_group, group, lease
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import NotEnoughGroupsError

#: Limit of each count, so that an error does not take longer than a draw.
_MOST = NotEnoughGroupsError.COUNTED_TO


def explain(
    session: Session, buffer_id: int, request: DrawRequest, error: NotEnoughGroupsError
) -> None:
    """Add to an error the counts of groups by status, by lease owner, and by unmet condition."""
    short = error._quota
    quota = short if isinstance(short, Quota) else request.quotas[0]
    by_status: dict[str, int] = {}
    for status in GroupStatus:
        condition = selection(buffer_id, tasks=quota.tasks, statuses=[status])
        if number := groups.count(session, condition, _MOST):
            by_status[status.value] = number
    leased_by: dict[str, int] = {}
    if GroupStatus.LEASED.value in by_status:
        owners = count_leased_by_owner(buffer_id, quota.tasks, _MOST)
        leased_by = {row.owner: row.num_groups for row in session.run(owners)}
    passed: dict[str, int] = {}
    if quota.conditions:
        counts = count_passed(buffer_id, quota.tasks, request.statuses, quota.conditions, _MOST)
        (row,) = session.run(counts)
        passed = row._asdict()
    error.explain(by_status, leased_by, **passed)


def count_leased_by_owner(buffer_id: int, tasks: Collection[str] | None, most: int) -> Select[Any]:
    """Count leased groups by the owner of the lease."""
    some = _some(buffer_id, tasks, [GroupStatus.LEASED], most)
    return (
        select(lease.c.owner, func.count().label("num_groups"))
        .join_from(lease, episode_group, group.lease_id == lease.c.id)
        .where(group.id.in_(some))
        .group_by(lease.c.owner)
        .order_by(func.count().desc(), bytewise(lease.c.owner))
    )


def count_passed(
    buffer_id: int,
    tasks: Collection[str] | None,
    statuses: Sequence[GroupStatus],
    conditions: Mapping[str, ColumnElement[bool]],
    most: int,
) -> Select[Any]:
    """Count groups by the first condition that they do not meet."""
    some = _some(buffer_id, tasks, statuses, most)
    columns: list[Any] = []
    met: list[ColumnElement[bool]] = []
    for name, condition in conditions.items():
        meets = func.coalesce(condition, literal(False))
        counts = case((and_(*met, ~meets), 1), else_=0)
        columns.append(func.coalesce(func.sum(counts), 0).label(name))
        met.append(meets)
    statement = select(*columns)
    return statement.select_from(episode_group).where(group.id.in_(some))


def _some(
    buffer_id: int,
    tasks: Collection[str] | None,
    statuses: Sequence[GroupStatus],
    most: int,
) -> Select[int]:
    which = selection(buffer_id, tasks=tasks, statuses=statuses)
    return select(group.id).where(which).limit(most).correlate(None)
