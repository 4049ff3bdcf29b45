"""Changes of the tables in a SQLite file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Index
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateIndex

from replaydb.database.sqlite import begin, location
from replaydb.errors import DatabaseError, DatabaseUnavailableError, NotSupportedError

if TYPE_CHECKING:
    from replaydb.database.sqlite.backend import SqliteBackend


class SqliteSchema:
    """How the tables of a file are changed."""

    def __init__(self, backend: SqliteBackend) -> None:
        self._backend = backend

    @property
    def file(self) -> Path:
        """The file of the database."""
        return self._backend.path

    def is_new_file(self) -> bool:
        """Whether the file does not exist or is empty."""
        return self._backend.file.is_new()

    async def check_target(self, *, exists: bool = False) -> None:
        """Refuse a path at which SQLite would lose commits, or at which there must be a file."""
        try:
            hazard = await asyncio.to_thread(location.hazard, self._backend.path)
        except RuntimeError as error:  # no other thread could be started
            raise DatabaseUnavailableError(f"{self._backend.path}: {error}") from error
        if hazard is not None:
            raise NotSupportedError(f"{self._backend.path}: {hazard}")
        if exists:
            self._backend.file.status()

    def engine(self) -> AsyncEngine:
        """Return an engine without foreign keys: rebuilding a table would delete its child rows."""
        return self._backend.engine(
            self._backend.pragmas("PRAGMA foreign_keys = OFF", begin.WAIT_IN_LOOP),
            begin_with=begin.immediate,
            create=True,
            poolclass=NullPool,
        )

    async def lock(self, connection: AsyncConnection) -> None:
        """Do nothing: BEGIN IMMEDIATE excludes other writers."""

    async def lock_tables(self, connection: AsyncConnection, names: Collection[str]) -> None:
        """Do nothing: BEGIN IMMEDIATE excludes other writers, and readers have snapshots."""

    def share(self, connection: Connection) -> None:
        """Do nothing: a write transaction excludes other writers."""

    async def check_integrity(self, connection: AsyncConnection) -> None:
        """Check the foreign keys, which were off."""
        broken = (await connection.exec_driver_sql("PRAGMA foreign_key_check")).all()
        if broken:
            raise DatabaseError(
                f"{self._backend.path}: {len(broken)} rows would refer to rows that do not exist, "
                f"the first in table {broken[0][0]!r}"
            )

    async def create_indexes(
        self, indexes: Sequence[Index], notify: Callable[[int, int | None], object]
    ) -> None:
        """Create them in one transaction. Other writers wait, and no progress is reported."""
        engine = self.engine()
        try:
            async with engine.begin() as connection:
                for index in indexes:
                    await connection.execute(CreateIndex(index, if_not_exists=True))
        except Exception as error:
            raise self._backend.translate(error) or error from error
        finally:
            await engine.dispose()
