"""aiosqlite with one hop to its thread for each statement, instead of four."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Self

import aiosqlite


class EagerConnection(aiosqlite.Connection):
    """A connection whose cursors run a statement and read all its rows in one go.

    A hop costs more than most of our statements (`docs/benchmarks.md`), and SQLAlchemy, which
    reads all rows anyway, takes one each to make a cursor, execute, fetch and close. There is no
    streaming: read long tables in pages.
    """

    @classmethod
    async def open(cls, connect: Callable[[], sqlite3.Connection]) -> Self:
        """Connect, in a thread that does not keep the process alive."""
        connection = cls(connect, iter_chunk_size=1)
        connection._thread.daemon = True
        try:
            await connection
        except BaseException:
            # aiosqlite does not wait for its thread, which may outlive the event loop it tells.
            await asyncio.to_thread(connection._thread.join)
            raise
        return connection

    async def rollback(self) -> None:
        """Undo what is open, if anything is: the pool asks after every transaction.

        A connection whose statement was cancelled, and may still run, is closed and not asked.
        """
        if self._conn.in_transaction:
            await super().rollback()

    def cursor(self) -> _EagerCursor:  # type: ignore[override]
        """A cursor that is closed as soon as it has executed."""
        return _EagerCursor(self)


class _EagerCursor:
    """What SQLAlchemy's adapter asks of an asynchronous cursor."""

    arraysize = 1
    description: Any = None
    rowcount = -1
    lastrowid: int | None = None

    def __init__(self, connection: EagerConnection) -> None:
        self._connection = connection
        self._rows: list[Any] = []

    async def __aenter__(self) -> Self:
        return self

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        await self._in_thread(sqlite3.Cursor.execute, sql, parameters)

    async def executemany(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        await self._in_thread(sqlite3.Cursor.executemany, sql, parameters)

    async def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows

    async def close(self) -> None:
        """It was closed in its thread."""

    async def _in_thread(self, *work: Any) -> None:
        await self._connection._execute(self._run, *work)  # type: ignore[no-untyped-call]

    def _run(self, execute: Callable[..., object], sql: str, parameters: Sequence[Any]) -> None:
        cursor = self._connection._conn.cursor()
        try:
            execute(cursor, sql, parameters)
            self.description = cursor.description
            self.rowcount = cursor.rowcount
            self.lastrowid = cursor.lastrowid
            self._rows = cursor.fetchall()
        finally:
            cursor.close()
