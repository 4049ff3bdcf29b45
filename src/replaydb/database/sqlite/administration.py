"""What an administrator asks of a SQLite file: health, sizes, sequences."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping
from typing import TYPE_CHECKING

from replaydb.database.runtime.protocol import Client
from replaydb.database.runtime.session import Session
from replaydb.database.sqlite import checkup, connection, damage, sequences
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

    def clients(self, session: Session) -> list[Client]:
        """Return nothing: a file does not show who has it open."""
        return []

    def examine(self, session: Session) -> list[Finding]:
        """Check the library, the file, its log and its disk."""
        return list(checkup.findings(session.core, self._backend.path))

    def replication_lag(self, session: Session) -> None:
        """Return None: a file has no standby."""

    def damage(self, session: Session) -> list[tuple[str, str]]:
        """Run SQLite's own check, and find values that their columns cannot have."""
        return list(damage.damage(session.core))

    async def size(self) -> int:
        """Return the size of the file and of its write-ahead log."""
        return await asyncio.to_thread(self._backend.file.size)

    async def vacuum(self) -> None:
        """Rewrite the file. It shrinks when the write-ahead log is checkpointed."""
        timeout = connection.LOCK_SECONDS
        try:
            one = await connection.SqliteConnection.open(self._backend.file, timeout=timeout)
            try:
                await one.execute_fetchall("VACUUM")
                await one.execute_fetchall("PRAGMA wal_checkpoint(TRUNCATE)")
            except asyncio.CancelledError:
                one.cut_off()
                raise
            finally:
                await run_to_completion(one.close())
        except sqlite3.Error as error:
            raise self._backend.errors.typed(error) or error from error

    def instance(self, session: Session) -> Instance:
        """Look at the file. Its device number is not a fact: it can change with each mount."""
        return self._backend.file.instance()

    def last_ids(self, session: Session) -> dict[str, int | None]:
        """Read AUTOINCREMENT's counters."""
        return sequences.last_ids(session)

    def advance_sequences(self, session: Session, ids: Mapping[str, int]) -> None:
        """Advance AUTOINCREMENT's counters."""
        sequences.advance(session, ids)
