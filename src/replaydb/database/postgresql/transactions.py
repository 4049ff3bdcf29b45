"""Transactions on PostgreSQL, whose locks wait neither for a client nor for a lost answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import greenlet_spawn

from replaydb.database.postgresql import commits, plans
from replaydb.database.postgresql.commits import Commit, Transaction
from replaydb.database.postgresql.connecting import connected_at
from replaydb.database.postgresql.limits import (
    IDLE_IN_TRANSACTION_SECONDS,
    ORDINARY_SECONDS,
    set_limits,
)
from replaydb.database.postgresql.session import PostgresqlSession
from replaydb.database.runtime.protocol import LostRaceError, Pinned, Run
from replaydb.database.runtime.session import Watch, Work
from replaydb.database.runtime.waits import Waits
from replaydb.errors import DatabaseReplacedError, OutcomeUnknownError
from replaydb.util.cancellation import run_to_completion

if TYPE_CHECKING:
    from replaydb.database.postgresql.backend import PostgresqlBackend

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A rollback that takes longer than this is abandoned.
ROLLBACK_SECONDS = 1.0
#: How long after its deadline a call may wait for the answer to its commit, and then again for the
#: outcome on another connection.
COMMIT_SECONDS = 2.0


#: Key of the open transaction of a connection.
_BEGUN = "replaydb_begun"
#: Options of the driver's transactions.
_WRITING: Mapping[str, Any] = {"isolation": "read_committed"}
_READING: Mapping[str, Any] = {"isolation": "repeatable_read", "readonly": True}


class PostgresqlTransactions:
    """The transactions on the connections of one engine, in the event loop of the backend.

    The engine gives and takes connections. Transactions are the driver's.

    Attributes:
        watch: Called with the session, the SQL and the parameters of each statement.
    """

    watch: Watch | None = None

    def __init__(
        self, backend: PostgresqlBackend, engine: AsyncEngine, size: int, waits: Waits
    ) -> None:
        """Set the engine, and the maximum number of its connections."""
        self._backend = backend
        self._engine = engine
        self._waits = waits
        self._slots = asyncio.Semaphore(size)
        self._lost_at = 0.0  # when a connection was last lost, by `monotonic`

    async def write(
        self,
        work: Work[T],
        end: float,
        answer_by: float,
        *,
        committing: Callable[[], object] | None = None,
        begin_to_read: Callable[[T], Awaitable[Pinned]] | None = None,
        is_needed: Callable[[T], bool] = bool,
    ) -> T:
        """Run work, prove and commit. An error may be due to lost commits, so check for them."""
        async with self._connected(end) as connection:
            idle_seconds = self._backend.url.frozen_seconds
            await self._begin(connection, end, idle_seconds, _WRITING)
            session = self._session(connection)
            pinned: Pinned | None = None
            try:
                async with asyncio.timeout_at(end):
                    result = await greenlet_spawn(work, session)
                if begin_to_read is not None and is_needed(result):
                    pinned = await begin_to_read(result)
                async with asyncio.timeout_at(end):
                    acknowledged = self._backend.acknowledged
                    has_all = await greenlet_spawn(commits.prove, session, acknowledged)
            except Exception as error:  # such as of a foreign key to a lost row
                await self._check_after(connection, error, end)
                raise
            if not has_all:
                raise self._has_lost_commits()
            if pinned is not None:
                await pinned()
            if committing is not None:
                committing()
            transaction = commits.transaction_of(connection)
            try:
                await self._commit(connection, transaction, end, answer_by)
            except asyncio.CancelledError:
                # The caller may now undo the transaction, so it must not be committed after that.
                await run_to_completion(self._settle(transaction))
                raise
            self._backend.acknowledged.add(transaction)
            return result

    async def read(self, work: Work[T], end: float, *, single: bool = False) -> T:
        """Run work in a snapshot, or in no transaction if it is a single statement."""
        async with self._connected(end) as connection:
            # Behind PgBouncer each transaction sets its time limits.
            is_single = single and not self._backend.url.through_pgbouncer
            session = await self._begin_snapshot(connection, end, is_single=is_single)
            async with asyncio.timeout_at(end):
                return await greenlet_spawn(work, session)

    @asynccontextmanager
    async def snapshot(self, end: float) -> AsyncIterator[Run[Any]]:
        """Open a snapshot."""
        async with self._connected(end) as connection:
            session = await self._begin_snapshot(connection, end, is_single=False)

            async def run(work: Work[Any], end: float) -> Any:
                async with asyncio.timeout_at(end):
                    return await greenlet_spawn(work, session)

            yield run

    def cut_off(self) -> None:
        """Close connections without waiting for the server, those of the signal included."""
        for driver in tuple(self._backend.pooled):
            driver.terminate()

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.dispose()

    @asynccontextmanager
    async def _connected(self, end: float) -> AsyncIterator[AsyncConnection]:
        """Yield a connection. A transaction that is still open after the block is rolled back."""
        async with self._waits.slot(self._slots, end):
            async with self._waits.until(end):
                connection = await self._open()
            failed: BaseException | None = None
            try:
                yield connection
            except BaseException as error:
                failed = error
                raise
            finally:
                try:
                    is_open = not connection.invalidated and _BEGUN in connection.info
                    if is_open or failed is not None:
                        await run_to_completion(self._abandon(connection, failed))
                finally:  # even if the caller was cancelled once more
                    await connection.close()

    async def _open(self) -> AsyncConnection:
        """Return a connection that is not known to be lost, nor older than one that was."""
        while True:
            connection = await self._engine.connect()
            driver = await _driver_of(connection)
            if not driver.is_closed() and connected_at(connection) > self._lost_at:
                return connection
            await connection.invalidate()
            await connection.close()

    async def _abandon(self, connection: AsyncConnection, failed: BaseException | None) -> None:
        """Roll back. If the network has stalled, terminate the connection on this side only."""
        if not connection.invalidated:
            driver, begun = await _driver_of(connection), connection.info.pop(_BEGUN, None)
            if isinstance(failed, TimeoutError) or not isinstance(failed, Exception | None):
                driver.terminate()  # what was cancelled may still run
            try:
                if begun is not None and not driver.is_closed():
                    async with asyncio.timeout(ROLLBACK_SECONDS):
                        await begun.rollback()
            except Exception:  # the error that led here matters more
                driver.terminate()
            if not driver.is_closed():
                return
            await connection.invalidate(failed)
        if isinstance(failed, Exception) and self._backend.errors.is_outage(failed):
            self._lost_at = monotonic()

    async def _begin(
        self,
        connection: AsyncConnection,
        end: float,
        idle_seconds: float,
        kind: Mapping[str, Any] | None,
    ) -> None:
        """Begin a transaction with its limits. `kind` None: set only the limits."""
        async with asyncio.timeout_at(end):
            now, driver = asyncio.get_running_loop().time(), await _driver_of(connection)
            is_long = end - now > ORDINARY_SECONDS and kind is not None
            await set_limits(
                connection,
                end - now,
                idle_seconds,
                is_local=is_long or self._backend.url.through_pgbouncer,
            )
            if kind is not None:
                await plans.renew(connection, now)
                begun = driver.transaction(**kind)
                await begun.start()
                connection.info[_BEGUN] = begun

    async def _begin_snapshot(
        self, connection: AsyncConnection, end: float, *, is_single: bool
    ) -> PostgresqlSession:
        """Begin, and check for lost commits."""
        earlier = self._backend.acknowledged.newest  # later ones may be missing from the snapshot
        kind = None if is_single else _READING
        await self._begin(connection, end, IDLE_IN_TRANSACTION_SECONDS, kind)
        session = self._session(connection)
        async with asyncio.timeout_at(end):
            await self._check(session, earlier)
        return session

    def _session(self, connection: AsyncConnection) -> PostgresqlSession:
        assert connection.sync_connection is not None  # noqa: S101 - it is connected
        session = PostgresqlSession(connection.sync_connection, self._backend.shown)
        session.watch = self.watch
        return session

    async def _check(self, session: PostgresqlSession, earlier: Mapping[UUID, Commit]) -> None:
        """Raise if the server has lost commits that were acknowledged before the snapshot."""
        through = self._backend.url.through_pgbouncer
        has_all = await greenlet_spawn(commits.has_all, session, earlier, through_pgbouncer=through)
        if not has_all:
            raise self._has_lost_commits()

    def _has_lost_commits(self) -> DatabaseReplacedError:
        return DatabaseReplacedError(
            f"{self._backend.shown}: the server has lost commits that it acknowledged: it has an "
            "older state, such as a restored backup or a standby without the newest commits; ids "
            "that this process has may belong to other rows now, so close the store and open it "
            "again"
        )

    async def _check_after(self, connection: AsyncConnection, error: Exception, end: float) -> None:
        """Check for lost commits after an error, unless the transaction will be run again."""
        backend = self._backend
        is_lost_race = backend.errors.is_conflict(error) or isinstance(error, LostRaceError)
        if connection.invalidated or backend.errors.is_outage(error) or is_lost_race:
            return
        try:
            async with asyncio.timeout_at(end):
                await self._abandon(connection, None)
                await self._check(self._session(connection), backend.acknowledged.newest)
        except DatabaseReplacedError as lost:
            raise lost from error
        except Exception:  # the first error matters more
            return

    async def _commit(
        self,
        connection: AsyncConnection,
        transaction: Transaction,
        end: float,
        answer_by: float,
    ) -> None:
        """Commit. If the answer is lost, read the outcome on another connection."""
        loop, backend = asyncio.get_running_loop(), self._backend
        least = loop.time() + COMMIT_SECONDS
        driver = await _driver_of(connection)
        # Not a timeout: if the server is silent, asyncpg takes seconds to end a cancelled call.
        cut = loop.call_at(max(answer_by, least), driver.terminate)
        try:
            await connection.info.pop(_BEGUN).commit()
        except asyncio.CancelledError:
            driver.terminate()  # COMMIT may be under way: see `_settle`
            raise
        except Exception as error:
            if not backend.errors.is_outage(error):
                raise
            await connection.invalidate(error)
            logger.warning("%s: reading the outcome of a commit after: %s", backend.shown, error)
            if not await self._was_committed(transaction, max(end, least) + COMMIT_SECONDS):
                raise
        finally:
            cut.cancel()

    async def _settle(self, transaction: Transaction) -> None:
        with suppress(Exception):
            end = asyncio.get_running_loop().time() + COMMIT_SECONDS
            await self._was_committed(transaction, end)

    async def _was_committed(self, transaction: Transaction, end: float) -> bool:
        engine = self._backend.engine(isolation_level="AUTOCOMMIT", poolclass=NullPool)
        try:
            return await commits.was_committed(engine, transaction, end)
        except TimeoutError as error:
            raise OutcomeUnknownError(
                f"{self._backend.shown}: the connection was lost during a commit, and its outcome "
                "could not be read in time. Repeating the call is safe if it names the rows it "
                "writes, such as by group_uid"
            ) from error.__cause__


async def _driver_of(connection: AsyncConnection) -> Any:
    return (await connection.get_raw_connection()).driver_connection
