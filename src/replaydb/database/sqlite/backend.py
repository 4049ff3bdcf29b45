"""The SQLite engine: one file, one writer at a time, and readers that never wait for it."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError

from replaydb.database.runtime.protocol import T
from replaydb.database.runtime.signals import Signal
from replaydb.database.runtime.waits import Waits
from replaydb.database.sqlite import begin
from replaydb.database.sqlite.administration import SqliteAdministration
from replaydb.database.sqlite.connection import Begin, SqliteConnection
from replaydb.database.sqlite.file import DatabaseFile
from replaydb.database.sqlite.schema_changes import SqliteSchema
from replaydb.database.sqlite.transactions import SqliteTransactions
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
        self._url = url
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

    def writer(self, waits: Waits) -> SqliteTransactions:
        """Return one connection, which the writers of this process share."""
        pragmas = self.pragmas(begin.WAIT_IN_LOOP)
        return self._transactions(pragmas, 1, waits, begin.immediate)

    def reader(self, waits: Waits) -> SqliteTransactions:
        """Return a few connections that cannot write."""
        return self._transactions(self.pragmas_of_reader(), self._readers, waits, begin.deferred)

    def run_in_loop(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Run it in the caller's event loop: each connection has a thread for its transactions."""
        return coroutine

    def loop_time(self, time: float) -> float:
        """Return it unchanged: there is one loop."""
        return time

    async def end_loop(self) -> None:
        """Do nothing: it is the caller's."""

    def signal(self) -> Signal:
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

    def opened(
        self, pragmas: Sequence[str], *, timeout: float = BUSY_SECONDS, create: bool = False
    ) -> Coroutine[Any, Any, SqliteConnection]:
        """Open a connection with these settings."""
        connect = partial(self.file.connect, pragmas, timeout=timeout, create=create)
        return SqliteConnection.open(connect)

    def pragmas_of_reader(self) -> list[str]:
        """Return the settings of a connection that only reads."""
        return [
            *(() if self.read_only else self.pragmas()),
            # Payloads are read once: a page cache that fits into the processor's is enough.
            "PRAGMA cache_size = -256",
            "PRAGMA query_only = ON",
        ]

    def _transactions(
        self, pragmas: Sequence[str], size: int, waits: Waits, begin_with: Begin
    ) -> SqliteTransactions:
        file = self.file
        return SqliteTransactions(
            partial(self.opened, pragmas),
            size,
            waits,
            begin=begin_with,
            is_used_once=lambda: file.is_immutable,
        )


class _SqliteSignal(Signal):
    """`PRAGMA data_version` changes when another connection, of any process, has committed."""

    def __init__(self, file: DatabaseFile) -> None:
        super().__init__()
        self._connect = partial(file.connect, timeout=BUSY_SECONDS)

    async def _watch(self) -> None:
        connection = await SqliteConnection.open(self._connect)
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
