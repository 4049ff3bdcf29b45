"""Transactions on PostgreSQL, whose locks wait neither for a client nor for a lost answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import greenlet_spawn

from replaydb.database.postgresql import commits, plans
from replaydb.database.postgresql.commits import Commit, Transaction
from replaydb.database.postgresql.limits import (
    IDLE_IN_TRANSACTION_SECONDS,
    ORDINARY_SECONDS,
    set_limits,
)
from replaydb.database.postgresql.session import PostgresqlSession
from replaydb.database.runtime.protocol import LostRaceError, Pinned, Run
from replaydb.database.runtime.session import Work
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


class PostgresqlTransactions:
    """The transactions on the connections of one engine, in the event loop of the backend."""

    def __init__(
        self, backend: PostgresqlBackend, engine: AsyncEngine, size: int, waits: Waits
    ) -> None:
        """Set the engine, and the maximum number of its connections."""
        self._backend = backend
        self._engine = engine
        self._waits = waits
        self._slots = asyncio.Semaphore(size)

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
        async with self._connected(self._engine, end) as connection:
            seconds = self._backend.url.frozen_seconds
            await self._begin(connection, end, idle_seconds=seconds)
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
        engine = self._engine
        # Behind PgBouncer each transaction sets its time limits.
        is_single = single and not self._backend.url.through_pgbouncer
        if is_single:
            engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        async with self._connected(engine, end) as connection:
            await self._begin_snapshot(connection, end, is_single=is_single)
            session = self._session(connection)
            async with asyncio.timeout_at(end):
                return await greenlet_spawn(work, session)

    @asynccontextmanager
    async def snapshot(self, end: float) -> AsyncIterator[Run[Any]]:
        """Open a snapshot."""
        async with self._connected(self._engine, end) as connection:
            await self._begin_snapshot(connection, end, is_single=False)
            session = self._session(connection)

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
    async def _connected(self, engine: AsyncEngine, end: float) -> AsyncIterator[AsyncConnection]:
        """Yield a connection; roll its transaction back unless it was committed."""
        async with self._waits.slot(self._slots, end):
            async with self._waits.until(end):
                connection = await engine.connect()
            try:
                try:
                    yield connection
                except BaseException:
                    await run_to_completion(self._abandon(connection))
                    raise
            finally:
                await connection.close()

    async def _begin(
        self,
        connection: AsyncConnection,
        end: float,
        *,
        idle_seconds: float,
        is_single: bool = False,
    ) -> None:
        """Set the limits of the next transaction. BEGIN is sent with its first statement."""
        async with asyncio.timeout_at(end):
            now = asyncio.get_running_loop().time()
            is_long = end - now > ORDINARY_SECONDS and not is_single
            await set_limits(
                connection,
                end - now,
                idle_seconds,
                is_local=is_long or self._backend.url.through_pgbouncer,
            )
            if not is_single:
                await plans.renew(connection, now)

    async def _begin_snapshot(
        self, connection: AsyncConnection, end: float, *, is_single: bool
    ) -> None:
        """Begin, and check for lost commits."""
        earlier = self._backend.acknowledged.newest  # later ones may be missing from the snapshot
        idle_seconds = IDLE_IN_TRANSACTION_SECONDS
        await self._begin(connection, end, idle_seconds=idle_seconds, is_single=is_single)
        async with asyncio.timeout_at(end):
            await self._check(connection, earlier)

    def _session(self, connection: AsyncConnection) -> PostgresqlSession:
        assert connection.sync_connection is not None  # noqa: S101 - it is connected
        return PostgresqlSession(connection.sync_connection, self._backend.shown)

    async def _check(self, connection: AsyncConnection, earlier: Mapping[UUID, Commit]) -> None:
        """Raise if the server has lost commits that were acknowledged before the snapshot."""
        session, through = self._session(connection), self._backend.url.through_pgbouncer
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
                await connection.rollback()
                await self._check(connection, backend.acknowledged.newest)
        except DatabaseReplacedError as lost:
            raise lost from error
        except Exception:  # the first error matters more
            return

    async def _commit(
        self, connection: AsyncConnection, transaction: Transaction, end: float, answer_by: float
    ) -> None:
        """Commit. If the answer is lost, read the outcome on another connection."""
        loop, backend = asyncio.get_running_loop(), self._backend
        least = loop.time() + COMMIT_SECONDS
        driver: Any = (await connection.get_raw_connection()).driver_connection
        # Not a timeout: if the server is silent, asyncpg takes seconds to end a cancelled call.
        cut = loop.call_at(max(answer_by, least), driver.terminate)
        try:
            await connection.commit()
        except Exception as error:
            if not backend.errors.is_outage(error):
                raise
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
        engine = self._backend.engine(isolation_level="READ COMMITTED", poolclass=NullPool)
        try:
            return await commits.was_committed(engine, transaction, end)
        except TimeoutError as error:
            raise OutcomeUnknownError(
                f"{self._backend.shown}: the connection was lost during a commit, and its outcome "
                "could not be read in time. Repeating the call is safe if it names the rows it "
                "writes, such as by group_uid"
            ) from error.__cause__

    async def _abandon(self, connection: AsyncConnection) -> None:
        """Roll back. If the network has stalled, terminate the connection on this side only."""
        try:
            async with asyncio.timeout(ROLLBACK_SECONDS):
                await connection.rollback()
        except Exception:  # the error that led here matters more
            with suppress(Exception):
                raw: Any = await connection.get_raw_connection()
                raw.driver_connection.terminate()
                await connection.invalidate()
