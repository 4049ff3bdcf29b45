"""Changes of the tables in a SQLite file."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Index
from sqlalchemy.schema import CreateIndex

from replaydb.database.runtime.protocol import T
from replaydb.database.runtime.session import Session, Work
from replaydb.database.sqlite import location
from replaydb.database.sqlite.connection import LOCK_SECONDS, Finish, SqliteConnection
from replaydb.errors import (
    DatabaseError,
    DatabaseUnavailableError,
    NotSupportedError,
    ReplayDBError,
)
from replaydb.util.cancellation import run_to_completion

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

    async def change(self, work: Work[T], *, create: bool = False) -> T:
        """Run it without foreign keys: rebuilding a table would delete its child rows."""
        await self.check_target(exists=not create)

        def finish(driver: sqlite3.Connection, result: T) -> None:
            broken = driver.execute("PRAGMA foreign_key_check").fetchall()
            if broken:
                raise DatabaseError(
                    f"{self._backend.path}: {len(broken)} rows would refer to rows that do not "
                    f"exist, the first in table {broken[0][0]!r}"
                )
            driver.commit()

        return await self._change(work, finish)

    async def read(self, work: Work[T]) -> T:
        """Run it on a connection that cannot write."""
        async with self._opened(self._backend.pragmas_of_reader()) as connection:
            return await connection.transact(
                work, math.inf, finish=lambda driver, _: driver.rollback()
            )

    def lock_tables(self, session: Session, names: Collection[str]) -> None:
        """Do nothing: BEGIN IMMEDIATE excludes other writers, and readers have snapshots."""

    def share(self, session: Session) -> None:
        """Do nothing: a write transaction excludes other writers."""

    async def create_indexes(
        self, indexes: Sequence[Index], notify: Callable[[int, int | None], object]
    ) -> None:
        """Create them in one transaction. Other writers wait, and no progress is reported."""

        def work(session: Session) -> None:
            for index in indexes:
                session.core.execute(CreateIndex(index, if_not_exists=True))

        await self._change(work, lambda driver, _: driver.commit())

    async def _change(self, work: Work[T], finish: Finish) -> T:
        pragmas = self._backend.pragmas("PRAGMA foreign_keys = OFF")
        options = {"create": True, "writes": True}
        async with self._opened(pragmas, timeout=LOCK_SECONDS, **options) as connection:
            return await connection.transact(work, math.inf, finish=finish)

    @asynccontextmanager
    async def _opened(
        self, pragmas: Sequence[str], **options: Any
    ) -> AsyncIterator[SqliteConnection]:
        """Open a connection for the block. Errors are typed."""
        try:
            connection = await self._backend.opened(pragmas, **options)
            try:
                yield connection
            finally:
                await run_to_completion(connection.close())
        except ReplayDBError:
            raise
        except Exception as error:
            raise self._backend.errors.typed(error) or error from error
