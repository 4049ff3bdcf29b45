"""Bounded-memory reads of payloads, inside or outside the database, with checksum checks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

from replaydb import codec
from replaydb.database.payloads import Payloads
from replaydb.database.repository import row_differences
from replaydb.database.repository.row_differences import Values
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import allowance, end_in
from replaydb.database.tables.records import Facts, Stored
from replaydb.database.tables.schema import payload
from replaydb.util.chunks import chunks

#: Bytes of payloads in memory at once, unless a single one is larger.
BATCH_BYTES: Final = 16 << 20

#: Number of groups whose rows are read at once.
PAGE: Final = 1000

#: `Database.read` or `Snapshot.read`.
Read = Callable[[Callable[[Session], Any]], Awaitable[Any]]


#: The bytes of a payload.
Data = bytes | memoryview


class Part(NamedTuple):
    """Row of a payload without its bytes, in the order of `table_ranges.columns`."""

    group_id: int
    part: int
    codec_version: int
    checksum: int
    field: str | None
    of_part: int | None
    expanded_bytes: int | None
    length: int


@dataclass(slots=True)
class Fetched:
    """Payloads that were read.

    Attributes:
        sound: Payloads whose bytes match their checksums, with these bytes.
        damaged: Reasons of damaged payloads, by group id and part.
    """

    sound: list[tuple[Part, Data]] = field(default_factory=list)
    damaged: dict[tuple[int, int], str] = field(default_factory=dict)


def batches(found: Iterable[Values]) -> Iterator[list[Part]]:
    """Return payloads by group id, in batches of up to `BATCH_BYTES` or one group."""
    parts = sorted(Part(*row) for row in found)
    whole = [list(mine) for _, mine in groupby(parts, attrgetter("group_id"))]
    for several in chunks(whole, _num_bytes, BATCH_BYTES):
        yield [part for mine in several for part in mine]


def _num_bytes(parts: Iterable[Part]) -> int:
    return sum(part.length or 0 for part in parts)


async def fetch(read: Read, payloads: Payloads, wanted: Sequence[Part]) -> Fetched:
    """Read payloads and check their checksums.

    Args:
        read: Function that reads rows from the database.
        payloads: Reader of payloads outside the database.
        wanted: Payloads to read.

    Raises:
        PayloadsUnavailableError: The payload store cannot be reached, or belongs to another store.
        DatabaseError: The database cannot be read.
    """
    ids = sorted({part.group_id for part in wanted})
    found: list[dict[str, Any]] = await read(lambda one: one.read_payloads(ids))
    known = {(part.group_id, part.part): part for part in wanted}
    mine = [row for row in found if (row["group_id"], row["part"]) in known]
    end = end_in(allowance(sum(part.length or 0 for part in wanted)))
    stored = await payloads.read(Stored((), mine, ()), end)
    return await asyncio.to_thread(_checked, known, stored.payloads)


async def every_payload(payloads: Payloads) -> AsyncIterator[Fetched]:
    """Yield all payloads of a store, by group id."""
    after, database = 0, payloads.database
    while True:

        def page(session: Session, after: int = after) -> tuple[int | None, list[Values]]:
            last = row_differences.end_of_page(session, payload, after, PAGE)
            return last, [] if last is None else row_differences.children(
                session, payload, after, last
            )

        last, found = await database.read(page)
        if last is None:
            return
        for batch in batches(found):
            yield await fetch(database.read, payloads, batch)
        after = last


def _checked(known: dict[tuple[int, int], Part], found: Sequence[Facts]) -> Fetched:
    fetched = Fetched()
    for row in found:
        key = (row["group_id"], row["part"])
        data = row["data"]
        if not isinstance(data, bytes | memoryview):
            fetched.damaged[key] = getattr(data, "reason", "the data is not bytes")
        elif row["pack_id"] is None and (wrong := codec.mismatch(data, row["checksum"])):
            fetched.damaged[key] = wrong
        else:
            fetched.sound.append((known[key], data))
    return fetched
