"""One database, open: transactions to write in, snapshots to read from, typed errors out.

Every call has an end, a time of the event loop by which it is over whatever stalls: the queue for
a connection, the network, a lock, a server that restarts. Until then what is known to have left
nothing behind is run again. What may have been committed is never repeated.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from replaydb.cancellation import to_the_end
from replaydb.database import revisions
from replaydb.database.engines.protocol import Backend, LostRaceError, T, Work
from replaydb.errors import (
    DatabaseError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    OutcomeUnknownError,
    SchemaError,
    StoreClosedError,
)

logger = logging.getLogger(__name__)

#: How long a call waits for the database (a lock, a connection, a restart) where nobody said.
PATIENCE_SECONDS = 60.0
#: The same for calls that may have to touch every group of a buffer.
BULK_SECONDS = 3600.0
#: What a call with a timeout may take beyond it to have a last try, or to learn of its commit.
GRACE_SECONDS = 2.0
#: A call that moves so many bytes may take a second longer.
SLOWEST_BYTES_PER_SECOND = 1_000_000
#: How often a transaction that lost a race is run again, with growing random pauses.
ATTEMPTS = 8
#: Pauses between attempts to reach a server that is away: the first, the longest.
OUTAGE_SECONDS = (0.05, 1.0)
#: How long a call that failed may take to read the revision of the tables.
REVISION_SECONDS = 2.0
#: What calls get to end in that were cut off.
CUT_OFF_SECONDS = 1.0


def end_in(seconds: float) -> float:
    """The end of a call that may take so long."""
    return asyncio.get_running_loop().time() + seconds


def allowance(num_bytes: int = 0) -> float:
    """Seconds that a call may take which moves so many bytes, where nobody said."""
    return PATIENCE_SECONDS + num_bytes / SLOWEST_BYTES_PER_SECOND


class Database:
    """Engines of one backend, and the signal that wakes those who wait."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._connections: WeakSet[Any] = WeakSet()
        self._writer = self._watched(backend.writer_engine())
        self._reader = self._watched(backend.reader_engine())
        self.signal = backend.signal(self._watched)
        self._writes = asyncio.Semaphore(backend.concurrent_writes)
        self._draws = asyncio.Semaphore(backend.concurrent_draws)
        self._open = True
        self._is_cut_off = False
        self._waits: set[asyncio.Timeout] = set()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def write(
        self,
        work: Work[T],
        *,
        end: float | None = None,
        hear_by: float = math.inf,
        before_commit: Callable[[T], Awaitable[object]] | None = None,
        is_needed: Callable[[T], bool] | None = None,
        undone: Callable[[], object] | None = None,
    ) -> T:
        """Run `work` in one read-write transaction, and commit it.

        A transaction that lost a race (deadlock, serialization, a unique key taken meanwhile) or
        its connection was rolled back and is run again, so nothing else may come of it.

        Args:
            work: Statements, and what is done with their rows.
            end: When the call is over; by default in `PATIENCE_SECONDS`.
            hear_by: When somebody wants to have heard of the commit.
            before_commit: Waited for between the two, with what `work` returned.
            is_needed: Whether it is, by what `work` returned; by default always.
            undone: Called whenever the transaction is known to have come to nothing.

        Raises:
            DatabaseReadOnlyError: The store was opened to be read.
            OutcomeUnknownError: The connection was lost during the commit, and the server could
                not be asked what became of it.
            DatabaseError: The driver's error, typed; nothing was kept.
            StoreClosedError: The database was closed.
        """
        backend = self.backend
        if backend.read_only:
            raise DatabaseReadOnlyError(f"{backend.shown}: opened with read_only=True")
        async with self._call(end) as call:
            hear_by = min(hear_by, call.end)
            while True:
                try:
                    async with (
                        self._turn(self._writes, call.end),
                        self._connected(self._writer, call.end) as connection,
                    ):
                        if before_commit is None:
                            return await backend.finish(connection, work, call.end, hear_by)
                        result = await backend.finish(
                            connection, work, call.end, hear_by, unless=is_needed or _always
                        )
                        if (is_needed or _always)(result):
                            await before_commit(result)
                            await backend.commit(connection, call.end, hear_by)
                        return result
                except Exception as error:
                    if undone is not None and not isinstance(error, OutcomeUnknownError):
                        undone()
                    await call.pause_after(error)

    async def read(self, work: Work[T], *, end: float | None = None) -> T:
        """Run `work` in one read-only transaction, whose statements all see the same data.

        The data is that of the first statement. A read whose connection was lost is run again.

        Args:
            work: Statements, and what is done with their rows.
            end: When the call is over; by default in `PATIENCE_SECONDS`.

        Raises:
            DatabaseError: The driver's error, typed.
            StoreClosedError: The database was closed.
        """
        async with self._call(end) as call:
            while True:
                try:
                    async with self._connected(self._reader, call.end) as connection:
                        return await self.backend.run(connection, work, call.end)
                except Exception as error:
                    await call.pause_after(error)

    @asynccontextmanager
    async def snapshot(self, end: float) -> AsyncIterator[Snapshot]:
        """One read-only transaction for several reads, which all see the same data.

        The data is that of the first statement. Between reads it may rest for less than a minute.

        Args:
            end: When it is over.

        Raises:
            DatabaseError: The driver's error, typed. Nothing is run again.
            StoreClosedError: The database was closed.
        """
        async with AsyncExitStack() as stack:
            async with self._call(end) as call:
                connected = self._connected(self._reader, call.end)
                connection = await stack.enter_async_context(connected)
            yield Snapshot(self, connection, call.end)

    @asynccontextmanager
    async def turn_to_draw(self, end: float | None = None) -> AsyncIterator[None]:
        """The right to have one reader in the block without waiting for a free connection.

        To be had before the write transaction of a draw, which would otherwise hold its locks
        while it waits for others to read.
        """
        async with AsyncExitStack() as turn:
            async with self._call(end) as call:
                await turn.enter_async_context(self._turn(self._draws, call.end))
            yield

    async def close(self, end: float | None = None) -> None:
        """Let go of the database. Idempotent.

        Transactions under way end first: disposing spares what is checked out. Those that have
        not ended by `end` are cut off.
        """
        self._open = False
        try:
            async with asyncio.timeout_at(end or end_in(allowance())):
                await self._let_go()
        except TimeoutError:
            logger.warning("%s: closing took too long; connections are cut off", self.backend.shown)
            self._cut_off()
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_OFF_SECONDS):
                    await self._let_go()

    async def _let_go(self) -> None:
        await self._idle.wait()
        await self.signal.aclose()
        await self._writer.dispose()
        await self._reader.dispose()

    def _cut_off(self) -> None:
        """End what is under way, and what waits for a connection: nothing goes on after it."""
        self._is_cut_off = True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)
        for connection in tuple(self._connections):
            self.backend.cut_off(connection)

    @asynccontextmanager
    async def _wait_until(self, end: float) -> AsyncIterator[None]:
        """A wait that is over by `end`, or when the database is cut off."""
        if self._is_cut_off:
            raise StoreClosedError
        async with asyncio.timeout_at(end) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    @asynccontextmanager
    async def _turn(self, turns: asyncio.Semaphore, end: float) -> AsyncIterator[None]:
        """One of the turns, by order of coming: a pool serves whoever asks at the right moment."""
        if turns.locked():
            async with self._wait_until(end):
                await turns.acquire()
        else:
            await turns.acquire()  # at once
        try:
            yield
        finally:
            turns.release()

    def _watched(self, engine: AsyncEngine) -> AsyncEngine:
        """Remember connections, to cut them off if need be."""
        event.listen(
            engine.sync_engine,
            "connect",
            lambda connection, _: self._connections.add(connection.driver_connection),
        )
        return engine

    @asynccontextmanager
    async def _call(self, end: float | None) -> AsyncIterator[_Call]:
        """A call under way, which closing waits for; its errors are typed."""
        if not self._open:
            raise StoreClosedError
        self._under_way += 1
        self._idle.clear()
        call = _Call(self, end_in(allowance()) if end is None else end)
        try:
            yield call
        except TimeoutError as error:
            raise DatabaseUnavailableError(f"{self.backend.shown}: no answer in time") from error
        except LostRaceError as error:
            raise DatabaseError(
                f"{self.backend.shown}: the transaction lost {call.races + 1} races against other "
                f"writers ({error}); nothing was stored, and the call can be repeated"
            ) from error
        except Exception as error:
            typed = self.backend.translate(error)
            if typed is None:
                raise
            if type(typed) is DatabaseError:  # such as a missing table or column
                typed = await self._schema_problem() or typed
            raise typed from (error.orig if isinstance(error, DBAPIError) else error)
        finally:
            self._under_way -= 1
            if self._under_way == 0:
                self._idle.set()

    async def _schema_problem(self) -> SchemaError | None:
        """Return why this version cannot use the tables, if they were changed after the opening."""
        # If it cannot be read, the error that the call failed with says more. A connection of its
        # own: transactions begin with a statement that needs a table of this version.
        with suppress(Exception):
            async with asyncio.timeout(REVISION_SECONDS), revisions.reading(self.backend) as it:
                return revisions.problem_of(self.backend, await revisions.look(it))
        return None

    @asynccontextmanager
    async def _connected(self, engine: AsyncEngine, end: float) -> AsyncIterator[AsyncConnection]:
        """A connection on which a transaction has begun; what is not committed is rolled back."""
        async with self._wait_until(end):
            connection = await engine.connect()
        try:
            try:
                await self.backend.begin(connection, end)
                yield connection
            except BaseException:
                await to_the_end(self.backend.abandon(connection))
                raise
        finally:
            await connection.close()


def _always(_: object) -> bool:
    return True


class Snapshot:
    """A read-only transaction."""

    def __init__(self, database: Database, connection: AsyncConnection, end: float) -> None:
        self._database = database
        self._connection = connection
        self._end = end

    async def read(self, work: Work[T]) -> T:
        """Run `work` in it."""
        async with self._database._call(self._end) as call:
            return await self._database.backend.run(self._connection, work, call.end)


class _Call:
    """A call under way.

    Attributes:
        end: When it is over.
        races: How often its transaction was run again because it had lost a race.
    """

    def __init__(self, database: Database, end: float) -> None:
        self.end = end
        self.races = 0
        self._database = database
        self._pause, self._longest = OUTAGE_SECONDS

    async def pause_after(self, error: Exception) -> None:
        """Wait before the call's transaction is run again, or raise the error it failed of."""
        backend = self._database.backend
        lost = isinstance(error, LostRaceError) or backend.is_conflict(error)
        if lost and self.races < ATTEMPTS - 1:
            pause = random.uniform(0, 0.002 * 2**self.races)  # noqa: S311
            self.races += 1
        elif backend.is_outage(error) and self._database._open:
            pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        else:
            raise error
        if end_in(pause) > self.end:
            raise error
        logger.debug("%s: running again what failed of %s", backend.shown, type(error).__name__)
        await asyncio.sleep(pause)
