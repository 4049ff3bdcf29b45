"""Payloads outside the database: written before the transaction that refers to them, read after it.

No payload is written or read inside a transaction, or while a lock is held
(`docs/decisions/0016-payloads-in-packs.md`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from replaydb.database.pruning import Pruning
from replaydb.database.repository import packs, payload_location
from replaydb.database.repository.payload_location import PayloadStoreRow
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, Database, allowance, end_in
from replaydb.database.tables.records import Facts, Pack, PayloadRecord, Stored
from replaydb.domain.results import PruneReport
from replaydb.errors import DatabaseError, InvalidInputError, ReplayDBError, StoreClosedError
from replaydb.packs import BUCKET_BYTES, Instance, PackDamage, PayloadStore, Range, RangeCache

logger = logging.getLogger(__name__)

#: A part of a payload: the id of its group, and which part it is.
_Key = tuple[Any, Any]
Data = memoryview | PackDamage

#: Interval at which puts remove and compact packs.
TIDY_SECONDS = 60.0


class Payloads:
    """The payloads of a store that keeps them outside the database.

    Attributes:
        database: The database.
        cache: Payloads that were read; None if they are not cached.
    """

    def __init__(self, database: Database, cache_bytes: int | None = 0) -> None:
        """Set the size of the cache. None: `BUCKET_BYTES` for an object store, 0 for a folder."""
        self.database = database
        self._cache_bytes = cache_bytes
        self.cache: RangeCache | None = None
        self._payload_store: PayloadStore | None = None
        self._open = True
        self._calls: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tidying: asyncio.Task[None] | None = None
        # The first time at random, since processes may live shorter than the interval.
        self._tidied = time.monotonic() - random.random() * TIDY_SECONDS  # noqa: S311
        self._damaged: set[int] = set()

    @property
    def url(self) -> str | None:
        """URL of the payload store, without secrets; None until it is first used."""
        return None if self._payload_store is None else self._payload_store.url

    async def set_location(self, url: str, end: float) -> None:
        """Use the payload store at a URL, and record it if the database has none yet.

        Raises:
            InvalidInputError: The store has its payloads elsewhere, or the URL cannot be used.
            PayloadsUnavailableError: The payload store cannot be reached or used.
            DatabaseReadOnlyError: The store was opened read-only, and has no payload store yet.
        """
        row = await self.database.read(payload_location.payload_store, end=end)
        if row is None:
            store_uid = uuid4().hex
            payload_store = PayloadStore(url, store_uid)

            def check(session: Session) -> None:
                payload_location.check_no_payloads(session, payload_store.url)

            def record(session: Session) -> PayloadStoreRow:
                return payload_location.record_payload_store(session, payload_store.url, store_uid)

            try:
                await self.database.read(check, end=end)
                if not self.database.backend.read_only:
                    await payload_store.prepare(end)  # record it only if it can be written
                row = await self.database.write(record, end=end)
            finally:
                await payload_store.close()
        payload_store = self._at(url, row.store_uid)
        if payload_store.url != row.url:
            await payload_store.close()
            expected = f"{row.url}, where this store has its payloads"
            raise InvalidInputError("payloads", expected, payload_store.url)
        self._use(payload_store)
        await payload_store.check(end)

    async def set_grace(self, seconds: float, end: float) -> None:
        """Set, for all processes, how long unused packs are kept.

        Raises:
            InvalidInputError: Payloads are in the database.
        """
        if await self.database.read(payload_location.payload_store, end=end) is None:
            expected = "None, unless the payloads are outside the database"
            raise InvalidInputError("payload_grace", expected, seconds)
        await self.database.write(
            lambda session: payload_location.set_grace(session, seconds), end=end
        )

    async def relocate(self, url: str, end: float) -> tuple[str, str]:
        """Record that the packs were moved to a URL. Returns the old URL and the new one.

        Raises:
            InvalidInputError: Payloads are in the database.
            PayloadsUnavailableError: The packs of this store are not there.
        """
        row = await self._row(end)
        payload_store = self._at(url, row.store_uid)
        await payload_store.check(end)
        await self.database.write(
            lambda session: payload_location.relocate(session, payload_store.url), end=end
        )
        self._use(payload_store)  # running reads may finish on the old one
        return row.url, payload_store.url

    async def check(self, end: float) -> None:
        """Check that the marker is present and intact, if payloads are outside the database.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached, or has no intact marker
                of this store.
        """
        if await self.database.read(payload_location.payload_store, end=end) is not None:
            await (await self._located(end)).check(end)

    async def adopt(self, end: float) -> str:
        """Make this instance of the database the owner of its packs. Returns their URL.

        The marker is restored if it is missing or damaged.

        Raises:
            InvalidInputError: Payloads are in the database.
            PayloadsUnavailableError: The payload store cannot be reached, belongs to another store,
                or has neither a marker nor packs of this database.
            DatabaseReadOnlyError: The database or the payload store cannot be written.
        """
        await self._row(end)
        payload_store = await self._located(end)
        await payload_store.restore(await self.database.read(packs.used, end=end), end)
        await payload_store.claim(end, adopt=True)
        return payload_store.url

    async def _row(self, end: float) -> PayloadStoreRow:
        """Return the payload store that is recorded in the database."""
        row = await self.database.read(payload_location.payload_store, end=end)
        if row is None:
            expected = "a store with payloads outside the database"
            raise InvalidInputError("payloads", expected, "one with payloads in the database")
        return row

    async def prune(
        self,
        *,
        dry_run: bool,
        min_age: float,
        end: float,
        progress: Callable[[PruneReport], object] | None,
    ) -> PruneReport:
        """Find unreferenced data in the payload store, and remove it unless `dry_run`.

        See `Pruning`.

        Raises:
            InvalidInputError: Payloads are in the database.
            PayloadsUnavailableError: The payload store cannot be reached, or belongs to another
                store.
            PayloadsReadOnlyError: Another instance of the database owns the packs.
            StoreClosedError: The store was closed.
        """
        await self._row(end)
        payload_store = await self._located(end)
        report = PruneReport(dry_run=dry_run)
        pruning = Pruning(self.database, payload_store, end, report, min_age, progress)
        async with self._call():
            return await pruning.run()

    async def put(self, payloads: Sequence[PayloadRecord], end: float) -> None:
        """Write the payloads that are in no usable pack yet, as one new pack.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached or used.
            PayloadsReadOnlyError: Another instance of the database owns the packs.
            StoreClosedError: The store was closed.
        """
        new = [one for one in payloads if one.pack is None or one.pack.is_gone]
        if not new:
            return
        async with self._call():
            payload_store = await self._located(end)
            pack = Pack(payload_store.new_name(), 0, time.monotonic())
            sync = self.database.backend.traits.syncs
            data = [one.data for one in new]
            offsets = await payload_store.write(pack.name, data, sync=sync, end=end)
        pack.num_bytes = offsets[-1] + len(new[-1].data)
        for one, offset in zip(new, offsets, strict=True):
            one.pack, one.offset = pack, offset

    async def read(self, stored: Stored, end: float, *, cached: bool = False) -> Stored:
        """Read the payloads that are in packs. Each row gets its bytes, or a `PackDamage`.

        See `PayloadStore.read`.

        Args:
            stored: Rows of groups.
            end: Deadline of the call.
            cached: Whether to use the cache, if there is one.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached, or belongs to another
                store.
            StoreClosedError: The store was closed.
        """
        outside = [part for part in stored.payloads if part["pack_id"] is not None]
        if not outside:
            return stored
        found = await self._read(outside, end, cached=cached)
        if moved := await self._moved(outside, found, end):
            found |= await self._read(moved, end, cached=cached)
        # `PayloadStore.read` has compared their checksums, so the decoder does not.
        parts = [
            part
            if part["pack_id"] is None
            else {**part, "data": found[_key(part)], "checksum": None}
            for part in stored.payloads
        ]
        return stored._replace(payloads=parts)

    async def _read(self, parts: Sequence[Facts], end: float, *, cached: bool) -> dict[_Key, Data]:
        """Return the bytes of parts in packs, or the damage found in them."""
        places = {_key(part): _range(part) for part in parts}
        ranges = {key: it for key, it in places.items() if isinstance(it, Range)}
        found: dict[_Key, Data] = {k: it for k, it in places.items() if isinstance(it, PackDamage)}
        async with self._call():
            payload_store = await self._located(end)
            cache = self.cache if cached else None
            if cache is not None:
                for key, wanted in list(ranges.items()):
                    if (data := cache.get(wanted)) is not None:
                        found[key] = data
                        del ranges[key]
            read = await payload_store.read(list(ranges.values()), end=end) if ranges else []
            if cache is not None:
                results = zip(ranges.values(), read, strict=True)
                await cache.add({one: it for one, it in results if isinstance(it, memoryview)})
        return found | dict(zip(ranges, read, strict=True))

    async def _moved(
        self, parts: Sequence[Facts], found: Mapping[_Key, Data], end: float
    ) -> list[Facts]:
        """Return the current rows of damaged parts that have moved to other packs.

        A part moves when its pack is compacted. A reader that took longer than the grace period
        then finds its pack missing. A part with the same checksum has the same content, whatever
        happened to the group.
        """
        damaged = {_key(part): part for part in parts if isinstance(found[_key(part)], PackDamage)}
        if not damaged:
            return []
        ids = sorted({group_id for group_id, _ in damaged})
        now = await self.database.read(lambda session: session.read_payloads(ids), end=end)
        return [
            part
            for part in now
            if (before := damaged.get(_key(part))) is not None
            and part["pack_id"] not in (None, before["pack_id"])
            and part["checksum"] == before["checksum"]
        ]

    def tidy_soon(self) -> None:
        """Remove and compact packs in the background, at most once in `TIDY_SECONDS`."""
        due = time.monotonic() - self._tidied > TIDY_SECONDS
        if due and (self._tidying is None or self._tidying.done()):
            self._tidying = asyncio.create_task(self._tidy())

    async def stop(self) -> None:
        """Stop removing unused packs in the background."""
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.wait([self._tidying])

    async def close(self, end: float) -> None:
        """Close the payload store. Running calls end first; at `end` they are cancelled."""
        self._open = False
        try:
            async with asyncio.timeout_at(end):
                await self._idle.wait()
        except TimeoutError:
            for call in self._calls:
                call.reschedule(end)
            await self._idle.wait()
        if self._payload_store is not None:
            await self._payload_store.close()

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        """Run the block as a call. `close` waits for it."""
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
        """Remove all removable packs, and compact those that are mostly dead.

        After an interruption, the next process does the rest.
        """
        try:
            payload_store = await self._located(end_in(allowance()))
            pruning = Pruning(
                self.database, payload_store, end_in(BULK_SECONDS), PruneReport(dry_run=False)
            )
            await pruning.remove_marked()
            await pruning.compact(self._damaged)
        except ReplayDBError as error:
            logger.warning("unused packs were not removed or compacted: %s", error)
        except Exception:
            logger.exception("unused packs were not removed or compacted")
        finally:
            self._tidied = time.monotonic()

    async def _located(self, end: float) -> PayloadStore:
        """Return the payload store. Read its URL if another process set it after the opening."""
        if self._payload_store is None:
            row = await self.database.read(payload_location.payload_store, end=end)
            if row is None:
                raise DatabaseError("the URL of the payload store is missing in the database")
            return self._use(self._at(row.url, row.store_uid))
        return self._payload_store

    def _at(self, url: str, store_uid: str) -> PayloadStore:
        """Return the payload store at a URL, for this instance of the database."""
        database = self.database

        async def read_instance(end: float) -> Instance:
            return await database.write(database.backend.administration.instance, end=end)

        return PayloadStore(url, store_uid, read_instance)

    def _use(self, payload_store: PayloadStore) -> PayloadStore:
        """Use a payload store from now on."""
        self._payload_store = payload_store
        size = self._cache_bytes
        if size is None:
            size = 0 if payload_store.url.startswith("file:") else BUCKET_BYTES
        if size and self.cache is None:
            self.cache = RangeCache(size)
        return payload_store


def _key(part: Facts) -> _Key:
    return part["group_id"], part["part"]


def _range(part: Facts) -> Range | PackDamage:
    """Return the location of a part, or a `PackDamage` if a value in its row has the wrong type.

    SQLite accepts any type in any column.
    """
    pack, numbers = part.get("pack"), [part[f"pack_{name}"] for name in ("offset", "length")]
    numbers.append(part["checksum"])
    if isinstance(pack, str) and all(isinstance(number, int) for number in numbers):
        return Range(pack, *numbers)
    return PackDamage(f"the stored location of the part is not valid: {(pack, *numbers)!r:.80}")
