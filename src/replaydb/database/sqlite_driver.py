"""aiosqlite with one hop to its thread for a statement, or for a transaction, instead of four."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

import aiosqlite

T = TypeVar("T")


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

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that waits for nothing but this connection, all of it in its thread.

        Its statements then need no hop at all. Who cancels waits until it has ended: nobody may
        touch a connection that another thread uses.
        """
        hop = self._execute(_finish, coroutine)  # type: ignore[no-untyped-call]
        running: asyncio.Future[T] = asyncio.ensure_future(hop)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            running.exception()  # seen: the caller is told of the cancellation instead
            raise

    def is_here(self) -> bool:
        """Whether the caller is in the thread of this connection."""
        return threading.current_thread() is self._thread

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
        if self._connection.is_here():
            self._run(*work)
        else:
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


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never has to wait."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise AssertionError("a transaction may wait for its own connection only")
