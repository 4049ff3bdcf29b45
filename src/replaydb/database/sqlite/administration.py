"""What an administrator asks of a SQLite file: health, sizes, sequences."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from replaydb.database.sqlite import begin, checkup, damage, sequences
from replaydb.database.sqlite.driver import EagerConnection
from replaydb.domain.results import Finding
from replaydb.packs import Instance
from replaydb.util.cancellation import run_to_completion

if TYPE_CHECKING:
    from replaydb.database.sqlite.backend import SqliteBackend


class SqliteAdministration:
    """Health, size and sequences of a file."""

    #: None: a file has permissions instead of roles.
    roles = None

    def __init__(self, backend: SqliteBackend) -> None:
        self._backend = backend

    async def examine_connections(self, end: float) -> list[Finding]:
        """Return nothing: a file is opened directly."""
        return []

    def examine(self, connection: Connection) -> list[Finding]:
        """Check the library, the file, its log and its disk."""
        return list(checkup.findings(connection, self._backend.path))

    def replication_lag(self, connection: Connection) -> None:
        """Return None: a file has no standby."""

    def damage(self, connection: Connection) -> list[tuple[str, str]]:
        """Run SQLite's own check, and find values that their columns cannot have."""
        return list(damage.damage(connection))

    async def size(self) -> int:
        """Return the size of the file and of its write-ahead log."""
        return await asyncio.to_thread(self._backend.file.size)

    async def vacuum(self) -> None:
        """Rewrite the file. It shrinks when the write-ahead log is checkpointed."""
        connect = partial(self._backend.file.connect, timeout=begin.LOCK_SECONDS)
        try:
            connection = await EagerConnection.open(connect, begin.deferred)
            try:
                await connection.execute_fetchall("VACUUM")
                await connection.execute_fetchall("PRAGMA wal_checkpoint(TRUNCATE)")
            except asyncio.CancelledError:
                connection.cut_off()
                raise
            finally:
                await run_to_completion(connection.close())
        except sqlite3.Error as error:
            raise self._backend.translate(error) or error from error

    def instance(self, connection: Connection) -> Instance:
        """Look at the file. Its device number is not a fact: it can change with each mount."""
        return self._backend.file.instance()

    def last_ids(self, connection: Connection) -> dict[str, int | None]:
        """Read AUTOINCREMENT's counters."""
        return sequences.last_ids(connection)

    def advance_sequences(self, connection: Connection, ids: Mapping[str, int]) -> None:
        """Advance AUTOINCREMENT's counters."""
        sequences.advance(connection, ids)
