"""The current staleness of groups. The column `staleness` may lag behind it: see `aging`."""

from __future__ import annotations

from typing import Any, overload

from sqlalchemy import ColumnElement, case, literal_column, select

from replaydb.database.tables.schema import buffer, episode_group, group
from replaydb.domain.episodes import GroupStatus

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


@overload
def staleness_of(version: int | None, policy_version: int) -> int | None: ...


@overload
def staleness_of(version: ColumnElement[int], policy_version: Any) -> ColumnElement[int]: ...


def staleness_of(version: Any, policy_version: Any) -> Any:
    """Return by how much a policy version is behind that of its buffer; None if it is unknown."""
    return None if version is None else policy_version - version


def staleness_at(
    policy_version: Any, version: ColumnElement[int] = group.comparable_version
) -> ColumnElement[int]:
    """Return the staleness of a group in a buffer at this policy version."""
    return case((IS_LIVE, staleness_of(version, policy_version)), else_=group.staleness)


def staleness_if_drawn(buffer_id: Any = group.buffer_id) -> ColumnElement[int]:
    """Return the staleness that a group of any status has now if it is drawn.

    Args:
        buffer_id: As for `current_staleness`.
    """
    return staleness_of(group.comparable_version, _version_of(buffer_id))


def current_staleness(buffer_id: Any = group.buffer_id) -> ColumnElement[int]:
    """Return the staleness of a group now, even if its column lags behind.

    Args:
        buffer_id: Id of the buffer, if all groups are of one: its policy version is then read once.
    """
    return staleness_at(_version_of(buffer_id))


def _version_of(buffer_id: Any) -> ColumnElement[int]:
    version = select(buffer.c.policy_version).where(buffer.c.id == buffer_id)
    return version.correlate(episode_group).scalar_subquery()
