"""Statements on leases and their groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, select

from replaydb.database.runtime.prepared import Bound, prepared
from replaydb.database.statements.episode_group import SCALARS
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import episode_group, group, lease
from replaydb.domain.results import has_expired


def select_expired(buffer_id: Any, now: Any) -> Select[int]:
    """Select the ids of the leases of a buffer that have expired."""
    return select(lease.c.id).where(lease.c.buffer_id == buffer_id, has_expired(lease.c, now))


def select_leased(
    buffer_id: int, lease_id: int, ids: Sequence[int] | None = None
) -> Bound[Select[Any]]:
    """Select a lease (its end, its losses) and the scalars of its groups, by id. Locks the lease.

    A lease without groups is one row without a group. Only groups with these ids are selected,
    unless `ids` is None.
    """
    if ids is None:
        return _select_all_leased(buffer_id, lease_id)
    return _select_leased_among(buffer_id, lease_id, ids)


@prepared
def _select_all_leased(buffer_id: Any, lease_id: Any) -> Select[Any]:
    return _leased(buffer_id, lease_id)


@prepared
def _select_leased_among(buffer_id: Any, lease_id: Any, ids: Any) -> Select[Any]:
    return _leased(buffer_id, lease_id, among(group.id, ids))


def _leased(buffer_id: Any, lease_id: Any, *some: ColumnElement[bool]) -> Select[Any]:
    mine = and_(group.lease_id == lease_id, *some)
    return (
        select(lease.c.expires_at, lease.c.lost_ids, *SCALARS)
        .outerjoin_from(lease, episode_group, mine)
        .where(lease.c.id == lease_id, lease.c.buffer_id == buffer_id)
        .order_by(group.id)
        .with_for_update(of=lease)
    )
