"""aiosqlite with one hop to its thread for a statement, or none within a transaction."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

import aiosqlite
from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_connection
from sqlalchemy.util import await_

from replaydb.cancellation import to_the_end
from replaydb.errors import DatabaseUnavailableError
from replaydb.memory import take

T = TypeVar("T")

#: Bytes of a blob that are read at once: few enough to be in the processor's cache still when they
#: are copied to where they stay.
BLOB_CHUNK = 1 << 16

#: Begins a transaction, in the thread of the connection. Where it has to wait for somebody, it
#: calls its second argument now and then, which raises when the wait is to end.
Begin = Callable[[sqlite3.Connection, Callable[[], None]], None]


class _StoppedError(Exception):
    """The transaction was cancelled."""


class EagerConnection(aiosqlite.Connection):
    """A connection whose cursors run a statement and read all its rows in one go.

    A hop costs more than most of our statements (`docs/benchmarks.md`), and SQLAlchemy, which
    reads all rows anyway, takes one each to make a cursor, execute, fetch and close. There is no
    streaming: read long tables in pages.
    """

    _begin: Begin
    _is_to_begin = False
    _stopped = False
    _ended = False
    _ending: asyncio.Future[Any] | None = None

    @classmethod
    async def open(cls, connect: Callable[[], sqlite3.Connection], begin: Begin) -> Self:
        """Connect, in a thread that does not keep the process alive.

        Raises:
            DatabaseUnavailableError: No thread can be started.
        """
        connection = cls(connect, iter_chunk_size=1)
        connection._begin = begin
        connection._thread.daemon = True
        try:
            connection._thread.start()
        except RuntimeError as error:  # there is no other sign of it
            raise DatabaseUnavailableError(f"no connection can be opened: {error}") from error
        try:
            await connection._connect()
        except BaseException:
            # aiosqlite does not wait for its thread, which may outlive the event loop it tells.
            if (ending := connection.stop()) is not None:
                await to_the_end(asyncio.wait([ending]))
            raise
        return connection

    def begin_soon(self) -> None:
        """A transaction begins; BEGIN itself goes along with its first statement."""
        self._is_to_begin = True
        if not self.is_here:  # there `run` may have been stopped
            self._stopped = False

    async def commit(self) -> None:
        """Keep what was done."""
        self._is_to_begin = False
        await self.in_thread(self._conn.commit)

    async def rollback(self) -> None:
        """Undo what is open, if anything is: the pool asks after every transaction.

        A connection whose statement was cancelled, and may still run, is closed and not asked.
        """
        self._is_to_begin = False
        if self._conn.in_transaction:
            await self.in_thread(self._conn.rollback)

    async def run(self, coroutine: Coroutine[Any, Any, T], end: float) -> T:
        """Run a coroutine that waits for nothing but this connection, all of it in its thread.

        Its statements then need no hop at all. Who cancels, or whose time is up, interrupts the
        statement that runs and waits until the thread is out of it: nobody may touch a connection
        that another thread uses.

        Raises:
            TimeoutError: It was stopped at `end`, a time of the event loop.
        """
        self._stopped = False
        hop = self._execute(_finish, coroutine)  # type: ignore[no-untyped-call]
        running: asyncio.Future[T] = asyncio.ensure_future(hop)
        try:
            await asyncio.wait([running], timeout=end - asyncio.get_running_loop().time())
        except asyncio.CancelledError:
            await self._stop(running)
            raise
        if not running.done():
            await self._stop(running)
            if running.exception() is not None:
                raise TimeoutError
        try:
            return running.result()
        except _StoppedError:  # the database was cut off
            raise TimeoutError from None

    def stop(self) -> asyncio.Future[Any] | None:
        """End the thread, once: after that nothing it is asked to do is ever answered."""
        if not self._ended:
            self._ended = True
            self._ending = super().stop()
        return self._ending

    def cut_off(self) -> None:
        """Let what runs fail, and nothing more be run."""
        self._stopped = True
        self._conn.interrupt()

    def read_blob(self, table: str, column: str, rowid: int) -> memoryview:
        """A blob, in the thread of the connection."""
        self._check()
        with self._conn.blobopen(table, column, rowid, readonly=True) as blob:
            data = take(len(blob))
            for begin in range(0, len(data), BLOB_CHUNK):
                data[begin : begin + BLOB_CHUNK] = blob.read(BLOB_CHUNK)
        return data

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of the connection."""
        return threading.current_thread() is self._thread

    async def in_thread(self, work: Callable[..., object], *arguments: Any) -> None:
        """Do something in the thread of the connection, which may be this one."""
        if self.is_here:
            work(*arguments)
            return
        try:
            await self._execute(work, *arguments)  # type: ignore[no-untyped-call]
        except asyncio.CancelledError:
            self._stopped = True
            raise

    def sql_cursor(self) -> sqlite3.Cursor:
        """A cursor, in the thread: the transaction begins, unless nobody waits for it any more."""
        self._check()
        if self._is_to_begin:
            self._begin(self._conn, self._check)
            self._is_to_begin = False
        return self._conn.cursor()

    async def _stop(self, running: asyncio.Future[Any]) -> None:
        self.cut_off()
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        running.exception()  # seen: who is cancelled is told of that instead

    def _check(self) -> None:
        if self._stopped:
            raise _StoppedError


class AdaptedConnection(AsyncAdapt_aiosqlite_connection):
    """The connection as SQLAlchemy has it."""

    __slots__ = ()

    def cursor(self, server_side: bool = False) -> Any:
        """One that has all its rows as soon as it has executed."""
        return _Cursor(self, self.driver_connection)


class _Cursor:
    """What SQLAlchemy, or who goes past it, asks of a cursor of the Python DB-API."""

    arraysize = 1
    description: Any = None
    rowcount = -1
    lastrowid: int | None = None

    def __init__(self, adapted: AdaptedConnection, connection: EagerConnection) -> None:
        self._adapted = adapted
        self._connection = connection
        self._rows: list[Any] = []

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        self._in_thread(sqlite3.Cursor.execute, sql, parameters)

    def executemany(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        self._in_thread(sqlite3.Cursor.executemany, sql, parameters)

    def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows

    def fetchmany(self, size: int = 1) -> list[Any]:
        rows, self._rows = self._rows[:size], self._rows[size:]
        return rows

    def fetchone(self) -> Any:
        return self._rows.pop(0) if self._rows else None

    def close(self) -> None:
        """It was closed in its thread."""

    async def _async_soft_close(self) -> None:
        """The same, when SQLAlchemy asks."""

    def _in_thread(self, *call: Any) -> None:
        if self._connection.is_here:
            self._run(*call)
            return
        try:
            await_(self._connection.in_thread(self._run, *call))
        except ValueError as error:  # the thread has ended
            self._adapted._handle_exception(error)

    def _run(self, execute: Callable[..., object], sql: str, parameters: Sequence[Any]) -> None:
        cursor = self._connection.sql_cursor()
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
