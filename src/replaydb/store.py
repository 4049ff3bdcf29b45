"""Store: a database of buffers, opened."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Self, Unpack, get_args
from uuid import uuid4

from sqlalchemy import URL, Connection

from replaydb import checks
from replaydb.buffer import Buffer
from replaydb.database import copying, migrations
from replaydb.database.engines import backend_for
from replaydb.database.engines.protocol import Durability
from replaydb.database.payloads import Payloads
from replaydb.database.repository import buffers
from replaydb.database.repository.buffers import BufferRow, RunRow
from replaydb.database.repository.packs import FRESH_SECONDS
from replaydb.database.repository.run_sums import run_stats
from replaydb.database.transactions import (
    BULK_SECONDS,
    PATIENCE_SECONDS,
    Database,
    allowance,
    end_in,
)
from replaydb.errors import DatabaseUnavailableError, InvalidInputError, UnknownBufferError
from replaydb.opening import Opening
from replaydb.results import BufferInfo, PruneReport, RunInfo, RunStats
from replaydb.settings import BufferSettings, SettingsChanges, all_changes
from replaydb.tracing import traced

logger = logging.getLogger(__name__)

DAY_SECONDS = 86_400.0


@traced
class Store:
    """Buffers in one SQLite file or PostgreSQL database.

    A store belongs to the event loop it was opened in. Any number of processes may open the same
    database; they see each other's groups as soon as a put returns.
    """

    def __init__(
        self,
        database: Database,
        run_name: str,
        lineage: str | None,
        run_metadata: Mapping[str, Any],
    ) -> None:
        self._database = database
        self._payloads = Payloads(database)
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
    ) -> Opening[Store]:
        """Open a store: `async with Store.open(...) as store`, or `store = await Store.open(...)`.

        Args:
            url: `sqlite:///FILE` (made if it is not there) or `postgresql://USER:PASS@HOST/DB`,
                with parameters of libpq (`docs/deployment.md` lists them).
            run: Name of the training or generation job; processes of one job share it, and a job
                that is started again goes on under it. By default a new name is made up.
            lineage: The run whose policy versions this run's continue, such as the one it was
                forked from; by default the run itself, if it is named. Versions of different
                lineages do not compare, see `Buffer.advance_policy`.
            run_metadata: JSON to keep with the run when it is new.
            migrate: True upgrades the tables if they are not current, False never writes any;
                None makes those of a new SQLite file and refuses whatever else is out of date.
            durability: "process": what was put survives the death of every process. "full": also
                a power cut (`synchronous=FULL` on SQLite; PostgreSQL always does, as the server
                is configured).
            read_only: Only look: whatever would write raises `DatabaseReadOnlyError` before
                anything is sent. A SQLite file may then be in a folder that cannot be written.
                Without `run` and `migrate`.
            pool_size: How many connections at most write, and how many read; calls wait for one
                within their timeout. By default 8 of each are kept, and up to 24 made under load.
                On SQLite one writes, and by default 8 read.
            payloads: Where the payloads are, if not in the database: a folder, `file:///FOLDER`,
                created if its parent exists, or an object store, `s3://BUCKET/PREFIX`, `gs://` or
                `az://` (extra `replaydb[obstore]`). To be said once, before anything is put; it is
                recorded, without secrets, and whoever opens the store finds it.
            payload_grace: Seconds that payloads outside the database can still be read after
                their groups are gone, so that what was drawn can be delivered. Kept, for every
                process; an hour at first.

        Raises:
            InvalidInputError: An argument is wrong, or does not go with `read_only`; or the
                payloads of this store are elsewhere than `payloads` says.
            InvalidURLError: The URL, or that of the payloads, cannot be used.
            PayloadsUnavailableError: The place given for payloads cannot be reached, or not used.
            NotSupportedError: What talks to object stores is not installed.
            SchemaError: The tables are not those of this version; the message says what to run.
            DatabaseError: The database cannot be opened.
        """
        durability = checks.one_of("durability", durability, get_args(Durability))
        read_only = checks.flag("read_only", read_only)
        migrate = checks.optional(checks.flag, "migrate", migrate)
        size = checks.optional(checks.whole_number, "pool_size", pool_size, least=1)
        if read_only and (run is not None or lineage is not None or run_metadata is not None):
            raise InvalidInputError("read_only", "no run, which would be entered", "one")
        if read_only and migrate:
            raise InvalidInputError("migrate", "None or False with read_only=True", migrate)
        payloads = checks.optional(checks.string, "payloads", payloads)
        grace = checks.optional(checks.duration, "payload_grace", payload_grace)
        name = _new_run_name() if run is None else checks.name("run", run)
        ancestor = checks.optional(checks.name, "lineage", lineage)
        metadata = checks.json_object("run_metadata", run_metadata)

        async def opened() -> Store:
            with _typed_shortage():
                return await open_it()

        async def open_it() -> Store:
            backend = backend_for(url, durability=durability, read_only=read_only, pool_size=size)
            await backend.check_target()
            await migrations.prepare(backend, migrate=False if read_only else migrate)
            store = cls(Database(backend), name, ancestor or run, metadata)
            try:
                if payloads is not None:
                    await store._payloads.settle(payloads, end_in(allowance()))
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
        """Name of this run."""
        return self._run_name

    async def buffer(
        self,
        name: str,
        settings: BufferSettings | None = None,
        *,
        create: bool = True,
        **changes: Unpack[SettingsChanges],
    ) -> Buffer:
        """The buffer of this name.

        Settings are set for every process, also if the buffer is there already.

        Args:
            name: Its name.
            settings: All of its settings. By default they stay as they are, and are those of
                `BufferSettings()` in a buffer that is made.
            create: Make the buffer if there is none. False is for processes that only follow,
                such as evaluators: a name that is misspelt raises instead of making a buffer.
            changes: Single fields of `BufferSettings`; the others stay as they are.

        Raises:
            InvalidSettingsError: Unknown or impossible settings; nothing was changed.
            UnknownBufferError: There is no such buffer, and `create` is False.
            SchemaError: Another store is being copied into the database, which was empty.
        """
        checks.name("name", name)
        may_create = checks.flag("create", create)
        wanted = all_changes(settings, changes, "create")
        fresh = BufferSettings().updated(wanted)  # refuse before anything is written

        def find(connection: Connection) -> BufferRow | None:
            copying.check_no_copy(connection)
            return buffers.find(connection, name)

        def make(connection: Connection) -> BufferRow | None:
            self._database.backend.share_schema(connection)
            if find(connection) is None:
                buffers.create(connection, name, fresh, datetime.now(UTC))
            return buffers.find(connection, name)

        row = await self._database.read(find)
        if row is None and may_create:
            row = await self._database.write(make)
        if row is None:
            raise UnknownBufferError(name, await self._database.read(buffers.buffer_names))
        found = self._buffers.setdefault(
            row.id,
            Buffer(self._database, self._payloads, row, self._run_name, self._current_run),
        )
        found._saw(row)
        if row.settings.updated(wanted) != row.settings:
            await found.update_settings(settings, **changes)
        elif "indexed_tags" in wanted:
            await found._index_tags()  # whoever began may have ended before it was done
        return found

    async def buffers(self) -> list[BufferInfo]:
        """Every buffer of the store, by name."""
        return await self._database.read(buffers.all_buffers)

    async def buffer_names(self) -> list[str]:
        """Names of every buffer of the store, in order; `buffers` also counts their groups."""
        return sorted(await self._database.read(buffers.buffer_names))

    async def runs(self) -> list[RunInfo]:
        """Every run that the store knows, the oldest first."""
        return await self._database.read(buffers.all_runs)

    async def run_stats(self, run: str, *, limit: int = 20_000) -> RunStats:
        """What a run put, with what rewards by policy version, and what it drew, how stale.

        Takes no longer for a store of more groups than it looks at, however many there are.

        Args:
            run: Its name.
            limit: How many groups to look at, at most; and a twentieth as many draws.

        Raises:
            InvalidInputError: There is no such run.
        """
        name = checks.name("run", run)
        most = checks.whole_number("limit", limit, least=1)

        def work(connection: Connection) -> RunStats:
            for info in buffers.all_runs(connection):
                if info.name == name:
                    return run_stats(connection, info, most, max(1, most // 20))
            raise InvalidInputError("run", "a run of the store", name)

        return await self._database.read(work)

    async def prune(
        self,
        *,
        dry_run: bool = True,
        min_age: float = DAY_SECONDS,
        progress: Callable[[PruneReport], object] | None = None,
    ) -> PruneReport:
        """Find, and remove, what a folder or object store holds of this store for nothing.

        Packs of puts that were killed before their commit are removed; so are those whose grace is
        over, as every process that puts does by itself; those of which at most half is of use are
        written anew without the rest. It may run beside everything else, be cancelled at any point,
        and run again. Takes an hour at most.

        Args:
            dry_run: Only look, and say what there is.
            min_age: Seconds since a pack of which the database knows nothing was written, by the
                clock of where it is: at least two hours, as somebody may be about to commit it.
            progress: Called with what was found so far, again and again.

        Raises:
            InvalidInputError: An argument is wrong, or the payloads are in the database.
            PayloadsUnavailableError: The place cannot be reached, or is not that of this store.
        """
        return await self._payloads.prune(
            dry_run=checks.flag("dry_run", dry_run),
            min_age=checks.number("min_age", min_age, least=2 * FRESH_SECONDS),
            end=end_in(BULK_SECONDS),
            progress=checks.optional(checks.function, "progress", progress),
        )

    async def relocate_payloads(self, payloads: str) -> None:
        """Record that the folder or prefix with this store's packs is elsewhere now.

        For a store that was restored on another machine, or whose folder is mounted elsewhere. The
        packs must be there already; processes that have the store open must open it again.

        Args:
            payloads: Where they are, as of `Store.open`.

        Raises:
            InvalidInputError: The payloads are in the database, or the URL cannot be used.
            PayloadsUnavailableError: The packs of this store are not there.
        """
        url = checks.string("payloads", payloads)
        old, new = await self._payloads.relocate(url, end_in(allowance()))
        logger.info("payloads are at %s now, not at %s", new, old)

    async def close(self, *, timeout: float | None = PATIENCE_SECONDS) -> None:
        """Finish the calls under way and let go of the database. Idempotent.

        Args:
            timeout: Seconds after which what has not ended is cut off: its callers get a
                `StoreClosedError` or a `DatabaseUnavailableError`. None waits for ever.
        """
        seconds = checks.seconds("timeout", timeout)
        end = math.inf if seconds is None else end_in(seconds)
        buffers = self._buffers.values()
        try:
            async with asyncio.timeout_at(end):
                await asyncio.gather(*(buffer.drain() for buffer in buffers))
        except TimeoutError:
            await asyncio.gather(*(buffer._give_up() for buffer in buffers))
        await asyncio.gather(*(buffer._stop_returning(end) for buffer in buffers))
        await self._payloads.stop()
        await self._database.close(end)
        await self._payloads.close(end)

    async def _current_run(self, end: float) -> RunRow:
        """This run, entered in the database when it first writes something.

        Of calls that come first together, each sees to it by its own end.
        """
        if self._run is None:

            def work(connection: Connection) -> RunRow:
                self._database.backend.share_schema(connection)
                copying.check_no_copy(connection)
                return buffers.find_or_add_run(
                    connection,
                    self._run_name,
                    self._lineage,
                    self._run_metadata,
                    datetime.now(UTC),
                )

            self._run = await self._database.write(work, end=end)
        return self._run


@contextmanager
def _typed_shortage() -> Iterator[None]:
    """Type what Python raises if there is no memory: for data, or for a library to be loaded.

    Where its own code in C cannot allocate anything, that may be a SystemError.
    """
    try:
        yield
    except ModuleNotFoundError:
        raise
    except (MemoryError, SystemError) as error:
        raise DatabaseUnavailableError("not enough memory to open the store") from error
    except ImportError as error:
        raise DatabaseUnavailableError(f"a library cannot be loaded: {error}") from error


def _new_run_name() -> str:
    return f"run-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}"
