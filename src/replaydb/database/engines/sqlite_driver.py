"""aiosqlite with one hop to its thread for a statement, or for a transaction, instead of four."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

import aiosqlite

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
    _before_commit: Callable[[], None]
    _is_to_begin = False
    _stopped = False
    _ended = False
    _ending: asyncio.Future[Any] | None = None

    @classmethod
    async def open(
        cls,
        connect: Callable[[], sqlite3.Connection],
        begin: Begin,
        before_commit: Callable[[], None],
    ) -> Self:
        """Connect, in a thread that does not keep the process alive."""
        connection = cls(connect, iter_chunk_size=1)
        connection._begin = begin
        connection._before_commit = before_commit
        connection._thread.daemon = True
        try:
            await connection
        except BaseException:
            # aiosqlite does not wait for its thread, which may outlive the event loop it tells.
            await asyncio.to_thread(connection._thread.join)
            raise
        return connection

    def begin_soon(self) -> None:
        """A transaction begins; BEGIN itself goes along with its first statement."""
        self._is_to_begin = True
        if threading.current_thread() is not self._thread:  # there `run` may have been stopped
            self._stopped = False

    async def commit(self) -> None:
        """Keep what was done."""
        self._is_to_begin = False
        await self._in_thread(self._commit)

    async def rollback(self) -> None:
        """Undo what is open, if anything is: the pool asks after every transaction.

        A connection whose statement was cancelled, and may still run, is closed and not asked.
        """
        self._is_to_begin = False
        if self._conn.in_transaction:
            await self._in_thread(self._conn.rollback)

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

    def cursor(self) -> _EagerCursor:  # type: ignore[override]
        """A cursor that is closed as soon as it has executed."""
        return _EagerCursor(self)

    async def _stop(self, running: asyncio.Future[Any]) -> None:
        self.cut_off()
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        running.exception()  # seen: who is cancelled is told of that instead

    async def _in_thread(self, work: Callable[..., object], *arguments: Any) -> None:
        if threading.current_thread() is self._thread:
            work(*arguments)
            return
        try:
            await self._execute(work, *arguments)  # type: ignore[no-untyped-call]
        except asyncio.CancelledError:
            self._stopped = True
            raise

    def _commit(self) -> None:
        if self._conn.in_transaction:
            self._before_commit()
            self._conn.commit()

    def _prepare(self) -> None:
        """Before a statement: begin the transaction, unless nobody waits for it any more."""
        self._check()
        if self._is_to_begin:
            self._begin(self._conn, self._check)
            self._is_to_begin = False

    def _check(self) -> None:
        if self._stopped:
            raise _StoppedError


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
        await self._connection._in_thread(self._run, sqlite3.Cursor.execute, sql, parameters)

    async def executemany(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        await self._connection._in_thread(self._run, sqlite3.Cursor.executemany, sql, parameters)

    async def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows

    async def close(self) -> None:
        """It was closed in its thread."""

    def _run(self, execute: Callable[..., object], sql: str, parameters: Sequence[Any]) -> None:
        self._connection._prepare()
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
