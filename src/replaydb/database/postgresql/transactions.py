"""Transactions on PostgreSQL, whose locks wait neither for a client nor for a lost answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from sqlalchemy.util import greenlet_spawn

from replaydb.database.postgresql import commits, limits
from replaydb.database.postgresql.commits import Commit, Transaction
from replaydb.database.postgresql.connecting import READING, WRITING, Connection
from replaydb.database.postgresql.limits import ORDINARY_SECONDS
from replaydb.database.postgresql.session import PostgresqlSession
from replaydb.database.runtime.pool import Pool
from replaydb.database.runtime.protocol import LostRaceError, Pinned, Run
from replaydb.database.runtime.session import Watch, Work
from replaydb.errors import DatabaseReplacedError, OutcomeUnknownError
from replaydb.util.cancellation import run_to_completion

if TYPE_CHECKING:
    from replaydb.database.postgresql.backend import PostgresqlBackend

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long after its deadline a call may wait for the answer to its commit, and then again for the
#: outcome on another connection.
COMMIT_SECONDS = 2.0


class PostgresqlTransactions:
    """The transactions on the connections of a pool, in the event loop of the backend.

    Attributes:
        watch: Called with the session, the SQL and the parameters of each statement.
    """

    watch: Watch | None = None

    def __init__(
        self, backend: PostgresqlBackend, pool: Pool[Connection], idle_seconds: float
    ) -> None:
        """Set the connections, and how long a client may pause in a transaction."""
        self.pool = pool
        self._backend = backend
        self._idle_seconds = idle_seconds

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
            session = await self._begin(connection, end, WRITING)
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
                await self._check_after(session, error, end)
                raise
            if not has_all:
                raise self._has_lost_commits()
            if pinned is not None:
                await pinned()
            if committing is not None:
                committing()
            transaction = connection.proof
            assert transaction is not None  # noqa: S101 - it was proved
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
        self._backend.connections.cut_off()

    async def close(self) -> None:
        """Close the connections."""
        await self.pool.close()

    def _connected(self, end: float) -> AbstractAsyncContextManager[Connection]:
        return self._backend.connections.used(self.pool, end)

    async def _begin(self, connection: Connection, end: float, kind: str) -> PostgresqlSession:
        """Begin a transaction, with limits of its own if those of the connection are too short."""
        statements = [kind]
        seconds = end - asyncio.get_running_loop().time()
        if seconds > ORDINARY_SECONDS or self._backend.url.through_pgbouncer:
            limit = limits.text(connection, seconds, self._idle_seconds, is_local=True)
            statements.append(limit)
        statements += connection.renewal()
        async with asyncio.timeout_at(end):
            await connection.begin("; ".join(statements))
        return self._session(connection)

    async def _begin_snapshot(
        self, connection: Connection, end: float, *, is_single: bool
    ) -> PostgresqlSession:
        """Begin, and check for lost commits."""
        earlier = self._backend.acknowledged.newest  # later ones may be missing from the snapshot
        if is_single:
            session = self._session(connection)
        else:
            session = await self._begin(connection, end, READING)
        async with asyncio.timeout_at(end):
            await self._check(session, earlier)
        return session

    def _session(self, connection: Connection) -> PostgresqlSession:
        session = PostgresqlSession(connection, self._backend.shown)
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

    async def _check_after(self, session: PostgresqlSession, error: Exception, end: float) -> None:
        """Check for lost commits after an error, unless the transaction will be run again."""
        backend, connection = self._backend, session.driver
        is_lost_race = backend.errors.is_conflict(error) or isinstance(error, LostRaceError)
        if connection.is_closed() or backend.errors.is_outage(error) or is_lost_race:
            return
        try:
            async with asyncio.timeout_at(end):
                await connection.abandon()
                await self._check(self._session(connection), backend.acknowledged.newest)
        except DatabaseReplacedError as lost:
            raise lost from error
        except Exception:  # the first error matters more
            return

    async def _commit(
        self,
        connection: Connection,
        transaction: Transaction,
        end: float,
        answer_by: float,
    ) -> None:
        """Commit. If the answer is lost, read the outcome on another connection."""
        loop, backend = asyncio.get_running_loop(), self._backend
        least = loop.time() + COMMIT_SECONDS
        # Not a timeout: if the server is silent, asyncpg takes seconds to end a cancelled call.
        cut = loop.call_at(max(answer_by, least), connection.terminate)
        try:
            await connection.commit()
        except asyncio.CancelledError:
            connection.terminate()  # COMMIT may be under way: see `_settle`
            raise
        except Exception as error:
            if not backend.errors.is_outage(error):
                raise
            connection.terminate()
            backend.connections.lose(connection, error)
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
        connected = self._backend.connections.connected
        try:
            return await commits.was_committed(connected, transaction, end)
        except TimeoutError as error:
            raise OutcomeUnknownError(
                f"{self._backend.shown}: the connection was lost during a commit, and its outcome "
                "could not be read in time. Repeating the call is safe if it names the rows it "
                "writes, such as by group_uid"
            ) from error.__cause__
