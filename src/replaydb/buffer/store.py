"""Store: an open database with its buffers and runs."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Self, Unpack, get_args
from uuid import uuid4

from sqlalchemy import URL

from replaydb.buffer.buffer import Buffer
from replaydb.buffer.tracing import traced
from replaydb.database import migrations
from replaydb.database.engines import backend_for
from replaydb.database.payloads import Payloads
from replaydb.database.repository import buffers
from replaydb.database.repository.buffers import BufferRow, RunRow
from replaydb.database.repository.packs import FRESH_SECONDS
from replaydb.database.repository.run_totals import run_stats
from replaydb.database.runtime import revisions
from replaydb.database.runtime.protocol import Durability
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import (
    BULK_SECONDS,
    PATIENCE_SECONDS,
    Database,
    allowance,
    end_in,
)
from replaydb.domain import checks
from replaydb.domain.results import BufferInfo, PruneReport, RunInfo, RunStats
from replaydb.domain.settings import BufferSettings, SettingsChanges, all_changes
from replaydb.errors import DatabaseUnavailableError, InvalidInputError, UnknownBufferError
from replaydb.util.opening import Opening

logger = logging.getLogger(__name__)

DAY_SECONDS = 86_400.0


@traced
class Store:
    """An open SQLite file or PostgreSQL database with any number of buffers.

    A store belongs to the event loop in which it was opened. Any number of processes can open the
    same database. They see each other's groups as soon as `put` returns.
    """

    def __init__(
        self,
        database: Database,
        run_name: str,
        lineage: str | None,
        run_metadata: Mapping[str, Any],
        payload_cache: int | None,
    ) -> None:
        self._database = database
        self._payloads = Payloads(database, payload_cache)
        self._run_name = run_name
        self._lineage = lineage
        self._run_metadata = run_metadata
        self._run: RunRow | None = None
        self._buffers: dict[int, Buffer] = {}

    @classmethod
    def open(
        cls,
        url: str | URL,
        *,
        run: str | None = None,
        lineage: str | None = None,
        run_metadata: Mapping[str, Any] | None = None,
        migrate: bool | None = None,
        durability: Durability = "process",
        read_only: bool = False,
        pool_size: int | None = None,
        payloads: str | None = None,
        payload_grace: float | None = None,
        payload_cache: int | None = None,
    ) -> Opening[Store]:
        """Open a store: `async with Store.open(...) as store`, or `store = await Store.open(...)`.

        Args:
            url: `sqlite:///FILE` (created if it does not exist) or
                `postgresql://USER:PASS@HOST/DB`, with libpq parameters (`docs/deployment.md` lists
                them).
            run: Name of the training or generation job. All processes of a job share it, and a
                restarted job continues under the same name. Default: a new generated name.
            lineage: Name of the run whose policy versions this run continues, for example the run
                that it was forked from. Default: the run itself if `run` is given, otherwise none.
                Versions of different lineages are not comparable, see `Buffer.advance_policy`.
            run_metadata: JSON object to store with the run if the run is new.
            migrate: What to do if the tables are missing or out of date. True upgrades them. False
                raises `SchemaOutOfDateError`, and creates no file. None (default) creates the
                tables of a new SQLite file and otherwise raises.
            durability: Failures that committed data survives. "process" (default): the end of any
                process. "full": also a power failure (`synchronous=FULL` on SQLite; on PostgreSQL
                the server configuration decides in both cases).
            read_only: Whether to forbid writes. Calls that write then raise `DatabaseReadOnlyError`
                before they send anything. A SQLite file can be in a folder that is not writable.
                Cannot be combined with `run`, `lineage`, `run_metadata` or `migrate=True`.
            pool_size: Maximum number of write connections, and also of read connections. A call
                waits for a free connection within its timeout. Default: up to 24 of each under
                load, of which 8 stay open. SQLite always has one write connection, and by default 8
                read connections.
            payloads: Payload location, if payloads are stored outside the database: a folder
                `file:///FOLDER` (created if its parent exists), or an object store
                `s3://BUCKET/PREFIX`, `gs://` or `az://` (extra `replaydb[obstore]`). Pass it once,
                before the first put. It is recorded in the database, without secrets, and later
                opens find it there.
            payload_grace: Grace period in seconds: how long a payload outside the database stays
                readable after it is no longer referenced, so that draws already made can still be
                delivered. Recorded in the database for all processes; 3600 until you change it.
            payload_cache: Maximum size, in bytes, of the payloads outside the database that this
                object keeps in memory after it has read them. 0: none. Default: 256 MB if they are
                in an object store, 0 if they are in a folder, which the operating system caches.

        Returns:
            An object to await or to enter with `async with`, both of which give the store.

        Raises:
            InvalidInputError: An argument is invalid or cannot be combined with `read_only`, or
                `payloads` differs from where this store already has its payloads.
            InvalidURLError: `url` or `payloads` is not a usable URL.
            PayloadsUnavailableError: The payload store cannot be reached or cannot be used.
            NotSupportedError: The package for object stores is not installed.
            SchemaError: The tables do not match this version of replaydb. The message names the
                command to run.
            DatabaseError: The database cannot be opened.
        """
        durability = checks.one_of("durability", durability, get_args(Durability))
        read_only = checks.flag("read_only", read_only)
        migrate = checks.optional(checks.flag, "migrate", migrate)
        size = checks.optional(checks.whole_number, "pool_size", pool_size, least=1)
        if read_only and (run is not None or lineage is not None or run_metadata is not None):
            raise InvalidInputError(
                "read_only", "False with run, lineage or run_metadata, which are written", True
            )
        if read_only and migrate:
            raise InvalidInputError("migrate", "None or False with read_only=True", migrate)
        payloads = checks.optional(checks.string, "payloads", payloads)
        grace = checks.optional(checks.duration, "payload_grace", payload_grace)
        cache = checks.optional(checks.whole_number, "payload_cache", payload_cache)
        generated = f"run-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}"
        name = generated if run is None else checks.name("run", run)
        ancestor = checks.optional(checks.name, "lineage", lineage)
        metadata = checks.json_object("run_metadata", run_metadata)

        async def opened() -> Store:
            with _memory_errors_typed():
                backend = backend_for(
                    url, durability=durability, read_only=read_only, pool_size=size
                )
                await migrations.prepare(backend, migrate=False if read_only else migrate)
                store = cls(Database(backend), name, ancestor or run, metadata, cache)
                try:
                    if payloads is not None:
                        await store._payloads.set_location(payloads, end_in(allowance()))
                    if grace is not None:
                        await store._payloads.set_grace(grace, end_in(allowance()))
                    if run is not None:
                        await store._current_run(end_in(allowance()))
                except BaseException:
                    await store.close()
                    raise
            logger.info("opened %s", backend.shown)
            return store

        return Opening(opened)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def run(self) -> str:
        """Name of the run under which this store puts and draws."""
        return self._run_name

    async def buffer(
        self,
        name: str,
        settings: BufferSettings | None = None,
        *,
        create: bool = True,
        **changes: Unpack[SettingsChanges],
    ) -> Buffer:
        """Return the buffer of this name; create it if it does not exist.

        Settings that you pass apply to all processes, also if the buffer already exists.

        Args:
            name: Name of the buffer.
            settings: A complete set of settings. Default: an existing buffer keeps its settings,
                and a new buffer gets those of `BufferSettings()`.
            create: Whether to create the buffer if it does not exist. Pass False in processes that
                only read, such as evaluators, so that a misspelled name raises an error.
            changes: Single fields of `BufferSettings`. All other settings keep their values.

        Raises:
            InvalidSettingsError: A setting is unknown or invalid. Nothing was changed.
            UnknownBufferError: The buffer does not exist and `create` is False.
            SchemaError: A copy of another store into this database has not finished.
        """
        checks.name("name", name)
        may_create = checks.flag("create", create)
        wanted = all_changes(settings, changes, "create")
        fresh = BufferSettings().updated(wanted)  # raises before anything is written

        def find(session: Session) -> BufferRow | None:
            revisions.check_still_usable(session)
            return buffers.find(session, name)

        def make(session: Session) -> BufferRow | None:
            self._database.backend.schema.share(session)
            if find(session) is None:
                buffers.create(session, name, fresh, datetime.now(UTC))
            return buffers.find(session, name)

        row = await self._database.read(find)
        if row is None and may_create:
            row = await self._database.write(make)
        if row is None:
            raise UnknownBufferError(name, await self._database.read(buffers.buffer_names))
        found = self._buffers.setdefault(
            row.id,
            Buffer(self._database, self._payloads, row, self._run_name, self._current_run),
        )
        found._set_row(row)
        if row.settings.updated(wanted) != row.settings:
            await found.update_settings(settings, **changes)
        elif "indexed_tags" in wanted:
            await found._index_tags()  # resumes if another process was interrupted
        return found

    async def buffers(self) -> list[BufferInfo]:
        """Return all buffers of the store with their settings and group counts, sorted by name."""
        return await self._database.read(buffers.all_buffers)

    async def buffer_names(self) -> list[str]:
        """Return the sorted names of all buffers. Unlike `buffers`, this does not count groups."""
        return sorted(await self._database.read(buffers.buffer_names))

    async def runs(self) -> list[RunInfo]:
        """Return all runs of the store, oldest first."""
        return await self._database.read(buffers.all_runs)

    async def replication_lag(self) -> float | None:
        """Return by how many seconds the data that this store reads is behind the primary.

        A standby of PostgreSQL can be opened with `read_only=True`. It has the commits of the
        primary a moment later. The lag is 0 if it has applied everything that it received, which
        does not include what is still on its way.

        Returns:
            Seconds. None if the server is not a standby, and for SQLite. Infinite if the standby is
            not connected to a primary and has applied no transaction since it was started.
        """
        return await self._database.read(
            self._database.backend.administration.replication_lag, single=True
        )

    async def run_stats(self, run: str, *, limit: int = 20_000) -> RunStats:
        """Return statistics of a run: groups and rewards by policy version, draws by staleness.

        The counts come from a sample of at most `limit` groups and `limit / 20` draws, spread over
        the time of the run, so the cost does not grow with the size of the store.

        Args:
            run: Name of the run.
            limit: Maximum number of groups to read.

        Returns:
            The statistics, and which share of the run's groups and draws was read.

        Raises:
            InvalidInputError: The run does not exist.
        """
        name = checks.name("run", run)
        most = checks.whole_number("limit", limit, least=1)

        def work(session: Session) -> RunStats:
            for info in buffers.all_runs(session):
                if info.name == name:
                    return run_stats(session, info, most, max(1, most // 20))
            raise InvalidInputError("run", "a run of the store", name)

        return await self._database.read(work)

    async def prune(
        self,
        *,
        dry_run: bool = True,
        min_age: float = DAY_SECONDS,
        progress: Callable[[PruneReport], object] | None = None,
    ) -> PruneReport:
        """Delete unreferenced packs from the payload store (by default a dry run).

        A pack is one file or object that holds payloads. This deletes packs of puts that were
        killed before their commit, and unreferenced packs whose grace period has ended. (Puts also
        delete the latter from time to time.) If at most half of a pack is still referenced,
        the pack is rewritten without its unreferenced payloads. You can run this while other
        processes read and write, cancel it at any point, and run it again. The time limit is one
        hour.

        Args:
            dry_run: Whether to only report what would be deleted.
            min_age: Minimum age in seconds of packs that the database does not know, by the clock
                of the payload store. At least 7200, because a put in progress may still commit such
                a pack. Default: one day.
            progress: Function that is called repeatedly with the report so far.

        Returns:
            The number and total size of the packs found, for each reason to delete them.

        Raises:
            InvalidInputError: An argument is invalid, or payloads are stored in the database.
            PayloadsUnavailableError: The payload store cannot be reached, or belongs to another
                store.
            PayloadsReadOnlyError: Another copy of this database owns the payloads, and this is no
                dry run.
        """
        return await self._payloads.prune(
            dry_run=checks.flag("dry_run", dry_run),
            min_age=checks.number("min_age", min_age, least=2 * FRESH_SECONDS),
            end=end_in(BULK_SECONDS),
            progress=checks.optional(checks.function, "progress", progress),
        )

    async def relocate_payloads(self, payloads: str) -> None:
        """Record a new payload location.

        Use it after you restore a store on another machine, or mount its folder elsewhere. The
        packs must already be at the new location. Other processes must reopen the store. If the
        database was copied or moved to another disk too, call `adopt_payloads` afterwards.

        Args:
            payloads: URL of the folder or bucket, as for `Store.open`.

        Raises:
            InvalidInputError: Payloads are stored in the database, or the URL is not usable.
            PayloadsUnavailableError: The packs of this store are not at this location.
        """
        url = checks.string("payloads", payloads)
        old, new = await self._payloads.relocate(url, end_in(allowance()))
        logger.info("payload location changed from %s to %s", old, new)

    async def adopt_payloads(self) -> None:
        """Make this database the owner of its payloads outside the database.

        Of a database and its copies, one is the owner: the first that wrote payloads. Only the
        owner may put and prune; the others raise `PayloadsReadOnlyError`. Use this after the
        database was restored or moved to another disk or server. If the former owner still exists,
        it can only read from now on. Payloads that it has put since the copy was made are unknown
        to this database, so `prune` deletes them.

        If the marker of the payload store is missing or damaged, this restores it, provided that
        there are payloads of this database.

        Raises:
            InvalidInputError: Payloads are stored in the database.
            PayloadsUnavailableError: The payload store cannot be reached, belongs to another store,
                or has neither a marker nor payloads of this database.
            DatabaseReadOnlyError: The database or the payload store cannot be written.
        """
        url = await self._payloads.adopt(end_in(allowance()))
        logger.info("this database owns the payloads at %s", url)

    async def close(self, *, timeout: float | None = PATIENCE_SECONDS) -> None:
        """Wait for running calls to finish, then close the database. Idempotent.

        Args:
            timeout: Seconds to wait. Calls that are still running then are cancelled: they raise
                `StoreClosedError` or `DatabaseUnavailableError`. A put whose commit is under way
                then returns its result, or raises `OutcomeUnknownError`. None waits indefinitely.

        In a process that was forked after the store was opened, this does nothing.
        """
        if self._database.is_inherited:
            return
        seconds = checks.seconds("timeout", timeout)
        end = math.inf if seconds is None else end_in(seconds)
        buffers = self._buffers.values()
        try:
            async with asyncio.timeout_at(end):
                await asyncio.gather(*(buffer.drain() for buffer in buffers))
        except TimeoutError:
            await asyncio.gather(*(buffer._abort_puts() for buffer in buffers))
        await asyncio.gather(*(buffer._stop_releasing(end) for buffer in buffers))
        await self._payloads.stop()
        await self._database.close(end)
        await self._payloads.close(end)

    async def _current_run(self, end: float, *, create: bool = True) -> RunRow:
        """Return this run. Insert it into the database if it is new, unless `create` is False.

        If several first calls run concurrently, each inserts it within its own deadline.
        """
        if self._run is None and not create:
            return RunRow(0, self._lineage)
        if self._run is None:

            def work(session: Session) -> RunRow:
                self._database.backend.schema.share(session)
                return buffers.find_or_add_run(
                    session,
                    self._run_name,
                    self._lineage,
                    self._run_metadata,
                    datetime.now(UTC),
                )

            self._run = await self._database.write(work, end=end)
        return self._run


@contextmanager
def _memory_errors_typed() -> Iterator[None]:
    """Convert errors that Python raises for lack of memory to `DatabaseUnavailableError`.

    The memory may be needed for data or to load a library. A failed allocation in C code can
    also raise SystemError.
    """
    try:
        yield
    except ModuleNotFoundError:
        raise
    except (MemoryError, SystemError) as error:
        raise DatabaseUnavailableError("not enough memory to open the store") from error
    except ImportError as error:
        raise DatabaseUnavailableError(f"a library cannot be loaded: {error}") from error
