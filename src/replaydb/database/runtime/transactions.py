"""Write transactions, read snapshots and typed errors of an open database.

A call runs in the event loop of its backend (`Backend.loop`) from its first wait for a
connection to its result, so no lock waits for the event loop of the caller.

Every call has a deadline, `end`, a time of the event loop. It ends by then even if the queue for a
connection, the network, a lock or a restarting server stalls. Until the deadline, a transaction
that is known to have stored nothing is run again. One that may have been committed is never
repeated.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakSet

from sqlalchemy.exc import DBAPIError

from replaydb.database.runtime import revisions
from replaydb.database.runtime.group_commit import Gate
from replaydb.database.runtime.pool import Waits
from replaydb.database.runtime.protocol import Backend, LostRaceError, Pinned, Run, T
from replaydb.database.runtime.session import Session, Work
from replaydb.errors import (
    DatabaseError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    NotSupportedError,
    OutcomeUnknownError,
    SchemaError,
    StoreClosedError,
)
from replaydb.util.cancellation import run_to_completion

logger = logging.getLogger(__name__)

U = TypeVar("U")
#: Reads in a session, given the result of a write. It calls its last argument when it has run a
#: statement, which takes the snapshot.
ReadAfter = Callable[[Session, T, Callable[[], object]], U]

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
#: How long a transaction waits for a snapshot before it checks whether connections are short.
PIN_SECONDS = 0.2
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
        self._process = os.getpid()
        self._waits = Waits(backend.shown)
        self.writer = backend.writer(self._waits)
        self.reader = backend.reader(self._waits)
        self.signal = backend.signal()
        self._draws = asyncio.Semaphore(backend.traits.concurrent_draws)
        self._open = True
        self._is_closed = False
        self._closing = asyncio.Lock()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        _databases.add(self)

    def write(
        self,
        work: Work[T],
        *,
        end: float | None = None,
        gate: Gate | None = None,
    ) -> Coroutine[Any, Any, T]:
        """Run `work` in one read-write transaction, and commit it.

        If a transaction loses a race (deadlock, serialization failure, a unique key taken
        meanwhile) or its connection, it is rolled back and run again. So `work` must have no effect
        outside the transaction.

        Args:
            work: Runs statements and processes their rows, perhaps in another thread.
            end: Deadline of the call; by default `PATIENCE_SECONDS` from now.
            gate: Closed before each COMMIT, and opened whenever the transaction is known to have
                stored nothing. Its `answer_by` is a time of the event loop of the caller.

        Raises:
            DatabaseReadOnlyError: The store was opened read-only.
            OutcomeUnknownError: The connection was lost during the commit, and no server reported
                in time whether it was committed.
            DatabaseError: The driver's error, typed; nothing was stored.
            StoreClosedError: The database was closed.
        """
        end = self._there(end)
        if gate is None:
            return self._run(self._write(work, end))
        answer_by = self.backend.loop.time(gate.answer_by)
        return self._run(self._write(work, end, answer_by, undone=gate.open, committing=gate.close))

    def write_then_read(
        self,
        work: Work[T],
        read: ReadAfter[T, U],
        *,
        is_needed: Callable[[T], bool],
        num_bytes: Callable[[T], int],
        end: float | None = None,
        undone: Callable[[], object] | None = None,
    ) -> Coroutine[Any, Any, tuple[T, U | None]]:
        """Run `work` as `write` does, and then `read` in a snapshot that its locks protect.

        The snapshot is taken on another connection, after `work` and before the commit. All this
        time the locks of `work` exclude changes by others, so `read` finds what `work` found,
        although others may delete it after the commit. What `work` has changed itself is not in the
        snapshot. It does not matter, then, that the statements that `work` has postponed run while
        the snapshot is taken. Only COMMIT waits for it: no lock is held while the results of `read`
        are transferred. If the reader loses its connection, it takes another snapshot.

        The number of such calls at a time is limited. Otherwise one would hold locks while it waits
        for a connection that others use.

        Args:
            work: As in `write`.
            read: Reads, given the result of `work`. Postponed reads may not have been processed.
            is_needed: Whether to read, given the result of `work`.
            num_bytes: Number of bytes to read, given the result of `work`. Sets the default `end`.
            end: As in `write`.
            undone: Called whenever the transaction is known to have stored nothing, perhaps in
                another thread.

        Returns:
            The result of `work`, and that of `read`, or None if that was not needed.

        Raises:
            Exception: As for `write`, or from `read`. After an error of `read` that did not prevent
                its snapshot, the transaction is committed.
        """
        end = self._there(end)
        return self._run(self._write_then_read(work, read, is_needed, num_bytes, end, undone))

    async def _write(
        self,
        work: Work[T],
        end: float | None,
        answer_by: float = math.inf,
        *,
        undone: Callable[[], object] | None = None,
        committing: Callable[[], object] | None = None,
        begin_to_read: Callable[[T], Awaitable[Pinned]] | None = None,
        is_needed: Callable[[T], bool] = bool,
    ) -> T:
        """Run a write transaction until it is committed: see `Transactions.write`."""
        backend = self.backend
        if backend.read_only:
            raise DatabaseReadOnlyError(f"{backend.shown}: opened with read_only=True")
        async with self._call(end) as call:
            answer_by = min(answer_by, call.end)
            while True:
                try:
                    return await self.writer.write(
                        work,
                        call.end,
                        answer_by,
                        committing=committing,
                        begin_to_read=begin_to_read,
                        is_needed=is_needed,
                    )
                except Exception as error:
                    if undone is not None and not isinstance(error, OutcomeUnknownError):
                        undone()
                    await call.pause_after(error)

    async def _write_then_read(
        self,
        work: Work[T],
        read: ReadAfter[T, U],
        is_needed: Callable[[T], bool],
        num_bytes: Callable[[T], int],
        end: float | None,
        undone: Callable[[], object] | None,
    ) -> tuple[T, U | None]:
        reading: asyncio.Task[U] | None = None

        async def begin_to_read(result: T) -> Pinned:
            nonlocal reading
            await stack.aclose()  # end the read of an earlier attempt
            read_by = end_in(allowance(num_bytes(result))) if end is None else end
            reading, pinned = self._begin_to_read(read, result, read_by)
            stack.push_async_callback(_end, reading)
            return pinned

        async with AsyncExitStack() as slot, AsyncExitStack() as stack:
            async with self._call(end) as call:
                await slot.enter_async_context(self._waits.slot(self._draws, call.end))
            result = await self._write(
                work, end, undone=undone, begin_to_read=begin_to_read, is_needed=is_needed
            )
            if reading is None or not is_needed(result):
                return result, None
            return result, await reading

    def _begin_to_read(
        self, read: ReadAfter[T, U], result: T, end: float
    ) -> tuple[asyncio.Task[U], Pinned]:
        """Begin to read. The function that is also returned waits until the snapshot is taken."""
        loop = asyncio.get_running_loop()
        pin = asyncio.Event()

        def work(session: Session) -> U:
            return read(session, result, lambda: loop.call_soon_threadsafe(pin.set))

        reading = asyncio.create_task(self._read(work, end))

        async def pinned() -> None:
            waiting = asyncio.create_task(pin.wait())
            some = asyncio.FIRST_COMPLETED
            try:
                while not (pin.is_set() or reading.done()):
                    await asyncio.wait([reading, waiting], timeout=PIN_SECONDS, return_when=some)
                    if not pin.is_set() and self.backend.has_one_connection:
                        reading.cancel()
                        raise LostRaceError("there was no connection for its snapshot")
            finally:
                waiting.cancel()
            if not pin.is_set():
                await reading  # raises the error that prevented the snapshot

        return reading, pinned

    def read(
        self, work: Work[T], *, end: float | None = None, single: bool = False
    ) -> Coroutine[Any, Any, T]:
        """Run `work` in one read-only transaction, whose statements all read the same snapshot.

        The first statement takes the snapshot. A read whose connection was lost is run again.

        Args:
            work: Runs statements and processes their rows.
            end: Deadline of the call; by default `PATIENCE_SECONDS` from now.
            single: On a server, `work` runs a single statement, for which the transaction is
                omitted: BEGIN and ROLLBACK would take a round trip each.

        Raises:
            DatabaseError: The driver's error, typed.
            StoreClosedError: The database was closed.
        """
        return self._run(self._read(work, self._there(end), single=single))

    async def _read(self, work: Work[T], end: float | None, *, single: bool = False) -> T:
        async with self._call(end) as call:
            while True:
                try:
                    return await self.reader.read(work, call.end, single=single)
                except Exception as error:
                    await call.pause_after(error)
                    # The server may have ended it: a transaction sets the time limits of the call.
                    single = False

    async def let_others_in(self) -> None:
        """Pause between two transactions of a call, so that others that wait for a lock get it."""
        await asyncio.sleep(self.backend.traits.turn_seconds)

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
        stack, end = AsyncExitStack(), self.backend.loop.time(end)
        try:
            run = await self._run(self._open_snapshot(stack, end))
            yield Snapshot(self, run, end)
        finally:  # also if the caller was cancelled while it was opened
            if self._open:
                await run_to_completion(self.backend.loop.run(stack.aclose()))

    async def _open_snapshot(self, stack: AsyncExitStack, end: float) -> Run[Any]:
        async with self._call(end) as call:
            return await stack.enter_async_context(self.reader.snapshot(call.end))

    async def close(self, end: float | None = None) -> None:
        """Close all connections. Idempotent.

        Running transactions end first, because disposing of an engine does not close connections
        in use. If a transaction has not ended by `end`, its connection is terminated. In a forked
        process this does nothing: the connections belong to the process that opened them.
        """
        if self.is_inherited:
            return
        self._open = False
        async with self._closing:
            if self._is_closed:
                return
            try:
                async with asyncio.timeout_at(end or end_in(allowance())):
                    await self._until_idle()
                    await self._disconnect()
            except TimeoutError:
                logger.warning(
                    "%s: closing timed out; open connections are terminated", self.backend.shown
                )
                await self.backend.loop.run(self._cut_off())
                for step in (self._until_idle, self._disconnect):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(CUT_OFF_SECONDS):
                            await step()
            self._is_closed = True
            await self.backend.loop.close()

    @property
    def is_inherited(self) -> bool:
        """Whether another process opened it, before a fork."""
        return os.getpid() != self._process

    def _run(self, call: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Run a call in the event loop of the backend. After closing, do not begin another one."""
        if self._open and not self.is_inherited:
            return self.backend.loop.run(call)
        call.close()
        if self._open:
            raise NotSupportedError(
                f"this store was opened by process {self._process}, before a fork; open another one"
            )
        raise StoreClosedError

    def _there(self, end: float | None) -> float | None:
        """Convert a deadline to a time of the backend's event loop."""
        return None if end is None else self.backend.loop.time(end)

    async def _until_idle(self) -> None:
        await self.backend.loop.run(self._idle.wait())

    async def _disconnect(self) -> None:
        await self.signal.aclose()
        await self.backend.loop.run(self._close_connections())

    async def _close_connections(self) -> None:
        await self.writer.close()
        await self.reader.close()

    async def _cut_off(self) -> None:
        """Terminate all connections and all waits for a connection. Running calls fail."""
        self._waits.cut_off()
        self.writer.cut_off()
        self.reader.cut_off()

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
            typed = self.backend.errors.typed(error)
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
            async with asyncio.timeout(REVISION_SECONDS):
                found = await self.backend.schema.read(revisions.inspect_schema)
            return revisions.problem_of(self.backend, found)
        return None


async def _end(reading: asyncio.Task[Any]) -> None:
    """Cancel the read of a call that failed."""
    reading.cancel()
    await asyncio.wait([reading])
    if not reading.cancelled():
        reading.exception()  # marked as retrieved: the call raises its own error


_databases: WeakSet[Database] = WeakSet()
_inherited: list[Database] = []
if hasattr(os, "register_at_fork"):
    # In a forked process, deleting a connection would remove it from the selector of its event
    # loop, which both processes share.
    os.register_at_fork(after_in_child=lambda: _inherited.extend(_databases))


class Snapshot:
    """A read-only transaction."""

    def __init__(self, database: Database, run: Run[Any], end: float) -> None:
        self._database = database
        self._run = run
        self._end = end

    async def read(self, work: Work[T]) -> T:
        """Run `work` in the transaction."""
        return await self._database._run(self._read(work))

    async def _read(self, work: Work[T]) -> T:
        async with self._database._call(self._end) as call:
            result: T = await self._run(work, call.end)
            return result


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
        lost = isinstance(error, LostRaceError) or backend.errors.is_conflict(error)
        if lost and self.races < ATTEMPTS - 1:
            pause = random.uniform(0, 0.002 * 2**self.races)  # noqa: S311
            self.races += 1
        elif backend.errors.is_outage(error) and self._database._open:
            pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        else:
            raise error
        if end_in(pause) > self.end:
            raise error
        logger.debug("%s: retrying a transaction after %s", backend.shown, type(error).__name__)
        await asyncio.sleep(pause)
