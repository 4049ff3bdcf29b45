"""The SQLite engine: one file, one writer at a time, and readers that never wait for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL

from replaydb.database.runtime.pool import Waits
from replaydb.database.runtime.protocol import Traits
from replaydb.database.runtime.signals import Signal
from replaydb.database.sqlite.administration import SqliteAdministration
from replaydb.database.sqlite.connection import SqliteConnection
from replaydb.database.sqlite.errors import SqliteErrors
from replaydb.database.sqlite.file import DatabaseFile
from replaydb.database.sqlite.schema_changes import SqliteSchema
from replaydb.database.sqlite.transactions import CallersLoop, SqliteTransactions
from replaydb.util.cancellation import run_to_completion

#: Connections for reads: half of them for draws, the others for everything else.
READERS = 8
#: A draw of this size is read in one or two milliseconds.
SMALL_DRAW_BYTES = 4 << 20
#: How long SQLite itself waits for a lock. Meanwhile a call cannot be ended or cancelled.
BUSY_SECONDS = 0.5
#: Interval at which waiting coroutines poll for commits of other processes: at first, when idle.
WATCH_SECONDS = (0.002, 0.05)


class SqliteBackend:
    """`sqlite:///FILE`."""

    has_one_connection = False

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
        syncs = durability == "full"
        self.errors = SqliteErrors(self.path)
        self.loop = CallersLoop()
        self._synchronous = f"PRAGMA synchronous = {'FULL' if syncs else 'NORMAL'}"
        self.traits = Traits(
            small_draw_bytes=SMALL_DRAW_BYTES,
            concurrent_draws=max(1, self._readers // 2),
            turn_seconds=0.006,  # waiting writers try every 5 ms: see `SqliteConnection`
            settling_seconds=math.inf,  # a commit is always answered
            syncs=syncs,
        )

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
        return SqliteTransactions(partial(self.opened, self.pragmas(), writes=True), 1, waits)

    def reader(self, waits: Waits) -> SqliteTransactions:
        """Return a few connections that cannot write."""
        connect = partial(self.opened, self.pragmas_of_reader())
        return SqliteTransactions(connect, self._readers, waits)

    def signal(self) -> Signal:
        """Return a signal that polls the change counter of the file."""
        return _SqliteSignal(self.file)

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
        self, pragmas: Sequence[str], *, timeout: float = BUSY_SECONDS, **options: bool
    ) -> Coroutine[Any, Any, SqliteConnection]:
        """Open a connection with these settings: see `SqliteConnection.open`."""
        return SqliteConnection.open(self.file, pragmas, timeout=timeout, **options)

    def pragmas_of_reader(self) -> list[str]:
        """Return the settings of a connection that only reads."""
        return [
            *(() if self.read_only else self.pragmas()),
            # Payloads are read once: a page cache that fits into the processor's is enough.
            "PRAGMA cache_size = -256",
            "PRAGMA query_only = ON",
        ]


class _SqliteSignal(Signal):
    """`PRAGMA data_version` changes when another connection, of any process, has committed."""

    def __init__(self, file: DatabaseFile) -> None:
        super().__init__()
        self._file = file

    async def _watch(self) -> None:
        connection = await SqliteConnection.open(self._file, timeout=BUSY_SECONDS)
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
