"""Write transactions, read snapshots and typed errors of an open database.

Every call has a deadline, `end`, a time of the event loop. It ends by then even if the queue for a
connection, the network, a lock or a restarting server stalls. Until the deadline, a transaction
that is known to have stored nothing is run again. One that may have been committed is never
repeated.
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

from replaydb.cancellation import run_to_completion
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

#: Default time limit of a call, which includes waits for locks, connections and restarts.
PATIENCE_SECONDS = 60.0
#: The same for calls that may touch every group of a buffer.
BULK_SECONDS = 3600.0
#: How far a call may exceed its timeout for a last attempt, or to learn the result of its commit.
GRACE_SECONDS = 2.0
#: The default time limit of a call grows by a second for this many bytes to transfer.
SLOWEST_BYTES_PER_SECOND = 1_000_000
#: Maximum attempts of a transaction that loses races, with growing random pauses between them.
ATTEMPTS = 8
#: Pauses between attempts while the database is unreachable: the first and the longest.
OUTAGE_SECONDS = (0.05, 1.0)
#: How long a failed call may take to read the revision of the tables.
REVISION_SECONDS = 2.0
#: How long `close` waits for calls whose connections it has terminated.
CUT_OFF_SECONDS = 1.0


def end_in(seconds: float) -> float:
    """Return the deadline of a call that may take this long."""
    return asyncio.get_running_loop().time() + seconds


def allowance(num_bytes: int = 0) -> float:
    """Return the default time limit, in seconds, of a call that transfers this many bytes."""
    return PATIENCE_SECONDS + num_bytes / SLOWEST_BYTES_PER_SECOND


class Database:
    """Connections of one backend, and the signal that wakes waiting coroutines."""

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
        answer_by: float = math.inf,
        before_commit: Callable[[T], Awaitable[object]] | None = None,
        is_needed: Callable[[T], bool] | None = None,
        undone: Callable[[], object] | None = None,
    ) -> T:
        """Run `work` in one read-write transaction, and commit it.

        If a transaction loses a race (deadlock, serialization failure, a unique key taken
        meanwhile) or its connection, it is rolled back and run again. So `work` must have no effect
        outside the transaction.

        Args:
            work: Runs statements and processes their rows.
            end: Deadline of the call; by default `PATIENCE_SECONDS` from now.
            answer_by: Time of the event loop by which a caller needs the result of the commit.
            before_commit: Awaited after `work` and before the commit, with the result of `work`.
            is_needed: Whether to await `before_commit`, given the result of `work`; by default
                always.
            undone: Called whenever the transaction is known to have stored nothing.

        Raises:
            DatabaseReadOnlyError: The store was opened read-only.
            OutcomeUnknownError: The connection was lost during the commit, and no server reported
                in time whether it was committed.
            DatabaseError: The driver's error, typed; nothing was stored.
            StoreClosedError: The database was closed.
        """
        backend = self.backend
        if backend.read_only:
            raise DatabaseReadOnlyError(f"{backend.shown}: opened with read_only=True")
        async with self._call(end) as call:
            answer_by = min(answer_by, call.end)
            while True:
                try:
                    async with (
                        self._slot(self._writes, call.end),
                        self._connected(self._writer, call.end) as connection,
                    ):
                        if before_commit is None:
                            return await backend.finish(connection, work, call.end, answer_by)
                        result = await backend.finish(
                            connection, work, call.end, answer_by, unless=is_needed or _always
                        )
                        if (is_needed or _always)(result):
                            await before_commit(result)
                            await backend.commit(connection, call.end, answer_by)
                        return result
                except Exception as error:
                    if undone is not None and not isinstance(error, OutcomeUnknownError):
                        undone()
                    await call.pause_after(error)

    async def read(self, work: Work[T], *, end: float | None = None) -> T:
        """Run `work` in one read-only transaction, whose statements all read the same snapshot.

        The first statement takes the snapshot. A read whose connection was lost is run again.

        Args:
            work: Runs statements and processes their rows.
            end: Deadline of the call; by default `PATIENCE_SECONDS` from now.

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
        """Open one read-only transaction for several reads of the same snapshot.

        The first statement takes the snapshot. A pause between reads must be shorter than a minute.

        Args:
            end: Deadline of the transaction.

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
    async def draw_slot(self, end: float | None = None) -> AsyncIterator[None]:
        """Hold one of the slots that limit how many draws use a reader at the same time.

        A draw takes its slot before its write transaction. Otherwise it would hold locks while it
        waits for a read connection that other draws use.
        """
        async with AsyncExitStack() as slot:
            async with self._call(end) as call:
                await slot.enter_async_context(self._slot(self._draws, call.end))
            yield

    async def close(self, end: float | None = None) -> None:
        """Close all connections. Idempotent.

        Running transactions end first, because disposing of an engine does not close connections
        in use. If a transaction has not ended by `end`, its connection is terminated.
        """
        self._open = False
        try:
            async with asyncio.timeout_at(end or end_in(allowance())):
                await self._dispose()
        except TimeoutError:
            logger.warning(
                "%s: closing timed out; open connections are terminated", self.backend.shown
            )
            self._cut_off()
            with suppress(TimeoutError):
                async with asyncio.timeout(CUT_OFF_SECONDS):
                    await self._dispose()

    async def _dispose(self) -> None:
        await self._idle.wait()
        await self.signal.aclose()
        await self._writer.dispose()
        await self._reader.dispose()

    def _cut_off(self) -> None:
        """Terminate all connections and all waits for a connection. Running calls fail."""
        self._is_cut_off = True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)
        for connection in tuple(self._connections):
            self.backend.cut_off(connection)

    @asynccontextmanager
    async def _wait_until(self, end: float) -> AsyncIterator[None]:
        """Raise `TimeoutError` in the block at `end`, or when connections are terminated."""
        if self._is_cut_off:
            raise StoreClosedError
        async with asyncio.timeout_at(end) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    @asynccontextmanager
    async def _slot(self, slots: asyncio.Semaphore, end: float) -> AsyncIterator[None]:
        """Hold a slot. Slots are granted in order of request; a pool does not keep that order."""
        if slots.locked():
            async with self._wait_until(end):
                await slots.acquire()
        else:
            await slots.acquire()  # at once
        try:
            yield
        finally:
            slots.release()

    def _watched(self, engine: AsyncEngine) -> AsyncEngine:
        """Record the connections of an engine, so that `close` can terminate them."""
        event.listen(
            engine.sync_engine,
            "connect",
            lambda connection, _: self._connections.add(connection.driver_connection),
        )
        return engine

    @asynccontextmanager
    async def _call(self, end: float | None) -> AsyncIterator[_Call]:
        """Run the block as a call: `close` waits for it, and its errors are typed."""
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
        # If the revision cannot be read, the caller gets its original error. The revision is
        # read on a new connection, because with outdated tables even the first statement of an
        # ordinary transaction fails.
        with suppress(Exception):
            async with asyncio.timeout(REVISION_SECONDS), revisions.reading(self.backend) as it:
                return revisions.problem_of(self.backend, await revisions.inspect_schema(it))
        return None

    @asynccontextmanager
    async def _connected(self, engine: AsyncEngine, end: float) -> AsyncIterator[AsyncConnection]:
        """Yield a connection with an open transaction; roll it back unless it was committed."""
        async with self._wait_until(end):
            connection = await engine.connect()
        try:
            try:
                await self.backend.begin(connection, end)
                yield connection
            except BaseException:
                await run_to_completion(self.backend.abandon(connection))
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
        """Run `work` in the transaction."""
        async with self._database._call(self._end) as call:
            return await self._database.backend.run(self._connection, work, call.end)


class _Call:
    """A call in progress.

    Attributes:
        end: Its deadline.
        races: How often its transaction was run again because it had lost a race.
    """

    def __init__(self, database: Database, end: float) -> None:
        self.end = end
        self.races = 0
        self._database = database
        self._pause, self._longest = OUTAGE_SECONDS

    async def pause_after(self, error: Exception) -> None:
        """Wait before the next attempt of the transaction, or raise the error of the last one."""
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
        logger.debug("%s: retrying a transaction after %s", backend.shown, type(error).__name__)
        await asyncio.sleep(pause)
