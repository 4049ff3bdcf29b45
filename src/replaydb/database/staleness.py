"""How far a group is behind the policy, as it is now: the column follows in steps (`aging`)."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, case, literal_column, select

from replaydb.database.schema import buffer, episode_group, group
from replaydb.episodes import GroupStatus

#: Statuses whose groups age as the policy advances; the others keep the staleness they ended with.
LIVE = tuple(
    status.value
    for status in (
        GroupStatus.PENDING,
        GroupStatus.COMPLETED,
        GroupStatus.LEASED,
        GroupStatus.ABORTED,
    )
)
IS_LIVE = group.group_status.in_([literal_column(repr(status)) for status in LIVE])


def staleness_at(policy_version: ColumnElement[int]) -> ColumnElement[int]:
    """Staleness of a group in a buffer of a policy version."""
    return case((IS_LIVE, policy_version - group.comparable_version), else_=group.staleness)


def current_staleness(buffer_id: Any = group.buffer_id) -> ColumnElement[int]:
    """Staleness of a group now, however far the column is behind.

    Args:
        buffer_id: That of the groups, where they are of one buffer: its version is read once then.
    """
    version = select(buffer.c.policy_version).where(buffer.c.id == buffer_id)
    return staleness_at(version.correlate(episode_group).scalar_subquery())
