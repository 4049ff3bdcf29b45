"""Statements on packs: objects outside the database that hold parts of payloads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Delete,
    Insert,
    Select,
    Update,
    bindparam,
    case,
    cast,
    delete,
    exists,
    false,
    func,
    insert,
    null,
    select,
    true,
    update,
)

from replaydb.database.tables.column_types import UtcDateTime
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import is_mostly_dead, pack, payload, payload_place

#: Whether payloads may refer to a pack: its removal has not begun.
_STAYS = pack.c.removing == false()
#: A pack is marked for deletion exactly while it has no live parts: see `_mark`.
_IS_UNMARKED = (pack.c.live_parts == 0) & pack.c.condemned_at.is_(None)
_IS_MISMARKED = _IS_UNMARKED | ((pack.c.live_parts != 0) & pack.c.condemned_at.is_not(None))


def select_payload_store() -> Select[Any]:
    """Select the row of the payload store."""
    return select(payload_place)


@cache
def insert_payload_store() -> Insert:
    """Insert the row of the payload store, as a dict of columns."""
    return insert(payload_place)


def update_payload_store(**values: Any) -> Update:
    """Update columns of the row of the payload store."""
    return update(payload_place).values(**values)


def select_any_payload() -> Select[Any]:
    """Select one payload, if any exists."""
    return select(payload.c.group_id).limit(1)


@cache
def insert_pack() -> Insert:
    """Insert a pack, as a dict of its columns; returns its id, or no row if its name is taken."""
    columns = [column for column in pack.c if column is not pack.c.id]
    values = select(*(bindparam(column.name, type_=column.type) for column in columns))
    name = bindparam("name", type_=pack.c.name.type)
    new = values.where(~exists().where(pack.c.name == name))
    return insert(pack).from_select(columns, new).returning(pack.c.id)


@cache
def change_packs() -> Update:
    """Add `parts` and `bytes`, which may be negative, to the counters of a pack at time `now`."""
    left = pack.c.live_parts + bindparam("parts", type_=BigInteger())
    now = bindparam("now", type_=UtcDateTime())
    return (
        update(pack)
        .where(pack.c.id == bindparam("of_pack", type_=BigInteger()), _STAYS)
        .values(
            live_parts=left,
            live_bytes=pack.c.live_bytes + bindparam("bytes", type_=BigInteger()),
            condemned_at=_mark(left, now),
        )
    )


def select_staying(ids: Sequence[int]) -> Select[Any]:
    """Select which of these packs are not being removed."""
    return select(pack.c.id).where(among(pack.c.id, ids), _STAYS)


def select_removable(cutoff: datetime, forgotten: datetime, limit: int) -> Select[Any]:
    """Select packs that were marked for deletion by `cutoff`, the oldest mark first.

    Rows of removed orphans are selected only if they were marked by `forgotten`.
    """
    is_due = (pack.c.num_bytes > 0) | (pack.c.condemned_at <= forgotten)
    return (
        select(pack.c.id)
        .where(pack.c.condemned_at <= cutoff, is_due)
        .order_by(pack.c.condemned_at)
        .limit(limit)
    )


def select_removable_total(cutoff: datetime) -> Select[Any]:
    """Count the packs that were marked for deletion by `cutoff`, and their bytes."""
    return _totals().where(pack.c.condemned_at <= cutoff, pack.c.num_bytes > 0)


def begin_pack_removal(ids: Sequence[int], cutoff: datetime) -> Update:
    """Begin the removal of the packs that were marked by `cutoff` and have no references.

    A removal cannot be undone, so the references are checked too: a counter may be damaged.
    """
    is_marked = (pack.c.live_parts == 0, pack.c.condemned_at <= cutoff, _STAYS)
    referred_to = exists().where(payload.c.pack_id == pack.c.id)
    return (
        update(pack).where(among(pack.c.id, ids), *is_marked, ~referred_to).values(removing=true())
    )


def select_removing(ids: Sequence[int]) -> Select[Any]:
    """Select which of these packs are being removed."""
    return select(pack.c.id, pack.c.name).where(among(pack.c.id, ids), pack.c.removing == true())


def delete_packs(ids: Sequence[int]) -> Delete:
    """Delete the rows of packs that were removed."""
    return delete(pack).where(among(pack.c.id, ids), pack.c.removing == true())


def select_known_packs(names: Sequence[str]) -> Select[Any]:
    """Select which of these packs exist, except orphans that were claimed for removal."""
    return select(pack.c.name).where(among(pack.c.name, names), pack.c.num_bytes > 0)


def select_used_packs() -> Select[Any]:
    """Select the names of all packs with live parts."""
    return select(pack.c.name).where(pack.c.live_parts > 0)


def select_removed_orphans(names: Sequence[str]) -> Select[Any]:
    """Select which of these packs were claimed for removal as orphans."""
    return select(pack.c.id, pack.c.name).where(among(pack.c.name, names), pack.c.num_bytes == 0)


def select_mostly_dead(limit: int) -> Select[Any]:
    """Select packs of which at most half of the bytes are live, the fewest live bytes first."""
    return (
        select(pack)
        .where(is_mostly_dead, _STAYS)
        .order_by(pack.c.live_bytes, pack.c.id)
        .limit(limit)
    )


def select_members(pack_id: int) -> Select[Any]:
    """Select the live parts of a pack, by offset."""
    return (
        select(
            payload.c.group_id,
            payload.c.part,
            payload.c.checksum,
            payload.c.pack_offset,
            payload.c.pack_length,
        )
        .where(payload.c.pack_id == pack_id)
        .order_by(payload.c.pack_offset)
    )


@cache
def move_member() -> Update:
    """Move the part in `old_pack` at `old_offset` to `new_pack` at `new_offset`."""
    return (
        update(payload)
        .where(
            payload.c.pack_id == bindparam("old_pack", type_=BigInteger()),
            payload.c.pack_offset == bindparam("old_offset", type_=BigInteger()),
        )
        .values(
            pack_id=bindparam("new_pack", type_=BigInteger()),
            pack_offset=bindparam("new_offset", type_=BigInteger()),
        )
    )


def select_share(pack_id: int) -> Select[Any]:
    """Count the live parts of a pack, and their bytes."""
    size = func.coalesce(func.sum(payload.c.pack_length), 0)
    return select(func.count().label("parts"), size.label("bytes")).where(
        payload.c.pack_id == pack_id
    )


def select_unmarked_total() -> Select[Any]:
    """Count the packs without live parts that are not marked for deletion, and their bytes."""
    return _totals().where(_IS_UNMARKED)


def mark_unused(now: datetime) -> Update:
    """Mark the packs without live parts that are not marked for deletion."""
    return update(pack).where(_IS_UNMARKED).values(condemned_at=now)


def lock_miscounted() -> Select[Any]:
    """Select and lock packs whose counters or mark do not match the rows that refer to them."""
    return select_miscounted().with_for_update(of=pack)


def select_miscounted() -> Select[Any]:
    """Select packs whose counters or mark do not match the rows that refer to them, and counts."""
    parts, size = _referring()
    stored = (pack.c.id, pack.c.name, pack.c.live_parts, pack.c.live_bytes)
    found = select(*stored, parts.label("parts"), size.label("bytes"))
    return found.where(_STAYS, _is_wrong(parts, size)).order_by(pack.c.id)


def recount_packs(now: datetime) -> Update:
    """Correct the counters and marks of packs to the rows that refer to them."""
    parts, size = _referring()
    return (
        update(pack)
        .where(_STAYS, _is_wrong(parts, size))
        .values(live_parts=parts, live_bytes=size, condemned_at=_mark(parts, now))
    )


def _is_wrong(parts: ColumnElement[int], size: ColumnElement[int]) -> ColumnElement[bool]:
    return (pack.c.live_parts != parts) | (pack.c.live_bytes != size) | _IS_MISMARKED


def _mark(live_parts: ColumnElement[int], now: Any) -> ColumnElement[Any]:
    """Return the deletion mark of a pack with this number of live parts. An earlier mark stays."""
    return case((live_parts == 0, func.coalesce(pack.c.condemned_at, now)), else_=null())


def _totals() -> Select[Any]:
    size = cast(func.coalesce(func.sum(pack.c.num_bytes), 0), BigInteger)
    totals: tuple[Any, ...] = (func.count().label("packs"), size.label("bytes"))
    return select(*totals)


def _referring() -> tuple[ColumnElement[int], ColumnElement[int]]:
    mine = payload.c.pack_id == pack.c.id
    size = cast(func.coalesce(func.sum(payload.c.pack_length), 0), BigInteger)
    return (
        select(func.count()).select_from(payload).where(mine).scalar_subquery(),
        select(size).where(mine).scalar_subquery(),
    )
