"""One database, open: transactions to write in, snapshots to read from, typed errors out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.backend import Backend, T, Work
from replaydb.errors import DatabaseReadOnlyError, DatabaseUnavailableError, StoreClosedError

#: How often a transaction that lost a race is run again, with growing random pauses.
ATTEMPTS = 8


class Transaction:
    """A read-write transaction under way."""

    def __init__(self, backend: Backend, connection: AsyncConnection) -> None:
        self._backend = backend
        self._connection = connection

    async def run(self, work: Work[T]) -> T:
        """One step: statements, and what is done with their rows; nothing else to wait for."""
        return await self._backend.run(self._connection, work)


class Database:
    """Engines of one backend, and the signal that wakes those who wait."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._writer = backend.writer_engine()
        self._reader = backend.reader_engine()
        self.signal = backend.signal(self._reader)
        self._open = True
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def write(self, work: Work[T]) -> T:
        """Run `work`, which waits for its connection only, in one read-write transaction.

        Raises:
            DatabaseError: As for `transact`; so is the next.
            StoreClosedError: See there.
        """

        async def whole(connection: AsyncConnection) -> T:
            result = await work(connection)
            await connection.commit()
            return result

        return await self.transact(lambda transaction: transaction.run(whole))

    async def transact(self, steps: Callable[[Transaction], Awaitable[T]]) -> T:
        """Take steps in one read-write transaction: all of it is kept, or nothing.

        A transaction that lost a race (deadlock, serialization, a unique key taken meanwhile)
        was rolled back and is run again, so nothing else may come of the steps.

        Raises:
            DatabaseReadOnlyError: The store was opened to be read.
            DatabaseError: The driver's error, typed; nothing was kept.
            StoreClosedError: The database was closed.
        """
        if self.backend.read_only:
            raise DatabaseReadOnlyError(f"{self.backend.shown}: opened with read_only=True")
        for attempt in range(ATTEMPTS):
            try:
                async with self._translated(), self._writer.begin() as connection:
                    return await steps(Transaction(self.backend, connection))
            except _LostRaceError as lost:
                if attempt == ATTEMPTS - 1:
                    raise lost.error from lost.error.__cause__
                await asyncio.sleep(random.uniform(0, 0.002 * 2**attempt))  # noqa: S311
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[AsyncConnection]:
        """A read-only transaction whose statements all see the same data.

        The data is that of its first statement.
        """
        async with self._translated(), self._reader.begin() as connection:
            yield connection

    async def close(self) -> None:
        """Idempotent. Transactions under way end first: disposing spares what is checked out."""
        self._open = False
        await self._idle.wait()
        await self.signal.aclose()
        await self._writer.dispose()
        await self._reader.dispose()

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        if not self._open:
            raise StoreClosedError
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        except PoolTimeoutError as error:
            raise DatabaseUnavailableError(
                "no connection became free in time: too many calls at once"
            ) from error
        except Exception as error:
            typed = self.backend.translate(error)
            if typed is None:
                raise
            cause = error.orig if isinstance(error, DBAPIError) else error
            if self.backend.is_conflict(error):
                raise _LostRaceError(typed, cause) from cause
            raise typed from cause
        finally:
            self._under_way -= 1
            if self._under_way == 0:
                self._idle.set()


class _LostRaceError(Exception):
    def __init__(self, error: Exception, cause: BaseException | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.error.__cause__ = cause
