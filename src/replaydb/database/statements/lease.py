"""Leases and the groups they hold."""

from __future__ import annotations

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

from replaydb.database.expressions import among
from replaydb.database.prepared import prepared
from replaydb.database.schema import IS_LEASED, draw, draw_group, episode_group, group, lease
from replaydb.database.statements.episode_group import SCALARS
from replaydb.episodes import GroupStatus


@cache
def insert_lease() -> Insert:
    """One lease, as a dict of its columns; returns its id."""
    return insert(lease).returning(lease.c.id)


def select_leases(
    buffer_id: int, now: datetime, lease_id: int | None = None, *, expired: bool = False
) -> Select[Any]:
    """Leases that have not expired, or one of them: a row for each group, as its draw took it.

    A lease that holds nothing is one row, without a group. With `expired` also those that have, as
    long as they hold something.
    """
    live = lease.c.expires_at > now
    drawn = draw_group.c
    statement = (
        select(
            lease,
            group.id.label("group_id"),
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
    """Move the end of a lease that has not expired."""
    mine = _of_buffer(of_buffer, lease_id)
    return update(lease).where(mine, lease.c.expires_at > now).values(expires_at=end)


@prepared
def select_held(buffer_id: Any, lease_id: Any) -> Select[Any]:
    """End of a lease, locked, with the scalars of every group it holds, in the order of ids.

    A lease that holds nothing is one row, without a group.
    """
    return _held(buffer_id, lease_id)


@prepared
def select_held_among(buffer_id: Any, lease_id: Any, ids: Any) -> Select[Any]:
    """End of a lease, locked, with the scalars of some groups it holds, in the order of ids."""
    return _held(buffer_id, lease_id, among(group.id, ids))


def _held(buffer_id: Any, lease_id: Any, some: ColumnElement[bool] | None = None) -> Select[Any]:
    mine = (group.lease_id == lease_id) & (true() if some is None else some)
    return (
        select(lease.c.expires_at, *SCALARS)
        .outerjoin_from(lease, episode_group, mine)
        .where(_of_buffer(buffer_id, lease_id))
        .order_by(group.id)
        .with_for_update(of=lease)
    )


def _of_buffer(buffer_id: Any, lease_id: Any) -> ColumnElement[bool]:
    return and_(lease.c.id == lease_id, lease.c.buffer_id == buffer_id)


@prepared
def end_overdue_leases(of_buffer: Any, now: Any) -> Update:
    """Put an end to expired leases: no heartbeat that is just under way can revive them."""
    return (
        update(lease)
        .where(lease.c.buffer_id == of_buffer, lease.c.expires_at <= now)
        .values(expires_at=lease.c.acquired_at)
    )


@prepared
def select_any_overdue(of_buffer: Any, now: Any) -> Select[bool]:
    """Whether a lease that holds groups, or the deadline of a pending one, has run out."""
    expired = select(lease.c.id).where(lease.c.buffer_id == of_buffer, lease.c.expires_at <= now)
    held = select(group.id).where(group.lease_id.is_not(None), group.lease_id.in_(expired))
    awaited = select(group.id).where(
        group.buffer_id == of_buffer,
        group.deadline <= now,
        group.group_status == GroupStatus.PENDING.value,
    )
    return select(held.exists() | awaited.exists())


def select_holders(condition: ColumnElement[bool]) -> Select[Any]:
    """Who holds some groups, and how many."""
    return (
        select(lease.c.id, lease.c.owner, func.count().label("held"))
        .join_from(lease, episode_group, group.lease_id == lease.c.id)
        .where(condition)
        .group_by(lease.c.id, lease.c.owner)
        .order_by(lease.c.id)
    )


def select_leases_of(condition: ColumnElement[bool]) -> Select[Any]:
    """Leases by which some of these groups were drawn; who claimed one that arrives is no part."""
    leased = group.group_status == GroupStatus.LEASED.value
    return select(group.lease_id).where(condition, leased).distinct()


@prepared
def delete_lease_if_empty(lease_id: Any) -> Delete:
    """A lease, if it holds nothing any more."""
    return delete(lease).where(lease.c.id == lease_id, ~_HOLDS)


def delete_overdue_leases(buffer_id: int, now: datetime) -> Delete:
    """Expired leases that hold nothing any more."""
    return delete(lease).where(lease.c.buffer_id == buffer_id, lease.c.expires_at <= now, ~_HOLDS)


_HOLDS = select(group.id).where(group.lease_id == lease.c.id).exists()
