"""Packs: objects outside the database that hold parts of payloads."""

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

from replaydb.database.column_types import UtcDateTime
from replaydb.database.expressions import among
from replaydb.database.prepared import prepared
from replaydb.database.schema import pack, payload, payload_place

#: Whether a pack may be given more to hold.
_STAYS = pack.c.removing == false()
#: A pack is marked for deletion exactly while it has no live parts: see `_mark`.
_IS_UNMARKED = (pack.c.live_parts == 0) & pack.c.condemned_at.is_(None)
_IS_MISMARKED = _IS_UNMARKED | ((pack.c.live_parts != 0) & pack.c.condemned_at.is_not(None))


def select_place() -> Select[Any]:
    """Where packs are."""
    return select(payload_place)


@cache
def insert_place() -> Insert:
    """Where packs are, as a dict of columns."""
    return insert(payload_place)


def update_place(**values: Any) -> Update:
    """Change what is known of where packs are."""
    return update(payload_place).values(**values)


def select_any_payload() -> Select[Any]:
    """A payload, if there is one."""
    return select(payload.c.group_id).limit(1)


@cache
def insert_pack() -> Insert:
    """One pack, as a dict of its columns; returns its id, or no row where its name is taken."""
    columns = [column for column in pack.c if column is not pack.c.id]
    values = select(*(bindparam(column.name, type_=column.type) for column in columns))
    name = bindparam("name", type_=pack.c.name.type)
    new = values.where(~exists().where(pack.c.name == name))
    return insert(pack).from_select(columns, new).returning(pack.c.id)


@cache
def change_packs() -> Update:
    """Count what came to packs, and what went: `parts` and `bytes`, at the time `now`."""
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


@prepared
def select_pack_names(ids: Any) -> Select[Any]:
    """Names of packs."""
    return select(pack.c.id, pack.c.name).where(among(pack.c.id, ids))


def select_staying(ids: Sequence[int]) -> Select[Any]:
    """Those packs that nobody removes."""
    return select(pack.c.id).where(among(pack.c.id, ids), _STAYS)


def select_condemned(cutoff: datetime, forgotten: datetime, limit: int) -> Select[Any]:
    """Packs to which nothing has referred since a time, the first to go first.

    Of the orphans that were removed, those that were removed by `forgotten`.
    """
    is_due = (pack.c.num_bytes > 0) | (pack.c.condemned_at <= forgotten)
    return (
        select(pack.c.id)
        .where(pack.c.condemned_at <= cutoff, is_due)
        .order_by(pack.c.condemned_at)
        .limit(limit)
    )


def select_condemned_total(cutoff: datetime) -> Select[Any]:
    """How many packs nothing has referred to since a time, and how large they are."""
    return _totals().where(pack.c.condemned_at <= cutoff, pack.c.num_bytes > 0)


def doom_packs(ids: Sequence[int], cutoff: datetime) -> Update:
    """Let nothing be put into packs any more, of those to which nothing refers yet.

    What is removed cannot be brought back, so a count that was damaged is not relied on.
    """
    condemned = (pack.c.live_parts == 0, pack.c.condemned_at <= cutoff, _STAYS)
    referred_to = exists().where(payload.c.pack_id == pack.c.id)
    return (
        update(pack).where(among(pack.c.id, ids), *condemned, ~referred_to).values(removing=true())
    )


def select_doomed(ids: Sequence[int]) -> Select[Any]:
    """Which of these packs are being removed."""
    return select(pack.c.id, pack.c.name).where(among(pack.c.id, ids), pack.c.removing == true())


def delete_packs(ids: Sequence[int]) -> Delete:
    """Forget packs that were removed."""
    return delete(pack).where(among(pack.c.id, ids), pack.c.removing == true())


def select_known_packs(names: Sequence[str]) -> Select[Any]:
    """Which of these packs there are, but for orphans that were taken for removal."""
    return select(pack.c.name).where(among(pack.c.name, names), pack.c.num_bytes > 0)


def select_removed_orphans(names: Sequence[str]) -> Select[Any]:
    """Those of these packs that were taken for removal as orphans."""
    return select(pack.c.id, pack.c.name).where(among(pack.c.name, names), pack.c.num_bytes == 0)


def select_mostly_dead(share: float, limit: int) -> Select[Any]:
    """Packs of which at most this share of the bytes is still of use, the largest loss first."""
    return (
        select(pack)
        .where(pack.c.live_parts > 0, pack.c.live_bytes <= share * pack.c.num_bytes, _STAYS)
        .order_by((pack.c.live_bytes - pack.c.num_bytes), pack.c.id)
        .limit(limit)
    )


def select_members(pack_id: int) -> Select[Any]:
    """What is in a pack and still of use, in its order."""
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
    """Let what was in `old_pack` at `old_offset` be read from `new_pack` at `new_offset`."""
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
    """How much in a pack is still of use."""
    size = func.coalesce(func.sum(payload.c.pack_length), 0)
    return select(func.count().label("parts"), size.label("bytes")).where(
        payload.c.pack_id == pack_id
    )


def select_unmarked_total() -> Select[Any]:
    """Number and bytes of the packs without live parts that are not marked for deletion."""
    return _totals().where(_IS_UNMARKED)


def mark_unused(now: datetime) -> Update:
    """Mark the packs without live parts that are not marked for deletion."""
    return update(pack).where(_IS_UNMARKED).values(condemned_at=now)


def lock_miscounted() -> Select[Any]:
    """Packs whose counters or mark do not match the rows that refer to them, locked."""
    return select_miscounted().with_for_update(of=pack)


def select_miscounted() -> Select[Any]:
    """Packs whose counters or mark do not match the rows that refer to them, with those counts."""
    parts, size = _referring()
    said = (pack.c.id, pack.c.name, pack.c.live_parts, pack.c.live_bytes)
    found = select(*said, parts.label("parts"), size.label("bytes"))
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
    """The deletion mark of a pack that has this number of live parts. An earlier mark stays."""
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
