"""Disk space reclaimed from deleted rows (VACUUM)."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import URL

from replaydb.database import migrations
from replaydb.database.engines import backend_for


@dataclass(frozen=True, slots=True)
class VacuumReport:
    """Result of `vacuum`.

    Attributes:
        bytes_before: Size of the database before: the SQLite file with its `-wal`, or on
            PostgreSQL the tables of the store with their indexes.
        bytes_after: Size of the database after.
    """

    bytes_before: int
    bytes_after: int

    @property
    def freed_bytes(self) -> int:
        """Bytes freed; negative if other processes wrote more meanwhile."""
        return self.bytes_before - self.bytes_after


async def vacuum(url: str | URL) -> VacuumReport:
    """Rewrite a database to reclaim the disk space of deleted rows.

    On SQLite, the whole file is rewritten, and other processes cannot write meanwhile; the file
    shrinks when no process reads it any more. On PostgreSQL, `VACUUM FULL` rewrites one table after
    another, and other processes can neither read nor write that table. Blocked calls fail after
    their time limit, usually one minute. Both engines need as much free disk space as the remaining
    data. For payloads outside the database, see `Store.prune`.

    Args:
        url: URL of the store. Its tables must be of this version.

    Returns:
        Sizes before and after.

    Raises:
        DatabaseFullError: There is not enough free disk space; nothing was changed.
        DatabaseUnavailableError: Other processes kept the database locked for one minute.
        SchemaError: The tables are not those of this version.
        DatabaseError: The database cannot be read or written. Or, on PostgreSQL, the user may not
            vacuum a table, for example because the user does not own it.
    """
    backend = backend_for(url)
    await migrations.prepare(backend, migrate=False)
    administration = backend.administration
    before = await administration.size()
    await administration.vacuum()
    return VacuumReport(before, await administration.size())
