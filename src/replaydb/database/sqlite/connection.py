"""Connections to SQLite, each with a thread in which whole transactions run."""

from __future__ import annotations

import asyncio
import math
import random
import sqlite3
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

import aiosqlite

from replaydb.database.runtime.session import Work
from replaydb.database.sqlite.file import DatabaseFile
from replaydb.database.sqlite.guard import GuardedConnection
from replaydb.database.sqlite.session import SqliteSession
from replaydb.errors import DatabaseUnavailableError
from replaydb.util import threads
from replaydb.util.cancellation import run_to_completion

T = TypeVar("T")

#: How long a writer waits for writers of other processes before it fails.
LOCK_SECONDS = 60.0
#: The first and the longest pause between two attempts to begin, in seconds.
PAUSES = (0.0005, 0.005)
#: Ends a transaction, given its result, in the thread of the connection.
Finish = Callable[[sqlite3.Connection, Any], object]


class _StoppedError(Exception):
    """The transaction was cancelled, or its time is up."""


class SqliteConnection(aiosqlite.Connection):
    """A connection and its thread.

    A switch to the thread costs more than most of our statements (`docs/benchmarks.md`), so a
    transaction is sent to it as one function. aiosqlite has no method for that: this module uses
    its queue `_tx`.

    Attributes:
        file: The file.
        driver: The connection of the standard library, only for the thread.
        session: Runs statements in the thread.
        writes: Whether its transactions begin with the lock of writers, which one connection of all
            processes can have. Otherwise their first statement takes a snapshot.
    """

    file: DatabaseFile
    driver: GuardedConnection
    session: SqliteSession
    writes: bool
    _stopped = False
    _is_broken = False
    _ended = False
    _ending: asyncio.Future[Any] | None = None

    @classmethod
    async def open(
        cls,
        file: DatabaseFile,
        pragmas: Sequence[str] = (),
        *,
        timeout: float,
        create: bool = False,
        writes: bool = False,
    ) -> Self:
        """Connect, in a thread that does not keep the process alive.

        Args:
            file: The file.
            pragmas: As for `DatabaseFile.connect`, like `timeout` and `create`.
            timeout: Seconds to wait inside SQLite for locks. Writers wait in `_begin` instead.
            create: Whether to create the file if it does not exist.
            writes: Whether transactions may write.

        Raises:
            DatabaseUnavailableError: No thread can be started.
        """

        def connect_here() -> sqlite3.Connection:
            threads.enter()
            # In SQLite's own busy handler, a cancelled coroutine could not end the wait.
            more = ["PRAGMA busy_timeout = 0"] if writes else []
            connection.driver = file.connect([*pragmas, *more], timeout=timeout, create=create)
            connection.session = SqliteSession(connection.driver, connection.check)
            return connection.driver

        connection = cls(connect_here, iter_chunk_size=1)
        connection.file = file
        connection.writes = writes
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

    def transact(
        self, work: Work[T], end: float, *, finish: Finish | None = None
    ) -> Coroutine[Any, Any, T]:
        """Run a transaction in the thread, or continue one.

        A cancellation or a timeout interrupts the running statement and waits until the thread has
        rolled back, because a connection must not be used by two threads.

        Args:
            work: The transaction.
            end: Deadline, a time of the event loop.
            finish: Ends it. None: it is continued later. Otherwise it is rolled back if it fails.

        Raises:
            TimeoutError: It was not done by `end`, or `cut_off` was called.
        """
        # The thread keeps the last function until the next one, so that must not keep the work.
        return self.run(partial(self._transact, [work], finish), end)

    async def run(self, call: Callable[[], T], end: float) -> T:
        """Run a function in the thread, as `transact` does."""
        if self._ended:
            raise DatabaseUnavailableError("the connection was closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._stopped = False
        self._tx.put_nowait((answer, call))
        timer = None if end == math.inf else loop.call_at(end, self.cut_off)
        try:
            return await answer
        except asyncio.CancelledError:
            self.cut_off()
            await run_to_completion(self._until_idle())
            raise
        except Exception:
            if self._stopped:
                raise TimeoutError from None
            raise
        finally:
            if timer is not None:
                timer.cancel()

    @property
    def is_open(self) -> bool:
        """Whether a transaction has begun and not ended."""
        return self.driver.in_transaction

    @property
    def is_usable(self) -> bool:
        """Whether another transaction may run."""
        return not (self._is_broken or self._ended or self.file.is_immutable)

    def stop(self) -> asyncio.Future[Any] | None:
        """End the thread, only once: calls that are sent to it later would never be answered."""
        if not self._ended:
            self._ended = True
            # aiosqlite does not close the connection if its opening was cancelled.
            self._tx.put_nowait((None, self._disconnect))
            self._ending = super().stop()
        return self._ending

    def cut_off(self) -> None:
        """Interrupt the running statement, and refuse further ones of the transaction."""
        self._stopped = True
        self.driver.interrupt()

    def check(self) -> None:
        """Raise if the transaction must end. Called in the thread before each statement."""
        if self._stopped:
            raise _StoppedError

    def undo(self) -> None:
        """Roll back, in the thread. A late interrupt may end the first attempt."""
        for _ in range(2):
            with suppress(sqlite3.Error):
                if self.driver.in_transaction:
                    self.driver.rollback()
                return
        self._is_broken = True

    async def abandon(self) -> None:
        """Roll back, in the thread."""
        await self.run(self.undo, math.inf)

    def _transact(self, works: list[Work[T]], finish: Finish | None) -> T:
        driver = self.driver
        try:
            self.check()
            if not driver.in_transaction:
                driver.check()
                self._begin()
            result = works.pop()(self.session)
            if finish is not None:
                self.check()
                finish(driver, result)
        except BaseException:
            if finish is not None:
                self.undo()
            raise
        return result

    def _begin(self) -> None:
        """Begin a transaction. A writer waits for those of other processes."""
        deadline = time.monotonic() + LOCK_SECONDS
        pause, longest = PAUSES
        while True:
            try:
                self.driver.execute("BEGIN IMMEDIATE" if self.writes else "BEGIN")
            except sqlite3.OperationalError as error:
                if not (self.writes and error.sqlite_errorname.startswith("SQLITE_BUSY")):
                    raise
                if time.monotonic() > deadline:
                    raise DatabaseUnavailableError(
                        f"{self.file.path}: another process has held the write lock for "
                        f"{LOCK_SECONDS:g} s (SQLITE_BUSY)"
                    ) from error
                # With jitter, so that waiting processes spread out.
                time.sleep(random.uniform(pause / 2, pause))  # noqa: S311
                pause = min(2 * pause, longest)
                self.check()
            else:
                return

    def _disconnect(self) -> None:
        if "driver" in vars(self):
            self.driver.close()

    async def _until_idle(self) -> None:
        """Wait until the thread has run all that was sent to it."""
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tx.put_nowait((idle, _nothing))
        await idle


def _nothing() -> None:
    """Run after everything before it."""
