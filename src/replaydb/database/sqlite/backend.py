"""The SQLite engine: one file, one writer at a time, and readers that never wait for it."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sqlite3
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    Index,
    Select,
    column,
    delete,
    event,
    func,
    insert,
    select,
    table,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool, ConnectionPoolEntry, NullPool, Pool
from sqlalchemy.schema import CreateIndex, ExecutableDDLElement
from sqlalchemy.util import await_

from replaydb.database.runtime.prepared import execute
from replaydb.database.runtime.protocol import Identified, Pinned, T, Work
from replaydb.database.runtime.signals import Signal
from replaydb.database.runtime.writes import Write
from replaydb.database.sqlite import checkup, damage, location
from replaydb.database.sqlite.blobs import read_payloads
from replaydb.database.sqlite.driver import AdaptedConnection, Begin, EagerConnection
from replaydb.database.sqlite.file import DatabaseFile
from replaydb.database.sqlite.guard import GuardedConnection
from replaydb.database.statements.episode_group import select_known_uids
from replaydb.database.tables.schema import GENERATED, episode_group
from replaydb.domain.results import Finding
from replaydb.errors import (
    DatabaseError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    NotSupportedError,
    ReplayDBError,
)
from replaydb.packs import Instance
from replaydb.util.cancellation import run_to_completion

#: Connections for reads: half of them for draws, the others for everything else.
READERS = 8
#: How long SQLite itself waits for a lock. Meanwhile a call cannot be ended or cancelled.
BUSY_SECONDS = 0.5
#: How long a writer waits for writers of other processes before it fails.
LOCK_SECONDS = 60.0
#: Interval at which waiting coroutines poll for commits of other processes: at first, when idle.
WATCH_SECONDS = (0.002, 0.05)

#: Writers wait for other processes in `_begin_immediate`, not inside SQLite.
_WAIT_IN_LOOP = "PRAGMA busy_timeout = 0"

_TOO_LARGE = (
    "; a row of SQLite has at most SQLITE_MAX_LENGTH bytes, 10^9 by default. Nothing was stored: "
    "use smaller values (SQLITE_TOOBIG)"
)


class SqliteBackend:
    """`sqlite:///FILE`."""

    has_one_connection = False
    concurrent_writes = 1
    small_draw_bytes = 4 << 20  # read in one or two milliseconds
    turn_seconds = 0.006  # waiting writers try every 5 ms: see `_pauses`
    settling_seconds = math.inf  # a commit is always answered

    def __init__(
        self,
        url: URL,
        durability: str,
        *,
        read_only: bool = False,
        pool_size: int | None = None,
    ) -> None:
        self._url = url.set(drivername="sqlite+aiosqlite")
        self._file = DatabaseFile(Path(url.database or ""), read_only=read_only)
        self._path = self._file.path
        self.read_only = read_only
        self._readers = pool_size or READERS
        self.concurrent_draws = max(1, self._readers // 2)
        self.syncs = durability == "full"
        self._synchronous = f"PRAGMA synchronous = {'FULL' if self.syncs else 'NORMAL'}"

    @property
    def shown(self) -> str:
        """The URL. It has no password."""
        return self._url.set(drivername="sqlite").render_as_string()

    @property
    def file(self) -> Path:
        """The file of the database."""
        return self._path

    def is_new_file(self) -> bool:
        """Whether the file does not exist or is empty."""
        return self._file.is_new()

    def writer_engine(self) -> AsyncEngine:
        """Return an engine with one connection, which the writers of this process share."""
        return self._engine(
            self._pragmas(_WAIT_IN_LOOP),
            begin=_begin_immediate,
            poolclass=AsyncAdaptedQueuePool,
            pool_size=1,
            max_overflow=0,
            pool_timeout=None,  # the call has a deadline
        )

    def reader_engine(self) -> AsyncEngine:
        """Return an engine with a few connections that cannot write."""
        return self._engine(
            [
                *(() if self.read_only else self._pragmas()),
                # Payloads are read once: a page cache that fits into the processor's is enough.
                "PRAGMA cache_size = -256",
                "PRAGMA query_only = ON",
            ],
            begin=_begin_deferred,
            poolclass=AsyncAdaptedQueuePool,
            pool_size=self._readers,
            max_overflow=0,
            pool_timeout=None,
        )

    def without_transactions(self, reader: AsyncEngine) -> AsyncEngine:
        """Return the reader: a transaction costs little, and calls run several statements."""
        return reader

    def migration_engine(self) -> AsyncEngine:
        """Return an engine without foreign keys: rebuilding a table would delete its child rows."""
        return self._engine(
            self._pragmas("PRAGMA foreign_keys = OFF", _WAIT_IN_LOOP),
            begin=_begin_immediate,
            create=True,
            poolclass=NullPool,
        )

    async def run_in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the caller's event loop: each connection has a thread for its transactions."""
        return await coroutine

    def loop_time(self, time: float) -> float:
        """Return it unchanged: there is one loop."""
        return time

    async def end_loop(self) -> None:
        """Do nothing: it is the caller's."""

    async def begin(self, connection: AsyncConnection, end: float) -> None:
        """Do nothing yet: BEGIN runs with the first statement."""

    async def run(self, connection: AsyncConnection, work: Work[T], end: float) -> T:
        """Run work in the thread of the connection: a hop costs more than most statements."""
        return await _driver_of(connection).run(connection.run_sync(work), end)

    async def finish(
        self,
        connection: AsyncConnection,
        work: Work[T],
        end: float,
        answer_by: float,
        *,
        unless: Callable[[T], bool] | None = None,
        committing: Callable[[], object] | None = None,
    ) -> T:
        """Run work and COMMIT in the thread of the connection."""

        def whole(connection: Connection) -> T:
            result = work(connection)
            if unless is None or not unless(result):
                if committing is not None:
                    committing()
                connection.commit()
            return result

        return await self.run(connection, whole, end)

    async def commit(
        self,
        connection: AsyncConnection,
        end: float,
        answer_by: float,
        pinned: Pinned | None = None,
    ) -> None:
        """Commit. The answer to it cannot be lost."""
        if pinned is not None:
            await pinned()
        await connection.commit()

    async def abandon(self, connection: AsyncConnection) -> None:
        """Roll back. A file always answers."""
        with suppress(Exception):  # the error that led here matters more
            await connection.rollback()

    def cut_off(self, driver_connection: Any) -> None:
        """Interrupt the statement that runs, and run no more."""
        cast("EagerConnection", driver_connection).cut_off()

    def signal(self, watched: Callable[[AsyncEngine], AsyncEngine]) -> Signal:
        """Return a signal that polls the change counter of the file."""
        return _SqliteSignal(self._file)

    def translate(self, error: BaseException) -> ReplayDBError | None:
        """Choose the type by the error's name, never by its text."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        name = getattr(cause, "sqlite_errorname", None)
        if isinstance(cause, MemoryError):
            return DatabaseUnavailableError(f"{self._path}: not enough memory")
        if isinstance(cause, OSError):
            return DatabaseUnavailableError(f"{self._path}: {cause.strerror or cause}")
        if name == "SQLITE_TOOBIG" or isinstance(cause, OverflowError):
            return DatabaseError(f"{self._path}: {cause}{_TOO_LARGE}")
        if name is None:
            # Damage in a file raises such errors: invalid JSON, or text that is not UTF-8.
            damage = isinstance(cause, sqlite3.Error | json.JSONDecodeError | UnicodeDecodeError)
            return DatabaseError(f"{self._path}: {cause}") if damage else None
        kind: type[DatabaseError] = DatabaseError
        if name in ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"):  # the latter: no space for the -shm
            kind = DatabaseFullError
        elif name.startswith("SQLITE_READONLY"):
            kind = DatabaseReadOnlyError
        elif name.startswith(("SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_IOERR", "SQLITE_BUSY")):
            kind = DatabaseUnavailableError
        return kind(f"{self._path}: {cause} ({name})")

    def is_conflict(self, error: BaseException) -> bool:
        """Return False: after its BEGIN there is no other writer."""
        return False

    def is_outage(self, error: BaseException) -> bool:
        """Whether another process blocked the call, as while it resets or recovers the log."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        name = getattr(cause, "sqlite_errorname", None) or ""
        return name.startswith(("SQLITE_BUSY", "SQLITE_PROTOCOL"))

    async def check_target(self, *, exists: bool = False) -> None:
        """Refuse a path at which SQLite would lose commits, or at which there must be a file."""
        try:
            hazard = await asyncio.to_thread(location.hazard, self._path)
        except RuntimeError as error:  # no other thread could be started
            raise DatabaseUnavailableError(f"{self._path}: {error}") from error
        if hazard is not None:
            raise NotSupportedError(f"{self._path}: {hazard}")
        if exists:
            self._file.status()

    async def examine_connections(self, end: float) -> list[Finding]:
        """Return nothing: a file is opened directly."""
        return []

    def examine(self, connection: Connection) -> list[Finding]:
        """Check the library, the file, its log and its disk."""
        return list(checkup.findings(connection, self._path))

    def replication_lag(self, connection: Connection) -> None:
        """Return None: a file has no standby."""

    def damage(self, connection: Connection) -> list[tuple[str, str]]:
        """Run SQLite's own check, and find values that their columns cannot have."""
        return list(damage.damage(connection))

    def check_roles(self) -> None:
        """Raise: a file has permissions instead of roles."""
        raise NotSupportedError(
            f"{self._path}: SQLite has no roles; set the permissions of the file, or open it with "
            "Store.open(url, read_only=True)"
        )

    def role_statements(
        self, connection: Connection, prefix: str, tables: Sequence[str], *, apply: bool
    ) -> list[ExecutableDDLElement]:
        """Return nothing: there are no roles."""
        return []

    async def lock_schema(self, connection: AsyncConnection) -> None:
        """Do nothing: BEGIN IMMEDIATE excludes other writers."""

    async def lock_tables(self, connection: AsyncConnection, names: Collection[str]) -> None:
        """Do nothing: BEGIN IMMEDIATE excludes other writers, and readers have snapshots."""

    def share_schema(self, connection: Connection) -> None:
        """Do nothing: a write transaction excludes other writers."""

    async def check_integrity(self, connection: AsyncConnection) -> None:
        """Check the foreign keys, which were off."""
        broken = (await connection.exec_driver_sql("PRAGMA foreign_key_check")).all()
        if broken:
            raise DatabaseError(
                f"{self._path}: {len(broken)} rows would refer to rows that do not exist, "
                f"the first in table {broken[0][0]!r}"
            )

    async def create_indexes(
        self, indexes: Sequence[Index], notify: Callable[[int, int | None], object]
    ) -> None:
        """Create them in one transaction. Other writers wait, and no progress is reported."""
        engine = self.migration_engine()
        try:
            async with engine.begin() as connection:
                for index in indexes:
                    await connection.execute(CreateIndex(index, if_not_exists=True))
        except Exception as error:
            raise self.translate(error) or error from error
        finally:
            await engine.dispose()

    async def size(self) -> int:
        """Return the size of the file and of its write-ahead log."""
        return await asyncio.to_thread(self._file.size)

    async def vacuum(self) -> None:
        """Rewrite the file. It shrinks when the write-ahead log is checkpointed."""
        connect = partial(self._file.connect, timeout=LOCK_SECONDS)
        try:
            connection = await EagerConnection.open(connect, _begin_deferred)
            try:
                await connection.execute_fetchall("VACUUM")
                await connection.execute_fetchall("PRAGMA wal_checkpoint(TRUNCATE)")
            except asyncio.CancelledError:
                connection.cut_off()
                raise
            finally:
                await run_to_completion(connection.close())
        except sqlite3.Error as error:
            raise self.translate(error) or error from error

    def instance(self, connection: Connection) -> Instance:
        """Look at the file. Its device number is not a fact: it can change with each mount."""
        return self._file.instance()

    def now(self, connection: Connection) -> datetime:
        """Return the time of this machine, which all clients of the file share."""
        return datetime.now(UTC)

    def identify(
        self,
        connection: Connection,
        buffer_id: int,
        uids: Sequence[str],
        *,
        children: Sequence[Write],
    ) -> Identified:
        """Return new ids after AUTOINCREMENT's counter and after the largest id of a group."""
        found = execute(connection, select_known_uids(buffer_id, uids))
        known = {row.group_uid: row.id for row in found}
        last = connection.scalar(_LAST_GROUP_ID) or 0
        return Identified(known, range(last + 1, last + 1 + len(uids)), has_children=False)

    def last_ids(self, connection: Connection) -> dict[str, int | None]:
        """Read AUTOINCREMENT's counters. A table has one once it has had a row."""
        last = {row.name: row.seq for row in execute(connection, _LAST_IDS)}
        return {one.name: last.get(one.name, 0) if one in _COUNTED else None for one in GENERATED}

    def advance_sequences(self, connection: Connection, ids: Mapping[str, int]) -> None:
        """Advance AUTOINCREMENT's counters."""
        last = self.last_ids(connection)
        for name, value in ids.items():
            if (found := last[name]) is not None and found < value:
                execute(connection, delete(_SEQUENCE).where(_SEQUENCE.c.name == name))
                execute(connection, insert(_SEQUENCE).values(name=name, seq=value))

    def read_payloads(self, connection: Connection, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Read the rows, with large payloads as blobs."""
        return read_payloads(connection, ids)

    def _pragmas(self, *more: str) -> list[str]:
        return [
            "PRAGMA page_size = 16384",  # takes effect in a new file, and only before WAL
            "PRAGMA journal_mode = WAL",
            self._synchronous,
            "PRAGMA foreign_keys = ON",
            "PRAGMA journal_size_limit = 67108864",
            *more,
        ]

    def _engine(
        self,
        pragmas: Sequence[str],
        *,
        begin: Begin,
        create: bool = False,
        poolclass: type[Pool],
        **pool: Any,
    ) -> AsyncEngine:
        file = self._file
        seconds = LOCK_SECONDS if create else BUSY_SECONDS
        connect = partial(file.connect, pragmas, timeout=seconds, create=create)

        def begin_guarded(connection: Any, check: Callable[[], None]) -> None:
            cast("GuardedConnection", connection).check()
            begin(connection, check)

        engine = create_async_engine(
            self._url,
            poolclass=poolclass,
            hide_parameters=True,
            **pool,
        )

        @event.listens_for(engine.sync_engine, "do_connect")
        def open_file(dialect: Dialect, *_: object) -> AdaptedConnection:
            opened: Any = await_(EagerConnection.open(connect, begin_guarded))
            return AdaptedConnection(dialect.loaded_dbapi, opened)

        @event.listens_for(engine.sync_engine, "begin")
        def begin_soon(connection: Connection) -> None:
            driver: Any = connection.connection.driver_connection
            cast("EagerConnection", driver).begin_soon()

        if self.read_only:

            @event.listens_for(engine.sync_engine, "checkin")
            def use_once(_: object, record: ConnectionPoolEntry) -> None:
                if file.is_immutable:
                    record.invalidate()

        return engine


def _driver_of(connection: AsyncConnection) -> EagerConnection:
    assert connection.sync_connection is not None  # noqa: S101 - it is connected
    return cast("EagerConnection", connection.sync_connection.connection.driver_connection)


def _begin_deferred(connection: sqlite3.Connection, check: Callable[[], None]) -> None:
    connection.execute("BEGIN")


def _begin_immediate(connection: sqlite3.Connection, check: Callable[[], None]) -> None:
    """Run BEGIN IMMEDIATE, and wait for writers of other processes.

    In SQLite's own busy handler, a cancelled coroutine could not end the wait.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    for pause in _pauses():
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY"):
                raise
            if time.monotonic() > deadline:
                raise DatabaseUnavailableError(
                    f"another process has held the write lock for {LOCK_SECONDS:g} s (SQLITE_BUSY)"
                ) from error
            time.sleep(pause)
            check()
        else:
            return


def _pauses() -> Iterator[float]:
    """Yield pauses of up to 5 ms, in seconds, with jitter so that waiting processes spread out."""
    longest = 0.0005
    while True:
        yield random.uniform(longest / 2, longest)  # noqa: S311
        longest = min(2 * longest, 0.005)


_SEQUENCE = table("sqlite_sequence", column("name"), column("seq"))
_LAST_IDS = select(_SEQUENCE.c.name, func.max(_SEQUENCE.c.seq).label("seq")).group_by(
    _SEQUENCE.c.name
)
_LAST_GROUP_ID: Select[int] = select(
    func.max(  # with two arguments: the larger one
        func.coalesce(
            select(func.max(_SEQUENCE.c.seq))
            .where(_SEQUENCE.c.name == episode_group.name)
            .scalar_subquery(),
            0,
        ),
        func.coalesce(select(func.max(episode_group.c.id)).scalar_subquery(), 0),
    )
)
#: Tables that never generate an id twice, even after deletions.
_COUNTED = frozenset(one for one in GENERATED if one.dialect_options["sqlite"]["autoincrement"])


class _SqliteSignal(Signal):
    """`PRAGMA data_version` changes when another connection, of any process, has committed."""

    def __init__(self, file: DatabaseFile) -> None:
        super().__init__()
        self._connect = partial(file.connect, timeout=BUSY_SECONDS)

    async def _watch(self) -> None:
        connection = await EagerConnection.open(self._connect, _begin_deferred)
        try:
            shortest, longest = WATCH_SECONDS
            pause, seen = shortest, None
            while True:
                rows = await connection.execute_fetchall("PRAGMA data_version")
                version = next(iter(rows))[0]
                if version == seen:
                    pause = min(2 * pause, longest)
                else:
                    pause = shortest
                    self._wake()
                seen = version
                await asyncio.sleep(pause)
        finally:
            await run_to_completion(connection.close())

    def _publish(self) -> None:
        """Do nothing: a commit changes `PRAGMA data_version`."""
