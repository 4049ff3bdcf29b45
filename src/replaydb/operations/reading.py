"""Payloads read some megabytes at a time, from wherever they are, and compared with checksums."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection

from replaydb import codec
from replaydb.database.engines.protocol import Backend
from replaydb.database.payloads import Payloads
from replaydb.database.records import Facts, Stored
from replaydb.database.repository import groups, rows
from replaydb.database.repository.rows import Values
from replaydb.database.schema import payload
from replaydb.database.transactions import Database, allowance, end_in

#: Bytes of payloads that are held at once, unless one alone is larger.
BATCH_BYTES: Final = 16 << 20

#: Groups of which rows are read at once.
PAGE: Final = 1000

#: `Database.read`, or that of a snapshot.
Read = Callable[[Callable[[Connection], Any]], Awaitable[Any]]


#: The bytes of a payload.
Data = bytes | memoryview


class Part(NamedTuple):
    """What is to be known of a payload, without its bytes: `statements.rows.columns`."""

    group_id: int
    part: int
    codec_version: int
    checksum: int
    length: int


@dataclass(slots=True)
class Fetched:
    """Payloads with their bytes.

    Attributes:
        sound: Whose bytes are those that were stored.
        damaged: What is wrong with the others, by group and part.
    """

    sound: list[tuple[Part, Data]] = field(default_factory=list)
    damaged: dict[tuple[int, int], str] = field(default_factory=dict)


def batches(found: Iterable[Values]) -> Iterator[list[Part]]:
    """Payloads in the order of groups, some megabytes at a time."""
    batch: list[Part] = []
    size = 0
    for part in sorted(Part(*row) for row in found):
        if batch and size + (part.length or 0) > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += part.length or 0
    if batch:
        yield batch


async def fetch(
    read: Read, backend: Backend, payloads: Payloads, wanted: Sequence[Part]
) -> Fetched:
    """Bytes of payloads.

    Args:
        read: Where their rows are read.
        backend: Of that database.
        payloads: Where those are that it has not.
        wanted: Which.

    Raises:
        PayloadsUnavailableError: The place outside cannot be reached, or is not that of the store.
        DatabaseError: The database cannot be read.
    """
    ids = sorted({part.group_id for part in wanted})
    found: list[dict[str, Any]] = await read(lambda one: groups.payloads(backend, one, ids))
    known = {(part.group_id, part.part): part for part in wanted}
    mine = [row for row in found if (row["group_id"], row["part"]) in known]
    end = end_in(allowance(sum(part.length or 0 for part in wanted)))
    stored = await payloads.read(Stored((), mine, ()), end)
    return await asyncio.to_thread(_checked, known, stored.payloads)


async def every_payload(database: Database, payloads: Payloads) -> AsyncIterator[Fetched]:
    """All payloads of a store, in the order of groups."""
    after = 0
    while True:

        def page(connection: Connection, after: int = after) -> tuple[int | None, list[Values]]:
            last = rows.end_of_page(connection, payload, after, PAGE)
            return last, [] if last is None else rows.children(connection, payload, after, last)

        last, found = await database.read(page)
        if last is None:
            return
        for batch in batches(found):
            yield await fetch(database.read, database.backend, payloads, batch)
        after = last


def _checked(known: dict[tuple[int, int], Part], found: Sequence[Facts]) -> Fetched:
    fetched = Fetched()
    for row in found:
        key = (row["group_id"], row["part"])
        data = row["data"]
        if not isinstance(data, bytes | memoryview):
            fetched.damaged[key] = getattr(data, "reason", "the data are no bytes")
        elif row["pack_id"] is None and (wrong := codec.mismatch(data, row["checksum"])):
            fetched.damaged[key] = wrong
        else:
            fetched.sound.append((known[key], data))
    return fetched
