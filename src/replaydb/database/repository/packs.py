"""Which packs there are, and how much in each is still of use.

A pack without live parts is marked for deletion, and only such a pack is: every statement here that
writes the number of live parts writes the mark with it. A marked pack is removed a grace later, so
that what was drawn meanwhile can still be read. Until its removal has begun, parts that are in it
may be taken into use, which saves it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection

from replaydb.database.prepared import Bound, execute, execute_many
from replaydb.database.records import PayloadRecord
from replaydb.database.statements.pack import (
    change_packs,
    delete_packs,
    doom_packs,
    insert_pack,
    insert_place,
    lock_miscounted,
    mark_unused,
    move_member,
    recount_packs,
    select_any_payload,
    select_condemned,
    select_condemned_total,
    select_doomed,
    select_known_packs,
    select_members,
    select_miscounted,
    select_mostly_dead,
    select_pack_names,
    select_place,
    select_removed_orphans,
    select_share,
    select_staying,
    select_unmarked_total,
    update_place,
)
from replaydb.database.statements.payload import release_payloads
from replaydb.errors import InvalidInputError

#: A pack that is in no table and was written longer ago may be taken for what a crash left.
FRESH_SECONDS = 3600.0
#: How long an orphan that was removed is remembered: longer than anybody may still commit it.
REMEMBERED_SECONDS = 2 * FRESH_SECONDS
#: How long a pack stays to which nothing refers, where nobody said.
GRACE_SECONDS = 3600.0


class PackGoneError(Exception):
    """Packs cannot be used any more: what is in them is to be written anew.

    Attributes:
        ids: Ids of these packs.
    """

    def __init__(self, ids: Collection[int]) -> None:
        super().__init__(ids)
        self.ids = ids


class PlaceRow(NamedTuple):
    """Where packs are.

    Attributes:
        url: Without secrets.
        store_uid: Tells this store from others that are in the same folder or bucket.
        grace_seconds: How long a pack stays to which nothing refers.
    """

    url: str
    store_uid: str
    grace_seconds: float


@dataclass(slots=True)
class Share:
    """A part of what is in a pack; what goes from it is negative."""

    parts: int = 0
    bytes: int = 0

    def add(self, num_bytes: int, sign: int = 1) -> None:
        """One part more, or less."""
        self.parts += sign
        self.bytes += sign * num_bytes


#: What changes in packs, by their ids.
Shares = dict[int, Share]


def place(connection: Connection) -> PlaceRow | None:
    """Where packs are; None: payloads are in the database."""
    rows = execute(connection, select_place())
    return PlaceRow(rows[0].url, rows[0].store_uid, rows[0].grace_seconds) if rows else None


def settle_place(connection: Connection, url: str, store_uid: str) -> PlaceRow:
    """Have payloads outside the database from now on; where somebody was quicker, where they said.

    Raises:
        InvalidInputError: There are payloads in the database.
    """
    found = place(connection)
    if found is None:
        check_no_payloads(connection, url)
        found = PlaceRow(url, store_uid, GRACE_SECONDS)
        execute_many(connection, insert_place(), [{"id": 1, **found._asdict()}])
    return found


def check_no_payloads(connection: Connection, url: str) -> None:
    """Refuse to have payloads elsewhere from now on.

    Raises:
        InvalidInputError: There are some in the database.
    """
    if execute(connection, select_any_payload()):
        expected = "None, as this store has its payloads in the database (`replaydb copy` moves it)"
        raise InvalidInputError("payloads", expected, url)


def relocate(connection: Connection, url: str) -> None:
    """Record that packs are at another URL now."""
    execute(connection, update_place(url=url))


def set_grace(connection: Connection, seconds: float) -> None:
    """Change how long a pack stays to which nothing refers."""
    execute(connection, update_place(grace_seconds=seconds))


def enter(connection: Connection, payloads: Iterable[PayloadRecord]) -> Shares:
    """Enter the packs of payloads that are in no table yet, as if all of these came in.

    Returns:
        What was counted of each, by its id.

    Raises:
        PackGoneError: One may have been taken for what a crash left.
    """
    counted: Shares = {}
    members = [one for one in payloads if one.pack is not None and not one.pack.is_kept]
    for new in {one.pack: None for one in members}:
        assert new is not None  # noqa: S101
        if time.monotonic() - new.written_at > FRESH_SECONDS:
            raise PackGoneError([])
        share = Share()
        for one in members:
            if one.pack is new:
                share.add(len(one.data))
        new.id = _insert(connection, new.name, new.num_bytes, datetime.now(UTC), share)
        if new.id is None:
            raise PackGoneError([])
        counted[new.id] = share
    return counted


def settle(shares: Shares, counted: Shares, payloads: Iterable[PayloadRecord]) -> None:
    """Correct what was counted of packs to the payloads that did come in."""
    for pack_id, share in counted.items():
        mine = shares.setdefault(pack_id, Share())
        mine.parts -= share.parts
        mine.bytes -= share.bytes
    for one in payloads:
        if one.pack is not None:
            assert one.pack.id is not None  # noqa: S101
            shares.setdefault(one.pack.id, Share()).add(len(one.data))


def release(connection: Connection, ids: Sequence[int], shares: Shares) -> None:
    """Delete the payloads of groups, and count what goes from packs."""
    for row in connection.execute(release_payloads(ids)).all():
        if row.pack_id is not None:
            shares.setdefault(row.pack_id, Share()).add(row.pack_length, -1)


def save(connection: Connection, shares: Shares, now: Callable[[], datetime]) -> None:
    """Write what has changed in packs, in the order of their ids: nobody waits in a circle.

    Raises:
        PackGoneError: Some that were to be taken into use are being removed.
    """
    changes = {pack_id: one for pack_id, one in sorted(shares.items()) if one != Share()}
    if not changes:
        return
    time_now = now()
    rows = [
        {"of_pack": pack_id, "parts": one.parts, "bytes": one.bytes, "now": time_now}
        for pack_id, one in changes.items()
    ]
    execute_many(connection, change_packs(), rows)
    taken = [pack_id for pack_id, one in changes.items() if one.parts > 0]
    if taken:
        staying = {row.id for row in execute(connection, select_staying(taken))}
        if gone := [pack_id for pack_id in taken if pack_id not in staying]:
            raise PackGoneError(gone)


def recount(connection: Connection, now: datetime) -> int:
    """Correct counters and marks of packs to what refers to them. Returns how many were wrong."""
    # Who takes parts into a pack, or out of it, counts that last: once these are locked, whatever
    # is not counted yet can not be seen either.
    execute(connection, lock_miscounted())
    return execute(connection, recount_packs(now))


def miscounted(connection: Connection) -> Sequence[Any]:
    """Packs whose `live_parts` and `live_bytes` are not the `parts` and `bytes` that there are.

    Also those that are marked for deletion though they have live parts, or not marked without any.
    """
    return execute(connection, select_miscounted())


def unmarked_total(connection: Connection) -> Any:
    """Number of `packs` without live parts and without a mark for deletion, and their `bytes`.

    Earlier versions left such packs. Nothing removes them until they are marked.
    """
    [total] = execute(connection, select_unmarked_total())
    return total


def mark_unmarked(connection: Connection, now: datetime) -> None:
    """Mark the packs of `unmarked_total` for deletion. Their grace begins now."""
    execute(connection, mark_unused(now))


def names(connection: Connection, ids: Collection[int]) -> dict[int, str]:
    """Names of packs, by their ids."""
    found = execute(connection, select_pack_names(sorted(ids)))
    return {row.id: row.name for row in found}


def condemned(connection: Connection, now: datetime, limit: int) -> Sequence[int]:
    """Packs whose grace is over, at most so many: a look that locks nothing."""
    cutoff, forgotten = _cutoff(connection, now), now - timedelta(seconds=REMEMBERED_SECONDS)
    return [row.id for row in execute(connection, select_condemned(cutoff, forgotten, limit))]


def condemned_total(connection: Connection, now: datetime) -> Any:
    """How many `packs` there are whose grace is over, and their `bytes`."""
    [total] = execute(connection, select_condemned_total(_cutoff(connection, now)))
    return total


def doom(connection: Connection, ids: Sequence[int], now: datetime) -> dict[int, str]:
    """Let condemned packs be used no more.

    Returns:
        Names of those whose objects are to be removed now, by their ids.
    """
    execute(connection, doom_packs(ids, _cutoff(connection, now)))
    return {row.id: row.name for row in execute(connection, select_doomed(ids))}


def forget(connection: Connection, ids: Collection[int]) -> None:
    """Take out of the tables what was removed."""
    execute(connection, delete_packs(sorted(ids)))


def known(connection: Connection, pack_names: Sequence[str]) -> set[str]:
    """Which of some packs there are, in use or not."""
    return {row.name for row in execute(connection, select_known_packs(pack_names))}


def claim_orphans(connection: Connection, names: Collection[str], now: datetime) -> dict[int, str]:
    """Enter objects that are in no table as being removed: nobody can take them into use then.

    These rows have no bytes. They stay for `REMEMBERED_SECONDS`. So a transaction that is about to
    commit such a pack finds the row after the object was removed, and writes its payloads again.

    Args:
        connection: In whose transaction; where somebody was quicker it is run again.
        names: Of the objects.
        now: The time.

    Returns:
        Names of the objects to remove now, by the ids of their rows.
    """
    for name in sorted(names):
        _insert(connection, name, 0, now, Share(), removing=True)
    rows = execute(connection, select_removed_orphans(sorted(names)))
    return {row.id: row.name for row in rows}


def mostly_dead(connection: Connection, share: float, limit: int) -> Sequence[Any]:
    """Rows of packs of which at most a share (0 to 1) of the bytes is of use, at most so many."""
    return execute(connection, select_mostly_dead(share, limit))


def members(connection: Connection, pack_id: int) -> Sequence[Any]:
    """What is still of use in a pack: `checksum`, `pack_offset`, `pack_length` and whose it is."""
    return execute(connection, select_members(pack_id))


def repoint(
    connection: Connection,
    old_id: int,
    name: str,
    num_bytes: int,
    offsets: Mapping[int, int],
    now: datetime,
) -> int:
    """Let parts be read from a new pack, where copies of them are. Returns how many were moved.

    Parts that were deleted or moved meanwhile stay out of it. A pack that ends without live parts,
    the old one or the new one, is marked for deletion.

    Args:
        connection: In whose transaction.
        old_id: The pack they were in.
        name: Name of the new pack.
        num_bytes: Its size.
        offsets: Where a part is in the new pack, by where it was in the old one.
        now: The time.
    """
    new_id = _insert(connection, name, num_bytes, now, Share())
    if new_id is None:  # taken for an orphan
        return 0
    rows = [
        {"old_pack": old_id, "old_offset": old, "new_pack": new_id, "new_offset": new}
        for old, new in sorted(offsets.items())
    ]
    execute_many(connection, move_member(), rows)
    [moved] = execute(connection, select_share(new_id))
    shares = {
        old_id: Share(-moved.parts, -moved.bytes),
        new_id: Share(moved.parts, moved.bytes),
    }
    save(connection, shares, lambda: now)
    return int(moved.parts)


def _insert(
    connection: Connection,
    name: str,
    num_bytes: int,
    now: datetime,
    share: Share,
    *,
    removing: bool = False,
) -> int | None:
    """Enter a pack. Returns its id, or None where there is one of that name."""
    values = {
        "name": name,
        "created_at": now,
        "num_bytes": num_bytes,
        "live_parts": share.parts,
        "live_bytes": share.bytes,
        "condemned_at": None if share.parts else now,
        "removing": removing,
    }
    rows: Any = execute(connection, Bound(insert_pack(), values))
    return int(rows[0].id) if rows else None


def _cutoff(connection: Connection, now: datetime) -> datetime:
    found = place(connection)
    grace = GRACE_SECONDS if found is None else found.grace_seconds
    return now - timedelta(seconds=grace)
