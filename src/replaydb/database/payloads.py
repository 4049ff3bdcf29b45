"""Payloads outside the database: written before the transaction that refers to them, read after it.

Nothing of this happens inside a transaction, or while a lock is held
(`docs/decisions/0016-payloads-in-packs.md`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection

from replaydb.database.pruning import Pruning
from replaydb.database.records import Facts, Pack, PayloadRecord, Stored
from replaydb.database.repository import groups, packs
from replaydb.database.repository.packs import PlaceRow
from replaydb.database.transactions import Database, allowance, end_in
from replaydb.errors import DatabaseError, InvalidInputError, ReplayDBError, StoreClosedError
from replaydb.packs import PackDamage, Place, Range
from replaydb.results import PruneReport

logger = logging.getLogger(__name__)

#: A part of a payload: the id of its group, and which part it is.
_Key = tuple[Any, Any]
Data = memoryview | PackDamage

#: How often a process that puts looks for packs to be removed, and how many it removes then.
TIDY_SECONDS = 60.0
TIDY_PACKS = 256


class Payloads:
    """Where a store has its payloads, if that is not the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._place: Place | None = None
        self._open = True
        self._calls: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tidying: asyncio.Task[None] | None = None
        self._tidied = time.monotonic()

    @property
    def url(self) -> str | None:
        """Where they are, without secrets; None where nothing was read or written there yet."""
        return None if self._place is None else self._place.url

    async def settle(self, url: str, end: float) -> None:
        """Have payloads at a URL, where they are already or nothing was said yet.

        Raises:
            InvalidInputError: They are elsewhere, or it cannot be a place for them.
            PayloadsUnavailableError: The place cannot be reached, or not used.
            DatabaseReadOnlyError: The store was opened to be read.
        """
        row = await self._database.read(packs.place, end=end)
        if row is None:
            store_uid = uuid4().hex
            place = Place.at(url, store_uid)

            def look(connection: Connection) -> None:
                packs.check_no_payloads(connection, place.url)

            def record(connection: Connection) -> PlaceRow:
                return packs.settle_place(connection, place.url, store_uid)

            try:
                await self._database.read(look, end=end)
                if not self._database.backend.read_only:
                    await place.prepare(end)  # it can be written: only then it is recorded
                row = await self._database.write(record, end=end)
            finally:
                await place.close()
        place = Place.at(url, row.store_uid)
        if place.url != row.url:
            await place.close()
            raise InvalidInputError("payloads", f"{row.url}, where this store has them", place.url)
        self._place = place
        await place.check(end)

    async def set_grace(self, seconds: float, end: float) -> None:
        """For every process: how long a pack stays to which nothing refers.

        Raises:
            InvalidInputError: Payloads are in the database.
        """
        if await self._database.read(packs.place, end=end) is None:
            raise InvalidInputError("payload_grace", "payloads outside the database", seconds)
        await self._database.write(lambda connection: packs.set_grace(connection, seconds), end=end)

    async def relocate(self, url: str, end: float) -> tuple[str, str]:
        """Record that packs have been brought elsewhere; the URLs of where they were, and are.

        Raises:
            InvalidInputError: Payloads are in the database.
            PayloadsUnavailableError: The packs of this store are not there.
        """
        row = await self._database.read(packs.place, end=end)
        if row is None:
            raise InvalidInputError("payloads", "a store that has them outside the database", url)
        place = Place.at(url, row.store_uid)
        await place.check(end)
        await self._database.write(
            lambda connection: packs.relocate(connection, place.url), end=end
        )
        self._place = place  # who still reads from the old one may do so to the end
        return row.url, place.url

    async def prune(
        self,
        *,
        dry_run: bool,
        min_age: float,
        end: float,
        progress: Callable[[PruneReport], object] | None,
    ) -> PruneReport:
        """Find what the place holds for nothing, see `Pruning`.

        Raises:
            InvalidInputError: Payloads are in the database.
            PayloadsUnavailableError: The place cannot be reached, or is not that of this store.
            StoreClosedError: The store was closed.
        """
        if await self._database.read(packs.place, end=end) is None:
            expected = "a store that has them outside the database"
            raise InvalidInputError("payloads", expected, "one that has them inside")
        pruning = Pruning(
            self._database,
            await self._known(end),
            dry_run=dry_run,
            min_age=min_age,
            end=end,
            progress=progress,
        )
        async with self._call():
            return await pruning.run()

    async def put(self, payloads: Sequence[PayloadRecord], end: float) -> None:
        """Write what is nowhere yet, as one pack.

        Raises:
            PayloadsUnavailableError: The place cannot be reached, or not used.
            StoreClosedError: The store was closed.
        """
        new = [one for one in payloads if one.pack is None or one.pack.is_gone]
        if not new:
            return
        async with self._call():
            place = await self._known(end)
            pack = Pack(place.new_name(), 0, time.monotonic())
            sync = self._database.backend.syncs
            offsets = await place.write(pack.name, [one.data for one in new], sync=sync, end=end)
        pack.num_bytes = offsets[-1] + len(new[-1].data)
        for one, offset in zip(new, offsets, strict=True):
            one.pack, one.offset = pack, offset

    async def read(self, stored: Stored, end: float) -> Stored:
        """Rows of payloads with their bytes, or what is wrong with those; see `Place.read`.

        Raises:
            PayloadsUnavailableError: The place cannot be reached, or is not that of this store.
            StoreClosedError: The store was closed.
        """
        outside = [part for part in stored.payloads if part["pack_id"] is not None]
        if not outside:
            return stored
        found = await self._read(outside, end)
        if moved := await self._moved(outside, found, end):
            found |= await self._read(moved, end)
        # `Place.read` has compared their checksums, so the decoder does not.
        parts = [
            part
            if part["pack_id"] is None
            else {**part, "data": found[_key(part)], "checksum": None}
            for part in stored.payloads
        ]
        return stored._replace(payloads=parts)

    async def _read(self, parts: Sequence[Facts], end: float) -> dict[_Key, Data]:
        """Bytes of parts in packs, or what is wrong with them."""
        found: dict[_Key, Data] = {}
        ranges: dict[_Key, Range] = {}
        for part in parts:
            where = _range(part)
            if isinstance(where, Range):
                ranges[_key(part)] = where
            else:
                found[_key(part)] = where
        async with self._call():
            place = await self._known(end)
            read = await place.read(list(ranges.values()), end=end)
        return found | dict(zip(ranges, read, strict=True))

    async def _moved(
        self, parts: Sequence[Facts], found: Mapping[_Key, Data], end: float
    ) -> list[Facts]:
        """Rows of the damaged parts that are in other packs by now: of a grace that was too short.

        A part with the same checksum is the same content, whatever became of the group.
        """
        damaged = {_key(part): part for part in parts if isinstance(found[_key(part)], PackDamage)}
        if not damaged:
            return []
        ids = sorted({group_id for group_id, _ in damaged})
        now = await self._database.read(
            lambda connection: groups.payloads(self._database.backend, connection, ids), end=end
        )
        return [
            part
            for part in now
            if (before := damaged.get(_key(part))) is not None
            and part["pack_id"] not in (None, before["pack_id"])
            and part["checksum"] == before["checksum"]
        ]

    def tidy_soon(self) -> None:
        """Remove packs to which nothing has referred for long, if nobody did for some time."""
        due = time.monotonic() - self._tidied > TIDY_SECONDS
        if due and (self._tidying is None or self._tidying.done()):
            self._tidying = asyncio.create_task(self._tidy())

    async def stop(self) -> None:
        """Remove nothing any more."""
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.wait([self._tidying])

    async def close(self, end: float) -> None:
        """Let go of the place. What is under way there ends first, and by `end` is cut off."""
        self._open = False
        try:
            async with asyncio.timeout_at(end):
                await self._idle.wait()
        except TimeoutError:
            for call in self._calls:
                call.reschedule(end)
            await self._idle.wait()
        if self._place is not None:
            await self._place.close()

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        """Reading or writing, which closing waits for, as for a transaction."""
        if not self._open:
            raise StoreClosedError
        call = asyncio.timeout(None)
        self._calls.add(call)
        self._idle.clear()
        try:
            async with call:
                yield
        except TimeoutError:
            raise StoreClosedError from None
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._idle.set()

    async def _tidy(self) -> None:
        """What is broken off is left marked, and done by whoever tidies next."""
        try:
            while await remove_condemned(self._database, await self._known(end_in(allowance()))):
                pass
        except ReplayDBError as error:
            logger.warning("packs that nothing refers to were not removed: %s", error)
        except Exception:
            logger.exception("packs that nothing refers to were not removed")
        finally:
            self._tidied = time.monotonic()

    async def _known(self, end: float) -> Place:
        """The place; another process may have said where it is after this one opened the store."""
        if self._place is None:
            row = await self._database.read(packs.place, end=end)
            if row is None:
                raise DatabaseError("the tables do not say where payloads are")
            self._place = Place.at(row.url, row.store_uid)
        return self._place


async def remove_condemned(database: Database, place: Place) -> bool:
    """Remove packs whose grace is over, a limited number. Returns whether there may be more."""
    backend = database.backend

    def look(connection: Connection) -> Sequence[int]:
        return packs.condemned(connection, backend.now(connection), TIDY_PACKS)

    ids = await database.read(look)
    if not ids:
        return False

    def doom(connection: Connection) -> dict[int, str]:
        return packs.doom(connection, ids, backend.now(connection))

    doomed = await database.write(doom)
    await place.remove(doomed.values(), end=end_in(allowance()))
    gone: Collection[int] = doomed.keys()
    await database.write(lambda connection: packs.forget(connection, gone))
    return len(ids) == TIDY_PACKS and bool(doomed)


def _key(part: Facts) -> _Key:
    return part["group_id"], part["part"]


def _range(part: Facts) -> Range | PackDamage:
    """Where a part is; SQLite takes anything for a number."""
    pack, numbers = part.get("pack"), [part[f"pack_{name}"] for name in ("offset", "length")]
    numbers.append(part["checksum"])
    if isinstance(pack, str) and all(isinstance(number, int) for number in numbers):
        return Range(pack, *numbers)
    return PackDamage(f"no pack has such bytes: {(pack, *numbers)!r:.80}")
