"""Space of rows that are gone, given back to the system."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import URL

from replaydb.database import migrations
from replaydb.database.engines import backend_for


@dataclass(frozen=True, slots=True)
class VacuumReport:
    """What `vacuum` has done.

    Attributes:
        bytes_before: What the database took before: a SQLite file with its `-wal`, or the tables of
            the store with their indexes on PostgreSQL.
        bytes_after: What it takes now.
    """

    bytes_before: int
    bytes_after: int

    @property
    def freed_bytes(self) -> int:
        """What was given back; negative where others have written more meanwhile."""
        return self.bytes_before - self.bytes_after


async def vacuum(url: str | URL) -> VacuumReport:
    """Write a database anew without the space of rows that are gone, as large as these were.

    On SQLite the whole file, during which nobody else can write; it shrinks when nobody reads any
    more. On PostgreSQL each table by `VACUUM FULL`, during which nobody else can read or write that
    table. Others wait, each call within its timeout, a minute unless it was told otherwise. Both
    need as much free space as what is left. Payloads outside are `Store.prune`'s.

    Args:
        url: The store, whose tables are up to date.

    Raises:
        DatabaseFullError: There is no space to write it anew; nothing was changed.
        DatabaseUnavailableError: Others have kept it locked for a minute.
        SchemaError: The tables are not those of this version.
        DatabaseError: The database cannot be read or written; or on PostgreSQL the user may not
            vacuum a table, which its owner may.
    """
    backend = backend_for(url)
    await migrations.current(url)  # a file that is not there is not made
    await migrations.prepare(backend, migrate=False)
    before = await backend.size()
    await backend.vacuum()
    return VacuumReport(before, await backend.size())
