"""The SQLite engine: one file, one writer at a time, and readers that never wait for it."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    event,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool, ConnectionPoolEntry, Pool
from sqlalchemy.util import await_

from replaydb.database.runtime.prepared import execute
from replaydb.database.runtime.protocol import Identified, Pinned, T, Work
from replaydb.database.runtime.signals import Signal
from replaydb.database.runtime.writes import Write
from replaydb.database.sqlite import begin, sequences
from replaydb.database.sqlite.administration import SqliteAdministration
from replaydb.database.sqlite.blobs import read_payloads
from replaydb.database.sqlite.driver import AdaptedConnection, Begin, EagerConnection
from replaydb.database.sqlite.file import DatabaseFile
from replaydb.database.sqlite.guard import GuardedConnection
from replaydb.database.sqlite.schema_changes import SqliteSchema
from replaydb.database.statements.episode_group import select_known_uids
from replaydb.errors import (
    DatabaseError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    ReplayDBError,
)
from replaydb.util.cancellation import run_to_completion

#: Connections for reads: half of them for draws, the others for everything else.
READERS = 8
#: How long SQLite itself waits for a lock. Meanwhile a call cannot be ended or cancelled.
BUSY_SECONDS = 0.5
#: Interval at which waiting coroutines poll for commits of other processes: at first, when idle.
WATCH_SECONDS = (0.002, 0.05)

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
        self.file = DatabaseFile(Path(url.database or ""), read_only=read_only)
        self.path = self.file.path
        self.read_only = read_only
        self._readers = pool_size or READERS
        self.concurrent_draws = max(1, self._readers // 2)
        self.syncs = durability == "full"
        self._synchronous = f"PRAGMA synchronous = {'FULL' if self.syncs else 'NORMAL'}"

    @property
    def schema(self) -> SqliteSchema:
        """Changes of the tables."""
        return SqliteSchema(self)

    @property
    def administration(self) -> SqliteAdministration:
        """What an administrator asks of the database."""
        return SqliteAdministration(self)

    @property
    def shown(self) -> str:
        """The URL. It has no password."""
        return self._url.set(drivername="sqlite").render_as_string()

    def writer_engine(self) -> AsyncEngine:
        """Return an engine with one connection, which the writers of this process share."""
        return self.engine(
            self.pragmas(begin.WAIT_IN_LOOP),
            begin_with=begin.immediate,
            poolclass=AsyncAdaptedQueuePool,
            pool_size=1,
            max_overflow=0,
            pool_timeout=None,  # the call has a deadline
        )

    def reader_engine(self) -> AsyncEngine:
        """Return an engine with a few connections that cannot write."""
        return self.engine(
            [
                *(() if self.read_only else self.pragmas()),
                # Payloads are read once: a page cache that fits into the processor's is enough.
                "PRAGMA cache_size = -256",
                "PRAGMA query_only = ON",
            ],
            begin_with=begin.deferred,
            poolclass=AsyncAdaptedQueuePool,
            pool_size=self._readers,
            max_overflow=0,
            pool_timeout=None,
        )

    def without_transactions(self, reader: AsyncEngine) -> AsyncEngine:
        """Return the reader: a transaction costs little, and calls run several statements."""
        return reader

    def run_in_loop(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Run it in the caller's event loop: each connection has a thread for its transactions."""
        return coroutine

    def loop_time(self, time: float) -> float:
        """Return it unchanged: there is one loop."""
        return time

    async def end_loop(self) -> None:
        """Do nothing: it is the caller's."""

    async def begin(self, connection: AsyncConnection, end: float) -> None:
        """Do nothing yet: BEGIN runs with the first statement."""

    def run(self, connection: AsyncConnection, work: Work[T], end: float) -> Coroutine[Any, Any, T]:
        """Run work in the thread of the connection: a hop costs more than most statements."""
        return _driver_of(connection).run(connection.run_sync(work), end)

    def finish(
        self,
        connection: AsyncConnection,
        work: Work[T],
        end: float,
        answer_by: float,
        *,
        unless: Callable[[T], bool] | None = None,
        committing: Callable[[], object] | None = None,
    ) -> Coroutine[Any, Any, T]:
        """Run work and COMMIT in the thread of the connection."""

        def whole(connection: Connection) -> T:
            result = work(connection)
            if unless is None or not unless(result):
                if committing is not None:
                    committing()
                connection.commit()
            return result

        return self.run(connection, whole, end)

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
        return _SqliteSignal(self.file)

    def translate(self, error: BaseException) -> ReplayDBError | None:
        """Choose the type by the error's name, never by its text."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        name = getattr(cause, "sqlite_errorname", None)
        if isinstance(cause, MemoryError):
            return DatabaseUnavailableError(f"{self.path}: not enough memory")
        if isinstance(cause, OSError):
            return DatabaseUnavailableError(f"{self.path}: {cause.strerror or cause}")
        if name == "SQLITE_TOOBIG" or isinstance(cause, OverflowError):
            return DatabaseError(f"{self.path}: {cause}{_TOO_LARGE}")
        if name is None:
            # Damage in a file raises such errors: invalid JSON, or text that is not UTF-8.
            damage = isinstance(cause, sqlite3.Error | json.JSONDecodeError | UnicodeDecodeError)
            return DatabaseError(f"{self.path}: {cause}") if damage else None
        kind: type[DatabaseError] = DatabaseError
        if name in ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"):  # the latter: no space for the -shm
            kind = DatabaseFullError
        elif name.startswith("SQLITE_READONLY"):
            kind = DatabaseReadOnlyError
        elif name.startswith(("SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_IOERR", "SQLITE_BUSY")):
            kind = DatabaseUnavailableError
        return kind(f"{self.path}: {cause} ({name})")

    def is_conflict(self, error: BaseException) -> bool:
        """Return False: after its BEGIN there is no other writer."""
        return False

    def is_outage(self, error: BaseException) -> bool:
        """Whether another process blocked the call, as while it resets or recovers the log."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        name = getattr(cause, "sqlite_errorname", None) or ""
        return name.startswith(("SQLITE_BUSY", "SQLITE_PROTOCOL"))

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
        last = sequences.last_group_id(connection)
        return Identified(known, range(last + 1, last + 1 + len(uids)), has_children=False)

    def read_payloads(self, connection: Connection, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Read the rows, with large payloads as blobs."""
        return read_payloads(connection, ids)

    def pragmas(self, *more: str) -> list[str]:
        """Return the settings of every connection that can write, and more."""
        return [
            "PRAGMA page_size = 16384",  # takes effect in a new file, and only before WAL
            "PRAGMA journal_mode = WAL",
            self._synchronous,
            "PRAGMA foreign_keys = ON",
            "PRAGMA journal_size_limit = 67108864",
            *more,
        ]

    def engine(
        self,
        pragmas: Sequence[str],
        *,
        begin_with: Begin,
        create: bool = False,
        poolclass: type[Pool],
        **pool: Any,
    ) -> AsyncEngine:
        """Return an engine whose connections have these settings and begin in this way."""
        file = self.file
        seconds = begin.LOCK_SECONDS if create else BUSY_SECONDS
        connect = partial(file.connect, pragmas, timeout=seconds, create=create)

        def begin_guarded(connection: Any, check: Callable[[], None]) -> None:
            cast("GuardedConnection", connection).check()
            begin_with(connection, check)

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


class _SqliteSignal(Signal):
    """`PRAGMA data_version` changes when another connection, of any process, has committed."""

    def __init__(self, file: DatabaseFile) -> None:
        super().__init__()
        self._connect = partial(file.connect, timeout=BUSY_SECONDS)

    async def _watch(self) -> None:
        connection = await EagerConnection.open(self._connect, begin.deferred)
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
