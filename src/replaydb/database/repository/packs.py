"""Rows of packs, with the number of live parts and bytes of each.

A part is live while a row of `payload` refers to it. A pack is marked for deletion exactly while it
has no live parts: every statement here that writes the number of live parts also writes the mark. A
marked pack is removed after the grace period, so that draws that have read its rows can still read
the pack. Until its removal begins, a transaction may refer to its parts again, which clears the
mark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection

from replaydb.database.runtime.prepared import Bound, execute, execute_many
from replaydb.database.statements.pack import (
    begin_pack_removal,
    change_packs,
    delete_packs,
    insert_pack,
    insert_payload_store,
    lock_miscounted,
    mark_unused,
    move_member,
    recount_packs,
    select_any_payload,
    select_known_packs,
    select_members,
    select_miscounted,
    select_mostly_dead,
    select_payload_store,
    select_removable,
    select_removable_total,
    select_removed_orphans,
    select_removing,
    select_share,
    select_staying,
    select_unmarked_total,
    select_used_packs,
    update_payload_store,
)
from replaydb.database.statements.payload import release_payloads
from replaydb.database.tables.records import PayloadRecord
from replaydb.errors import InvalidInputError

#: A pack without a row that was written longer ago than this may be treated as an orphan.
FRESH_SECONDS = 3600.0
#: How long the row of a removed orphan is kept: longer than a put may still commit the pack.
REMEMBERED_SECONDS = 2 * FRESH_SECONDS
#: Default grace period: how long a pack is kept after it was marked for deletion.
GRACE_SECONDS = 3600.0


class PackGoneError(Exception):
    """Packs can no longer be used: their payloads must be written again.

    Attributes:
        ids: Ids of those that have a committed row. Those without one can never be used.
    """

    def __init__(self, ids: Collection[int]) -> None:
        super().__init__(ids)
        self.ids = ids


class PayloadStoreRow(NamedTuple):
    """The row of `payload_place`: the payload store that this database uses.

    Attributes:
        url: Its URL, without secrets.
        store_uid: Identifies this store among others in the same folder or bucket.
        grace_seconds: How long a pack is kept after it was marked for deletion.
    """

    url: str
    store_uid: str
    grace_seconds: float


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


def payload_store(connection: Connection) -> PayloadStoreRow | None:
    """Return the payload store of the database; None if payloads are in the database."""
    rows = execute(connection, select_payload_store())
    return PayloadStoreRow(rows[0].url, rows[0].store_uid, rows[0].grace_seconds) if rows else None


def record_payload_store(connection: Connection, url: str, store_uid: str) -> PayloadStoreRow:
    """Record the payload store, unless another process has. Returns the one that is recorded.

    Raises:
        InvalidInputError: There are payloads in the database.
    """
    found = payload_store(connection)
    if found is None:
        check_no_payloads(connection, url)
        found = PayloadStoreRow(url, store_uid, GRACE_SECONDS)
        execute_many(connection, insert_payload_store(), [{"id": 1, **found._asdict()}])
    return found


def check_no_payloads(connection: Connection, url: str) -> None:
    """Check that a payload store can be recorded.

    Raises:
        InvalidInputError: There are payloads in the database.
    """
    if execute(connection, select_any_payload()):
        expected = "None, since this store has its payloads in the database (see `replaydb copy`)"
        raise InvalidInputError("payloads", expected, url)


def used(connection: Connection) -> list[str]:
    """Return the names of all packs with live parts."""
    return [row.name for row in execute(connection, select_used_packs())]


def relocate(connection: Connection, url: str) -> None:
    """Record the new URL of the payload store."""
    execute(connection, update_payload_store(url=url))


def set_grace(connection: Connection, seconds: float) -> None:
    """Set the grace period of packs that are marked for deletion."""
    execute(connection, update_payload_store(grace_seconds=seconds))


def enter(connection: Connection, payloads: Iterable[PayloadRecord]) -> Shares:
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
        new.id = _insert(connection, new.name, new.num_bytes, datetime.now(UTC), share)
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


def record_unused(connection: Connection, payloads: Iterable[PayloadRecord]) -> None:
    """Insert rows for packs that have none, marked for deletion.

    Raises:
        PackGoneError: A pack may have been removed as an orphan.
    """
    shares: Shares = {}
    settle(shares, enter(connection, payloads), ())
    save(connection, shares, lambda: datetime.now(UTC))


def release(connection: Connection, ids: Sequence[int], shares: Shares) -> None:
    """Delete the payloads of groups, and subtract them from the live parts of packs."""
    rows: Any = execute(connection, release_payloads(ids))
    for row in rows:
        if row.pack_id is not None:
            shares.setdefault(row.pack_id, Share()).add(row.pack_length, -1)


def save(connection: Connection, shares: Shares, now: Callable[[], datetime]) -> None:
    """Write the changes of packs, in the order of their ids to prevent deadlocks.

    Raises:
        PackGoneError: Packs that get more live parts are being removed.
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
    """Correct the counters and marks of packs to the rows that refer to them.

    Returns:
        The number of packs that were wrong.
    """
    # A transaction that adds or removes parts updates the counters last. So once the packs are
    # locked, parts that are not counted yet are not visible either.
    execute(connection, lock_miscounted())
    return execute(connection, recount_packs(now))


def miscounted(connection: Connection) -> Sequence[Any]:
    """Return packs whose `live_parts` and `live_bytes` differ from the actual `parts` and `bytes`.

    Includes packs with live parts that are marked for deletion, and unmarked packs without any.
    """
    return execute(connection, select_miscounted())


def unmarked_total(connection: Connection) -> Any:
    """Return the number of unmarked `packs` without live parts, and their `bytes`.

    Earlier versions left such packs. Nothing removes them until they are marked.
    """
    [total] = execute(connection, select_unmarked_total())
    return total


def mark_unmarked(connection: Connection, now: datetime) -> None:
    """Mark the packs of `unmarked_total` for deletion. Their grace period begins now."""
    execute(connection, mark_unused(now))


def removable(connection: Connection, now: datetime, limit: int) -> Sequence[int]:
    """Return ids of marked packs whose grace period is over, up to a limit. Takes no locks."""
    cutoff, forgotten = _cutoff(connection, now), now - timedelta(seconds=REMEMBERED_SECONDS)
    return [row.id for row in execute(connection, select_removable(cutoff, forgotten, limit))]


def removable_total(connection: Connection, now: datetime) -> Any:
    """Return the number of marked `packs` whose grace period is over, and their `bytes`."""
    [total] = execute(connection, select_removable_total(_cutoff(connection, now)))
    return total


def begin_removal(connection: Connection, ids: Sequence[int], now: datetime) -> dict[int, str]:
    """Let no transaction use these packs any more, if their grace period is over.

    Returns:
        Names of the objects to remove now, by pack id.
    """
    execute(connection, begin_pack_removal(ids, _cutoff(connection, now)))
    return {row.id: row.name for row in execute(connection, select_removing(ids))}


def delete_rows(connection: Connection, ids: Collection[int]) -> None:
    """Delete the rows of packs whose objects were removed."""
    execute(connection, delete_packs(sorted(ids)))


def known(connection: Connection, pack_names: Sequence[str]) -> set[str]:
    """Return which of these packs have a row, except orphans that were claimed for removal."""
    return {row.name for row in execute(connection, select_known_packs(pack_names))}


def claim_orphans(connection: Connection, names: Collection[str], now: datetime) -> dict[int, str]:
    """Insert rows of orphans as packs that are being removed, so that no transaction can use them.

    These rows have no bytes. They stay for `REMEMBERED_SECONDS`. So a transaction that is about to
    commit such a pack finds the row after the object was removed, and writes its payloads again.

    Args:
        connection: A write transaction. If another one inserts a name first, it is run again.
        names: Names of the objects.
        now: The current time.

    Returns:
        Names of the objects to remove now, by the ids of their rows.
    """
    for name in sorted(names):
        _insert(connection, name, 0, now, Share(), removing=True)
    rows = execute(connection, select_removed_orphans(sorted(names)))
    return {row.id: row.name for row in rows}


def mostly_dead(connection: Connection, limit: int) -> Sequence[Any]:
    """Return packs of which at most half of the bytes are live, up to a limit."""
    return execute(connection, select_mostly_dead(limit))


def members(connection: Connection, pack_id: int) -> Sequence[Any]:
    """Return the live parts of a pack: `group_id`, `part`, `checksum`, offset and length."""
    return execute(connection, select_members(pack_id))


def repoint(
    connection: Connection,
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
        connection: A write transaction.
        old_id: Id of the pack that the parts are in.
        name: Name of the new pack.
        num_bytes: Size of the new pack.
        offsets: Offset of each part in the new pack, by its offset in the old one.
        now: The current time.

    Returns:
        The number of parts that were moved.
    """
    new_id = _insert(connection, name, num_bytes, now, Share())
    if new_id is None:  # it was claimed as an orphan
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
    rows: Any = execute(connection, Bound(insert_pack(), values))
    return int(rows[0].id) if rows else None


def _cutoff(connection: Connection, now: datetime) -> datetime:
    found = payload_store(connection)
    grace = GRACE_SECONDS if found is None else found.grace_seconds
    return now - timedelta(seconds=grace)
