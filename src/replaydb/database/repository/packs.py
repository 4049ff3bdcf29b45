"""Rows of packs, with the number of live parts and bytes of each.

A part is live while a row of `payload` refers to it. A pack is marked for deletion exactly while it
has no live parts: every statement here that writes the number of live parts also writes the mark. A
marked pack is removed after the grace period, so that draws that have read its rows can still read
the pack. Until its removal begins, a transaction may refer to its parts again, which clears the
mark.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Insert,
    Select,
    Update,
    bindparam,
    case,
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
from sqlalchemy.sql.dml import ReturningDelete

from replaydb.database.repository.payload_location import GRACE_SECONDS, payload_store
from replaydb.database.runtime.prepared import Bound
from replaydb.database.runtime.session import Session
from replaydb.database.tables.column_types import UtcDateTime
from replaydb.database.tables.expressions import among, total_or_zero
from replaydb.database.tables.records import PayloadRecord
from replaydb.database.tables.schema import is_mostly_dead, pack, payload

#: A pack without a row that was written longer ago than this may be treated as an orphan.
FRESH_SECONDS = 3600.0
#: How long the row of a removed orphan is kept: longer than a put may still commit the pack.
REMEMBERED_SECONDS = 2 * FRESH_SECONDS

#: Whether payloads may refer to a pack: its removal has not begun.
_STAYS = pack.c.removing == false()
#: A pack is marked for deletion exactly while it has no live parts: see `_mark`.
_IS_UNMARKED = (pack.c.live_parts == 0) & pack.c.condemned_at.is_(None)
_IS_MISMARKED = _IS_UNMARKED | ((pack.c.live_parts != 0) & pack.c.condemned_at.is_not(None))


class PackGoneError(Exception):
    """Packs can no longer be used: their payloads must be written again.

    Attributes:
        ids: Ids of those that have a committed row. Those without one can never be used.
    """

    def __init__(self, ids: Collection[int]) -> None:
        super().__init__(ids)
        self.ids = ids


@dataclass(slots=True)
class Share:
    """Live parts and bytes of a pack, or a change of them, which may be negative."""

    parts: int = 0
    bytes: int = 0

    def add(self, num_bytes: int, sign: int = 1) -> None:
        """Add a part of this size, or subtract it if `sign` is -1."""
        self.parts += sign
        self.bytes += sign * num_bytes


#: Changes of packs, by pack id.
Shares = dict[int, Share]


def used(session: Session) -> list[str]:
    """Return the names of all packs with live parts."""
    return [row.name for row in session.run(select(pack.c.name).where(pack.c.live_parts > 0))]


def enter(session: Session, payloads: Iterable[PayloadRecord]) -> Shares:
    """Insert rows for packs that have none, and count all their payloads as live.

    Returns:
        The parts and bytes that were counted, by pack id.

    Raises:
        PackGoneError: A pack may have been removed as an orphan.
    """
    counted: Shares = {}
    members = [one for one in payloads if one.pack is not None and not one.pack.is_committed]
    for new in {one.pack: None for one in members}:
        assert new is not None  # noqa: S101
        if time.monotonic() - new.written_at > FRESH_SECONDS:
            raise PackGoneError([])
        share = Share()
        for one in members:
            if one.pack is new:
                share.add(len(one.data))
        new.id = _insert(session, new.name, new.num_bytes, datetime.now(UTC), share)
        if new.id is None:
            raise PackGoneError([])
        counted[new.id] = share
    return counted


def settle(shares: Shares, counted: Shares, payloads: Iterable[PayloadRecord]) -> None:
    """Change `shares` so that the payloads that were stored count, and not all that were entered.

    Args:
        shares: Changes that `save` will write.
        counted: The result of `enter`.
        payloads: The payloads that were stored.
    """
    for pack_id, share in counted.items():
        mine = shares.setdefault(pack_id, Share())
        mine.parts -= share.parts
        mine.bytes -= share.bytes
    for one in payloads:
        if one.pack is not None:
            assert one.pack.id is not None  # noqa: S101
            shares.setdefault(one.pack.id, Share()).add(len(one.data))


def record_unused(session: Session, payloads: Iterable[PayloadRecord]) -> None:
    """Insert rows for packs that have none, marked for deletion.

    Raises:
        PackGoneError: A pack may have been removed as an orphan.
    """
    shares: Shares = {}
    settle(shares, enter(session, payloads), ())
    save(session, shares, datetime.now(UTC))


def release(session: Session, ids: Sequence[int], shares: Shares) -> None:
    """Delete the payloads of groups, and subtract them from the live parts of packs."""
    rows: Any = session.run(release_payloads(ids))
    for row in rows:
        if row.pack_id is not None:
            shares.setdefault(row.pack_id, Share()).add(row.pack_length, -1)


def save(session: Session, shares: Shares, now: datetime) -> None:
    """Write the changes of packs, in the order of their ids to prevent deadlocks.

    Raises:
        PackGoneError: Packs that get more live parts are being removed.
    """
    changes = {pack_id: one for pack_id, one in sorted(shares.items()) if one != Share()}
    if not changes:
        return
    rows = [
        {"of_pack": pack_id, "parts": one.parts, "bytes": one.bytes, "now": now}
        for pack_id, one in changes.items()
    ]
    session.run_many(change_packs(), rows)
    taken = [pack_id for pack_id, one in changes.items() if one.parts > 0]
    if taken:
        staying = {row.id for row in session.run(select_staying(taken))}
        if gone := [pack_id for pack_id in taken if pack_id not in staying]:
            raise PackGoneError(gone)


def recount(session: Session, now: datetime) -> int:
    """Correct the counters and marks of packs to the rows that refer to them.

    Returns:
        The number of packs that were wrong.
    """
    # A transaction that adds or removes parts updates the counters last. So once the packs are
    # locked, parts that are not counted yet are not visible either.
    session.run(select_miscounted().with_for_update(of=pack))
    parts, size = _referring()
    wrong = update(pack).where(_STAYS, _is_wrong(parts, size))
    right = {"live_parts": parts, "live_bytes": size, "condemned_at": _mark(parts, now)}
    return session.run(wrong.values(right))


def miscounted(session: Session) -> Sequence[Any]:
    """Return packs whose `live_parts` and `live_bytes` differ from the actual `parts` and `bytes`.

    Includes packs with live parts that are marked for deletion, and unmarked packs without any.
    """
    return session.run(select_miscounted())


def unmarked_total(session: Session) -> Any:
    """Return the number of unmarked `packs` without live parts, and their `bytes`.

    Earlier versions left such packs. Nothing removes them until they are marked.
    """
    [total] = session.run(_totals("packs", pack.c.num_bytes).where(_IS_UNMARKED))
    return total


def mark_unmarked(session: Session, now: datetime) -> None:
    """Mark the packs of `unmarked_total` for deletion. Their grace period begins now."""
    session.run(update(pack).where(_IS_UNMARKED).values(condemned_at=now))


def removable(session: Session, now: datetime, limit: int) -> Sequence[int]:
    """Return ids of marked packs whose grace period is over, up to a limit. Takes no locks."""
    cutoff, forgotten = _cutoff(session, now), now - timedelta(seconds=REMEMBERED_SECONDS)
    return [row.id for row in session.run(select_removable(cutoff, forgotten, limit))]


def removable_total(session: Session, now: datetime) -> Any:
    """Return the number of marked `packs` whose grace period is over, and their `bytes`."""
    marked = _totals("packs", pack.c.num_bytes).where(pack.c.condemned_at <= _cutoff(session, now))
    [total] = session.run(marked.where(pack.c.num_bytes > 0))
    return total


def begin_removal(session: Session, ids: Sequence[int], now: datetime) -> dict[int, str]:
    """Let no transaction use these packs any more, if their grace period is over.

    Returns:
        Names of the objects to remove now, by pack id.
    """
    session.run(begin_pack_removal(ids, _cutoff(session, now)))
    removing = select(pack.c.id, pack.c.name).where(
        among(pack.c.id, ids), pack.c.removing == true()
    )
    return {row.id: row.name for row in session.run(removing)}


def delete_rows(session: Session, ids: Collection[int]) -> None:
    """Delete the rows of packs whose objects were removed."""
    session.run(delete(pack).where(among(pack.c.id, sorted(ids)), pack.c.removing == true()))


def known(session: Session, pack_names: Sequence[str]) -> set[str]:
    """Return which of these packs have a row, except orphans that were claimed for removal."""
    found = select(pack.c.name).where(among(pack.c.name, pack_names), pack.c.num_bytes > 0)
    return {row.name for row in session.run(found)}


def claim_orphans(session: Session, names: Collection[str], now: datetime) -> dict[int, str]:
    """Insert rows of orphans as packs that are being removed, so that no transaction can use them.

    These rows have no bytes. They stay for `REMEMBERED_SECONDS`. So a transaction that is about to
    commit such a pack finds the row after the object was removed, and writes its payloads again.

    Args:
        session: A write transaction. If another one inserts a name first, it is run again.
        names: Names of the objects.
        now: The current time.

    Returns:
        Names of the objects to remove now, by the ids of their rows.
    """
    for name in sorted(names):
        _insert(session, name, 0, now, Share(), removing=True)
    claimed = among(pack.c.name, sorted(names)) & (pack.c.num_bytes == 0)
    rows = session.run(select(pack.c.id, pack.c.name).where(claimed))
    return {row.id: row.name for row in rows}


def mostly_dead(session: Session, limit: int) -> Sequence[Any]:
    """Return packs of which at most half of the bytes are live, up to a limit."""
    return session.run(select_mostly_dead(limit))


def members(session: Session, pack_id: int) -> Sequence[Any]:
    """Return the rows of the live parts of a pack, by offset."""
    rows = select(*(column for column in payload.c if column is not payload.c.data))
    return session.run(rows.where(payload.c.pack_id == pack_id).order_by(payload.c.pack_offset))


def repoint(
    session: Session,
    old_id: int,
    name: str,
    num_bytes: int,
    offsets: Mapping[int, int],
    now: datetime,
) -> int:
    """Make the rows of parts refer to their copies in a new pack.

    Parts that were deleted or moved meanwhile are skipped. If the old or the new pack ends up
    without live parts, it is marked for deletion.

    Args:
        session: A write transaction.
        old_id: Id of the pack that the parts are in.
        name: Name of the new pack.
        num_bytes: Size of the new pack.
        offsets: Offset of each part in the new pack, by its offset in the old one.
        now: The current time.

    Returns:
        The number of parts that were moved.
    """
    new_id = _insert(session, name, num_bytes, now, Share())
    if new_id is None:  # it was claimed as an orphan
        return 0
    rows = [
        {"old_pack": old_id, "old_offset": old, "new_pack": new_id, "new_offset": new}
        for old, new in sorted(offsets.items())
    ]
    session.run_many(move_member(), rows)
    parts = _totals("parts", payload.c.pack_length)
    [moved] = session.run(parts.where(payload.c.pack_id == new_id))
    shares = {
        old_id: Share(-moved.parts, -moved.bytes),
        new_id: Share(moved.parts, moved.bytes),
    }
    save(session, shares, now)
    return int(moved.parts)


def _insert(
    session: Session,
    name: str,
    num_bytes: int,
    now: datetime,
    share: Share,
    *,
    removing: bool = False,
) -> int | None:
    """Insert a pack. Returns its id, or None if the name is taken."""
    values = {
        "name": name,
        "created_at": now,
        "num_bytes": num_bytes,
        "live_parts": share.parts,
        "live_bytes": share.bytes,
        "condemned_at": None if share.parts else now,
        "removing": removing,
    }
    rows: Any = session.run(Bound(insert_pack(), values))
    return int(rows[0].id) if rows else None


def _cutoff(session: Session, now: datetime) -> datetime:
    found = payload_store(session)
    grace = GRACE_SECONDS if found is None else found.grace_seconds
    return now - timedelta(seconds=grace)


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


def begin_pack_removal(ids: Sequence[int], cutoff: datetime) -> Update:
    """Begin the removal of the packs that were marked by `cutoff` and have no references.

    A removal cannot be undone, so the references are checked too: a counter may be damaged.
    """
    is_marked = (pack.c.live_parts == 0, pack.c.condemned_at <= cutoff, _STAYS)
    referred_to = exists().where(payload.c.pack_id == pack.c.id)
    return (
        update(pack).where(among(pack.c.id, ids), *is_marked, ~referred_to).values(removing=true())
    )


def select_mostly_dead(limit: int) -> Select[Any]:
    """Select packs of which at most half of the bytes are live, the fewest live bytes first."""
    return (
        select(pack)
        .where(is_mostly_dead, _STAYS)
        .order_by(pack.c.live_bytes, pack.c.id)
        .limit(limit)
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


def select_miscounted() -> Select[Any]:
    """Select packs whose counters or mark do not match the rows that refer to them, and counts."""
    parts, size = _referring()
    stored = (pack.c.id, pack.c.name, pack.c.live_parts, pack.c.live_bytes)
    found = select(*stored, parts.label("parts"), size.label("bytes"))
    return found.where(_STAYS, _is_wrong(parts, size)).order_by(pack.c.id)


def _is_wrong(parts: ColumnElement[int], size: ColumnElement[int]) -> ColumnElement[bool]:
    return (pack.c.live_parts != parts) | (pack.c.live_bytes != size) | _IS_MISMARKED


def _mark(live_parts: ColumnElement[int], now: Any) -> ColumnElement[Any]:
    """Return the deletion mark of a pack with this number of live parts. An earlier mark stays."""
    return case((live_parts == 0, func.coalesce(pack.c.condemned_at, now)), else_=null())


def _totals(name: str, size: ColumnElement[int]) -> Select[Any]:
    """Return the statement that counts rows under a name, and sums up their `bytes`."""
    totals: tuple[Any, ...] = (func.count().label(name), total_or_zero(size).label("bytes"))
    return select(*totals)


def _referring() -> tuple[ColumnElement[int], ColumnElement[int]]:
    mine = payload.c.pack_id == pack.c.id
    size = total_or_zero(payload.c.pack_length)
    return (
        select(func.count()).select_from(payload).where(mine).scalar_subquery(),
        select(size).where(mine).scalar_subquery(),
    )


def release_payloads(ids: Sequence[int]) -> ReturningDelete[*tuple[Any, ...]]:
    """Delete the payloads of groups. Returns the pack and length of each part."""
    deleted = delete(payload).where(among(payload.c.group_id, ids))
    return deleted.returning(payload.c.pack_id, payload.c.pack_length)
