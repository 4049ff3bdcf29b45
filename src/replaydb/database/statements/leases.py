"""Leases and the groups they hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Delete,
    Insert,
    Select,
    Update,
    delete,
    func,
    insert,
    select,
    update,
)

from replaydb.database.expressions import among
from replaydb.database.schema import group, lease


def insert_lease() -> Insert:
    """One lease, as a dict of its columns."""
    return insert(lease)


def find(lease_id: int) -> Select[Any]:
    """Row of a lease, locked."""
    return select(lease).where(lease.c.id == lease_id).with_for_update()


def live(buffer_id: int, now: datetime) -> Select[Any]:
    """Leases that have not expired, with the number of groups they hold."""
    held = select(func.count()).where(group.lease_id == lease.c.id).scalar_subquery().label("held")
    return (
        select(lease, held)
        .where(lease.c.buffer_id == buffer_id, lease.c.expires_at > now)
        .order_by(lease.c.id)
    )


def extend(lease_id: int, now: datetime, expires_at: datetime) -> Update:
    """Move the end of a lease that has not expired."""
    return (
        update(lease)
        .where(lease.c.id == lease_id, lease.c.expires_at > now)
        .values(expires_at=expires_at)
    )


def held_by(lease_id: int, ids: Sequence[int] | None) -> ColumnElement[bool]:
    """Groups that a lease holds; only some of them if ids are given."""
    condition = group.lease_id == lease_id
    return condition if ids is None else condition & among(group.id, ids)


def end_overdue(buffer_id: int, now: datetime) -> Update:
    """Put an end to expired leases: no heartbeat that is just under way can revive them."""
    return (
        update(lease)
        .where(lease.c.buffer_id == buffer_id, lease.c.expires_at <= now)
        .values(expires_at=lease.c.acquired_at)
    )


def overdue(buffer_id: int, tasks: Collection[str], now: datetime) -> ColumnElement[bool]:
    """Groups of some tasks whose lease has expired."""
    expired = select(lease.c.id).where(lease.c.buffer_id == buffer_id, lease.c.expires_at <= now)
    return group.lease_id.in_(expired) & among(group.task_name, sorted(tasks))


def delete_empty(lease_id: int) -> Delete:
    """A lease, if it holds nothing any more."""
    return delete(lease).where(lease.c.id == lease_id, ~_HOLDS)


def delete_overdue(buffer_id: int, now: datetime) -> Delete:
    """Expired leases that hold nothing any more."""
    return delete(lease).where(lease.c.buffer_id == buffer_id, lease.c.expires_at <= now, ~_HOLDS)


_HOLDS = select(group.id).where(group.lease_id == lease.c.id).exists()


def tasks_of(lease_id: int) -> Select[str]:
    """Tasks of the groups that a lease holds."""
    return select(group.task_name).where(group.lease_id == lease_id).distinct()
