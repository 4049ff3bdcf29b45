"""Statements on leases and their groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Delete,
    Insert,
    Select,
    Update,
    and_,
    delete,
    func,
    insert,
    select,
    true,
    update,
)

from replaydb.database.runtime.prepared import Bound, prepared
from replaydb.database.statements.episode_group import SCALARS
from replaydb.database.statements.selections import overdue, past_deadline
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import IS_LEASED, draw, draw_group, episode_group, group, lease
from replaydb.domain.episodes import GroupStatus


@cache
def insert_lease() -> Insert:
    """Insert a lease, given as a dict of its columns. Returns its id."""
    return insert(lease).returning(lease.c.id)


@cache
def insert_known_lease() -> Insert:
    """Insert a lease, given as a dict of its columns with its id."""
    return insert(lease)


def select_leases(
    buffer_id: int, now: datetime, lease_id: int | None = None, *, expired: bool = False
) -> Select[Any]:
    """Select leases that have not expired, or one of them: a row per group, in order of the draw.

    A lease without groups is one row without a group. With `expired`, expired leases that still
    have groups are included.
    """
    live = lease.c.expires_at > now
    drawn = draw_group.c
    statement = (
        select(
            lease,
            group.id.label("group_id"),
            group.num_tokens,
            drawn.draw_id,
            drawn.probability,
            drawn.weight,
            draw.c.step,
        )
        .outerjoin_from(lease, episode_group, group.lease_id == lease.c.id)
        .outerjoin(draw_group, (drawn.group_id == group.id) & IS_LEASED)
        .outerjoin(draw, draw.c.id == drawn.draw_id)
        .where(lease.c.buffer_id == buffer_id, live | group.id.is_not(None) if expired else live)
        .order_by(lease.c.id, drawn.position, group.id)
    )
    return statement if lease_id is None else statement.where(lease.c.id == lease_id)


@prepared
def extend_lease(of_buffer: Any, lease_id: Any, now: Any, end: Any) -> Update:
    """Extend a lease that has not expired."""
    mine = _of_buffer(of_buffer, lease_id)
    return update(lease).where(mine, lease.c.expires_at > now).values(expires_at=end)


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


def _leased(buffer_id: Any, lease_id: Any, some: ColumnElement[bool] | None = None) -> Select[Any]:
    mine = (group.lease_id == lease_id) & (true() if some is None else some)
    return (
        select(lease.c.expires_at, lease.c.lost_ids, *SCALARS)
        .outerjoin_from(lease, episode_group, mine)
        .where(_of_buffer(buffer_id, lease_id))
        .order_by(group.id)
        .with_for_update(of=lease)
    )


def _of_buffer(buffer_id: Any, lease_id: Any) -> ColumnElement[bool]:
    return and_(lease.c.id == lease_id, lease.c.buffer_id == buffer_id)


@prepared
def end_overdue_leases(of_buffer: Any, now: Any) -> Update:
    """End expired leases, so that a concurrent heartbeat cannot extend them."""
    return (
        update(lease)
        .where(lease.c.buffer_id == of_buffer, lease.c.expires_at <= now)
        .values(expires_at=lease.c.acquired_at)
    )


@prepared
def select_any_overdue(of_buffer: Any, now: Any) -> Select[bool]:
    """Select whether a lease with groups has expired, or the deadline of a pending group passed."""
    expired = select(lease.c.id).where(lease.c.buffer_id == of_buffer, lease.c.expires_at <= now)
    leased = select(group.id).where(group.lease_id.is_not(None), group.lease_id.in_(expired))
    overdue = select(group.id).where(
        group.buffer_id == of_buffer,
        group.deadline <= now,
        group.group_status == GroupStatus.PENDING.value,
    )
    return select(leased.exists() | overdue.exists())


def select_overdue(buffer_id: int, tasks: Collection[str], now: datetime, most: int) -> Select[Any]:
    """Select the scalars of up to `most` groups of tasks whose lease has expired."""
    # Not in order of ids alone, for which a planner may read the groups in that order.
    in_order = group.lease_id, group.id
    return select(*SCALARS).where(overdue(buffer_id, tasks, now)).order_by(*in_order).limit(most)


def select_past_deadline(
    buffer_id: int, tasks: Collection[str], now: datetime, most: int
) -> Select[Any]:
    """Select the scalars of up to `most` pending groups of tasks whose deadline has passed."""
    late = past_deadline(buffer_id, tasks, now)
    return select(*SCALARS).where(late).order_by(group.deadline, group.id).limit(most)


def select_lease_owners(condition: ColumnElement[bool]) -> Select[Any]:
    """Select the leases of groups that meet a condition, with owner and number of groups."""
    return (
        select(lease.c.id, lease.c.owner, func.count().label("num_groups"))
        .join_from(lease, episode_group, group.lease_id == lease.c.id)
        .where(condition)
        .group_by(lease.c.id, lease.c.owner)
        .order_by(lease.c.id)
    )


def select_losses(condition: ColumnElement[bool], statuses: Collection[GroupStatus]) -> Select[Any]:
    """Select leased or claimed groups, with their leases, which are locked in order."""
    return (
        select(lease.c.id, lease.c.lost_ids, group.id.label("group_id"))
        .join_from(lease, episode_group, group.lease_id == lease.c.id)
        .where(condition, group.group_status.in_([status.value for status in statuses]))
        .order_by(lease.c.id, group.id)
        .with_for_update(of=lease)
    )


@prepared
def set_lost(lease_id: Any, lost_ids: Any) -> Update:
    """Record which groups a lease has lost."""
    return update(lease).where(lease.c.id == lease_id).values({lease.c.lost_ids: lost_ids})


@prepared
def delete_lease(lease_id: Any) -> Delete:
    """Delete a lease that has no groups."""
    return delete(lease).where(lease.c.id == lease_id)


@prepared
def delete_lease_if_empty(lease_id: Any) -> Delete:
    """Delete a lease if it has no groups."""
    return delete(lease).where(lease.c.id == lease_id, ~_HAS_GROUPS)


def delete_overdue_leases(buffer_id: int, now: datetime) -> Delete:
    """Delete expired leases without groups."""
    return delete(lease).where(
        lease.c.buffer_id == buffer_id, lease.c.expires_at <= now, ~_HAS_GROUPS
    )


_HAS_GROUPS = select(group.id).where(group.lease_id == lease.c.id).exists()
