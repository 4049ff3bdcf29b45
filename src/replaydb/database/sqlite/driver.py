"""aiosqlite connections with one thread hop per statement, or one per transaction."""

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

from replaydb.errors import DatabaseUnavailableError
from replaydb.util import threads
from replaydb.util.cancellation import run_to_completion
from replaydb.util.memory import take

T = TypeVar("T")

#: Bytes of a blob that are read at once: few enough to be still in the processor's cache when they
#: are copied to their destination.
BLOB_CHUNK = 1 << 16

#: Begins a transaction, in the thread of the connection. While it waits for a lock, it calls its
#: second argument regularly, which raises if the wait must end.
Begin = Callable[[sqlite3.Connection, Callable[[], None]], None]


class _StoppedError(Exception):
    """The transaction was cancelled."""


class EagerConnection(aiosqlite.Connection):
    """A connection whose cursors run a statement and fetch all its rows in one thread hop.

    A hop costs more than most of our statements (`docs/benchmarks.md`). SQLAlchemy's own driver
    needs one each to create a cursor, execute, fetch and close, and reads all rows anyway. There is
    no streaming: read long tables in pages.
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

        def connect_here() -> sqlite3.Connection:
            threads.enter()
            return connect()

        connection = cls(connect_here, iter_chunk_size=1)
        connection._begin = begin
        connection._thread.daemon = True
        try:
            connection._thread.start()
        except RuntimeError as error:  # it has no more specific type
            raise DatabaseUnavailableError(f"no connection can be opened: {error}") from error
        try:
            await connection._connect()
        except BaseException:
            # aiosqlite does not wait for its thread, which might report to a closed event loop.
            if (ending := connection.stop()) is not None:
                await run_to_completion(asyncio.wait([ending]))
            raise
        return connection

    def begin_soon(self) -> None:
        """Begin a transaction. BEGIN itself runs with its first statement."""
        self._is_to_begin = True
        if not self.is_here:  # in the thread, `run` may have been stopped
            self._stopped = False

    async def commit(self) -> None:
        """Commit the transaction."""
        self._is_to_begin = False
        await self.in_thread(self._conn.commit)

    async def rollback(self) -> None:
        """Roll back an open transaction. The pool calls this after every transaction.

        A connection whose statement was cancelled, and may still run, is closed instead.
        """
        self._is_to_begin = False
        if self._conn.in_transaction:
            await self.in_thread(self._conn.rollback)

    async def run(self, coroutine: Coroutine[Any, Any, T], end: float) -> T:
        """Run a coroutine in the thread of the connection. It may wait only for this connection.

        Its statements need no further hops. A cancellation or a timeout interrupts the running
        statement and waits until the thread has left it, because a connection must not be used by
        two threads.

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
        except _StoppedError:  # `cut_off` was called
            raise TimeoutError from None

    def stop(self) -> asyncio.Future[Any] | None:
        """End the thread, only once: calls that are sent to it later would never be answered."""
        if not self._ended:
            self._ended = True
            self._ending = super().stop()
        return self._ending

    def cut_off(self) -> None:
        """Interrupt the running statement, and refuse further ones."""
        self._stopped = True
        self._conn.interrupt()

    def read_blob(self, table: str, column: str, rowid: int) -> memoryview:
        """Read a blob. Call this in the thread of the connection."""
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
        """Run a function in the thread of the connection, which may be the current thread."""
        if self.is_here:
            work(*arguments)
            return
        try:
            await self._execute(work, *arguments)  # type: ignore[no-untyped-call]
        except asyncio.CancelledError:
            self._stopped = True
            raise

    def sql_cursor(self) -> sqlite3.Cursor:
        """Return a cursor, and begin the transaction if necessary. Call this in the thread.

        Raises:
            _StoppedError: The transaction was cancelled.
        """
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
        running.exception()  # retrieved: the caller gets the cancellation or the timeout instead

    def _check(self) -> None:
        if self._stopped:
            raise _StoppedError


class AdaptedConnection(AsyncAdapt_aiosqlite_connection):
    """Adapter of the connection for SQLAlchemy."""

    __slots__ = ()

    def cursor(self, server_side: bool = False) -> Any:
        """Return a cursor that has fetched all its rows when `execute` returns."""
        return _Cursor(self, self.driver_connection)


class _Cursor:
    """The methods of a DB-API cursor that SQLAlchemy and `prepared` use."""

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
        """Do nothing: the cursor was closed in its thread."""

    async def _async_soft_close(self) -> None:
        """Do nothing, as `close`."""

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
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise AssertionError("a transaction may wait for its own connection only")
