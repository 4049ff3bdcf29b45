"""The PostgreSQL engine: one server, shared by many machines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Any
from uuid import UUID

import asyncpg
from sqlalchemy import (
    Connection,
    DateTime,
    ExceptionContext,
    event,
    func,
    select,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from replaydb.database.postgresql import (
    commits,
    messages,
    plans,
    sequences,
    standby,
)
from replaydb.database.postgresql.administration import PostgresqlAdministration
from replaydb.database.postgresql.commits import Acknowledged, Commit, Transaction
from replaydb.database.postgresql.connecting import ConnectionLog, read_types
from replaydb.database.postgresql.limits import (
    IDLE_IN_TRANSACTION_SECONDS,
    ORDINARY_SECONDS,
    set_limits,
)
from replaydb.database.postgresql.schema_changes import PostgresqlSchema
from replaydb.database.postgresql.shortage import Shortage
from replaydb.database.postgresql.signal import NoSignal, PostgresqlSignal
from replaydb.database.runtime.loop_thread import LoopThread
from replaydb.database.runtime.prepared import PIPELINE, TOGETHER, execute
from replaydb.database.runtime.protocol import Identified, LostRaceError, Pinned, T, Work
from replaydb.database.runtime.signals import Signal
from replaydb.database.runtime.writes import Pipeline, Write, fit_together
from replaydb.database.statements.payload import select_payloads
from replaydb.database.tables.schema import episode_group
from replaydb.database.urls import PostgresqlURL
from replaydb.errors import (
    DatabaseError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseReplacedError,
    DatabaseUnavailableError,
    OutcomeUnknownError,
    ReplayDBError,
)
from replaydb.util.cancellation import run_to_completion

logger = logging.getLogger(__name__)

#: A rollback that takes longer than this is abandoned.
ROLLBACK_SECONDS = 1.0
#: How long after its deadline a call may wait for the answer to its commit, and then again for the
#: outcome on another connection.
COMMIT_SECONDS = 2.0
POOL_SIZE = 8
_NO_SETTINGS: Mapping[str, str] = MappingProxyType({})

#: Shut down, crashed, starting up, out of connections; no lock within `lock_timeout`.
_OUTAGES = {"57P01", "57P02", "57P03", "53300", "55P03"}
_CONFLICTS = {"40001", "40P01"}  # serialization, deadlock

#: Errors of limits that an administrator may have set, with the setting.
_LIMITS: Mapping[str, str] = {
    "57014": "statement_timeout of this role, database or server is too short for the statement, "
    "unless it was canceled by hand",
    "55P03": "a lock was not free within lock_timeout of this role, database or server",
    "25P03": "idle_in_transaction_session_timeout of this role, database or server is too short",
    "25P04": "transaction_timeout of this role, database or server is too short",
}
_HOW_TO_RAISE = (
    "raise it with ALTER ROLE ... SET, or in the URL, such as options=-c%20statement_timeout=60s"
)
#: What to do, added to the errors of these states.
_HINTS: Mapping[str, str] = {
    **{state: f"; {limit}; {_HOW_TO_RAISE}" for state, limit in _LIMITS.items()},
    "26000": "; pgbouncer=prepared takes PgBouncer 1.21 or later with max_prepared_statements > 0; "
    "pgbouncer=true takes any",
    "42501": "; if `replaydb db roles` created this role, run it with --apply again after each "
    "upgrade of the schema",
}


class PostgresqlBackend:
    """`postgresql://USER:PASSWORD@HOST/DATABASE`."""

    small_draw_bytes = 256 << 10  # received in about one round trip
    syncs = True  # the server does
    turn_seconds = 0.0  # the server grants a lock to the first that waits for it

    def __init__(
        self, url: PostgresqlURL, *, read_only: bool = False, pool_size: int | None = None
    ) -> None:
        self.url = url
        self.read_only = read_only
        self._shortage = Shortage()
        self._pool: dict[str, Any] = {
            "pool_size": pool_size or POOL_SIZE,
            "max_overflow": 0 if pool_size else 2 * POOL_SIZE,
            "pool_timeout": None,  # the call has a deadline
            "pool_use_lifo": True,
        }
        self.concurrent_writes = pool_size or 3 * POOL_SIZE
        self.concurrent_draws = max(1, pool_size // 2) if pool_size else POOL_SIZE
        self._log = ConnectionLog(url.shown)
        self._acknowledged = Acknowledged()
        self._thread = LoopThread()
        self._is_standby = False  # when it was last connected to

    @property
    def schema(self) -> PostgresqlSchema:
        """Changes of the tables."""
        return PostgresqlSchema(self)

    @property
    def administration(self) -> PostgresqlAdministration:
        """What an administrator asks of the database."""
        return PostgresqlAdministration(self)

    @property
    def shown(self) -> str:
        """The URL without passwords."""
        return self.url.shown

    @property
    def has_one_connection(self) -> bool:
        """Whether a call must not wait for a second connection to the server.

        Those may all be in use by transactions that wait for its locks, or for more connections.
        """
        return self.url.through_pgbouncer or self._shortage.is_recent()

    @property
    def settling_seconds(self) -> float:
        """Time for the answer to the commit, and for its outcome on another connection."""
        return 2 * COMMIT_SECONDS

    def writer_engine(self) -> AsyncEngine:
        """Return an engine for READ COMMITTED transactions, which lock the rows they depend on."""
        engine = self.engine(isolation_level="READ COMMITTED", **self._pool)
        event.listen(engine.sync_engine, "connect", read_types)
        return engine

    def reader_engine(self) -> AsyncEngine:
        """Return an engine for REPEATABLE READ snapshots.

        If the store is opened read-only, a query uses one core of the server.
        """
        # PgBouncer refuses parameters that it does not know.
        alone = self.read_only and not self.url.through_pgbouncer
        settings = {"max_parallel_workers_per_gather": "0"} if alone else _NO_SETTINGS
        engine = self.engine(settings, isolation_level="REPEATABLE READ", **self._pool)
        return engine.execution_options(postgresql_readonly=True)

    def without_transactions(self, reader: AsyncEngine) -> AsyncEngine:
        """Return the reader in autocommit, except where each transaction sets its time limits."""
        if self.url.through_pgbouncer:
            return reader
        return reader.execution_options(isolation_level="AUTOCOMMIT")

    def run_in_loop(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Run it in the thread of this backend, so that no lock waits for the caller's loop."""
        return self._thread.run(coroutine)

    def loop_time(self, time: float) -> float:
        """Convert a time of the caller's loop. That of the thread has the usual clock."""
        return time - asyncio.get_running_loop().time() + monotonic()

    async def end_loop(self) -> None:
        """End the thread of this backend."""
        await self._thread.close()

    async def begin(self, connection: AsyncConnection, end: float) -> None:
        """Set the limits of the transaction, and let a reader check for lost commits."""
        url, is_reader = self.url, commits.is_reader(connection)
        options = connection.sync_engine.get_execution_options()
        is_single = options.get("isolation_level") == "AUTOCOMMIT"
        earlier = self._acknowledged.newest  # later commits may be missing from the snapshot
        async with asyncio.timeout_at(end):
            seconds = end - asyncio.get_running_loop().time()
            is_long = seconds > ORDINARY_SECONDS and not is_single
            await set_limits(
                connection,
                seconds,
                IDLE_IN_TRANSACTION_SECONDS if is_reader else url.frozen_seconds,
                is_local=is_long or url.through_pgbouncer,
            )
            if not is_single:
                await plans.renew(connection, asyncio.get_running_loop().time())
            if is_reader:
                await self._check(connection, earlier)
        if not is_reader:
            await connection.execution_options(**{PIPELINE: Pipeline()})

    async def _check(self, connection: AsyncConnection, earlier: Mapping[UUID, Commit]) -> None:
        """Raise if the server has lost commits that were acknowledged before the snapshot."""
        has_all = await commits.has_all(
            connection, earlier, through_pgbouncer=self.url.through_pgbouncer
        )
        if not has_all:
            raise self._has_lost_commits()

    def _has_lost_commits(self) -> DatabaseReplacedError:
        return DatabaseReplacedError(
            f"{self.shown}: the server has lost commits that it acknowledged: it has an older "
            "state, such as a restored backup or a standby without the newest commits; ids "
            "that this process has may belong to other rows now, so close the store and open "
            "it again"
        )

    async def run(self, connection: AsyncConnection, work: Work[T], end: float) -> T:
        """Run work in the event loop, like the driver."""
        async with asyncio.timeout_at(end):
            return await connection.run_sync(work)

    async def finish(
        self,
        connection: AsyncConnection,
        work: Work[T],
        end: float,
        answer_by: float,
        *,
        unless: Callable[[T], bool] | None = None,
        committing: Callable[[], object] | None = None,
    ) -> T:
        """Run work, then commit. An error of work may be due to lost commits, so check for them."""
        try:
            result = await self.run(connection, work, end)
        except Exception as error:
            await self._check_after(connection, error, end)
            raise
        if unless is None or not unless(result):
            await self.commit(connection, end, answer_by, committing=committing)
        return result

    async def commit(
        self,
        connection: AsyncConnection,
        end: float,
        answer_by: float,
        pinned: Pinned | None = None,
        committing: Callable[[], object] | None = None,
    ) -> None:
        """Prove and commit. If the answer is lost, read the outcome on another connection."""
        try:
            async with asyncio.timeout_at(end):
                has_all = await commits.prove(connection, self._acknowledged)
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
        self._acknowledged.add(transaction)

    async def _check_after(self, connection: AsyncConnection, error: Exception, end: float) -> None:
        """Check for lost commits after an error, unless the transaction will be run again."""
        is_lost_race = self.is_conflict(error) or isinstance(error, LostRaceError)
        if connection.invalidated or self.is_outage(error) or is_lost_race:
            return
        try:
            async with asyncio.timeout_at(end):
                await connection.rollback()
                await self._check(connection, self._acknowledged.newest)
        except DatabaseReplacedError as lost:
            raise lost from error
        except Exception:  # the first error matters more
            return

    async def _commit(
        self, connection: AsyncConnection, transaction: Transaction, end: float, answer_by: float
    ) -> None:
        loop = asyncio.get_running_loop()
        least = loop.time() + COMMIT_SECONDS
        driver = (await connection.get_raw_connection()).driver_connection
        # Not a timeout: if the server is silent, asyncpg takes seconds to end a cancelled call.
        cut = loop.call_at(max(answer_by, least), self.cut_off, driver)
        try:
            await connection.commit()
        except Exception as error:
            if not self.is_outage(error):
                raise
            logger.warning("%s: reading the outcome of a commit after: %s", self.shown, error)
            if not await self._was_committed(transaction, max(end, least) + COMMIT_SECONDS):
                raise
        finally:
            cut.cancel()

    async def _settle(self, transaction: Transaction) -> None:
        with suppress(Exception):
            end = asyncio.get_running_loop().time() + COMMIT_SECONDS
            await self._was_committed(transaction, end)

    async def _was_committed(self, transaction: Transaction, end: float) -> bool:
        engine = self.engine(isolation_level="READ COMMITTED", poolclass=NullPool)
        try:
            return await commits.was_committed(engine, transaction, end)
        except TimeoutError as error:
            raise OutcomeUnknownError(
                f"{self.shown}: the connection was lost during a commit, and its outcome could not "
                "be read in time. Repeating the call is safe if it names the rows it writes, such "
                "as by group_uid"
            ) from error.__cause__

    async def abandon(self, connection: AsyncConnection) -> None:
        """Roll back. If the network has stalled, terminate the connection on this side only."""
        try:
            async with asyncio.timeout(ROLLBACK_SECONDS):
                await connection.rollback()
        except Exception:  # the error that led here matters more
            with suppress(Exception):
                raw = await connection.get_raw_connection()
                self.cut_off(raw.driver_connection)
                await connection.invalidate()

    def cut_off(self, driver_connection: Any) -> None:
        """Close the connection without waiting for the server."""
        driver_connection.terminate()

    def signal(self, watched: Callable[[AsyncEngine], AsyncEngine]) -> Signal:
        """Return a signal that uses LISTEN and NOTIFY, on its own connections."""
        options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "pool_pre_ping": True}
        if not self.url.through_pgbouncer:
            # A NOTIFY is a commit, but a hint need not be durable.
            engine = watched(self.engine({"synchronous_commit": "off"}, **options))
            return PostgresqlSignal(engine, engine, self._thread, self._shortage.is_recent)
        if not self.url.listen_hosts:
            return NoSignal()
        direct = self.engine(url=self.url.direct(), **options)
        notifying = watched(self.engine(**options))
        return PostgresqlSignal(watched(direct), notifying, self._thread, self._shortage.is_recent)

    def translate(self, error: BaseException) -> ReplayDBError | None:
        """Choose the type by SQLSTATE, never by the error's text."""
        cause: BaseException | None = error.orig if isinstance(error, DBAPIError) else error
        state = getattr(cause, "sqlstate", None)
        if isinstance(cause, MemoryError):
            return DatabaseUnavailableError(f"{self.shown}: not enough memory")
        if (reason := messages.refusal(error)) is not None:
            return DatabaseError(f"{self.shown}: {reason}")
        if state is None:
            if isinstance(
                cause, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError | DBAPIError
            ) or isinstance(error, DBAPIError):
                reason = str(cause) or "no answer in time"  # a TimeoutError has no text
                hint = standby.HINT if self._is_standby else ""
                return DatabaseUnavailableError(f"{self.shown}: {reason}{hint}")
            return None
        if state == sequences.UNIQUE_VIOLATION:
            reason = sequences.explain(cause)
            return DatabaseError(f"{self.shown}: {reason} (SQLSTATE {state})")
        kind: type[DatabaseError] = DatabaseError
        if state == "53100":
            kind = DatabaseFullError
        elif state == "25006":
            kind = DatabaseReadOnlyError
        elif state[:2] in {"08", "28", "3D", "53", "57"} or state in _LIMITS:
            kind = DatabaseUnavailableError
        hint = _HINTS.get(state, "")
        if self._is_standby and (state[:2] == "08" or state in {"40001", "57P01"}):
            kind, hint = DatabaseUnavailableError, standby.HINT
        return kind(f"{self.shown}: {cause} (SQLSTATE {state}){hint}")

    def is_conflict(self, error: BaseException) -> bool:
        """Whether the transaction lost a race against another client and was rolled back."""
        if not isinstance(error, DBAPIError):
            return False
        state = getattr(error.orig, "sqlstate", None)
        if state == sequences.UNIQUE_VIOLATION:
            return sequences.is_race(error.orig)
        return state in _CONFLICTS

    def is_outage(self, error: BaseException) -> bool:
        """Whether the connection broke, or none can be opened at the moment.

        A server also closes the connection if a message is too large, which no other attempt helps.
        """
        if messages.is_too_large(error):
            return False
        if isinstance(error, DBAPIError):
            if error.connection_invalidated:
                return True
            error = error.orig or error
        if isinstance(error.__cause__, asyncpg.TargetServerAttributeNotMatched):
            return True  # until a standby is promoted, no host accepts writes
        # The server has ended the connection, or has announced that. SQLAlchemy detects neither
        # while it prepares a new connection.
        if isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError):
            return True
        state = getattr(error, "sqlstate", None) or ""
        return isinstance(error, OSError) or state[:2] == "08" or state in _OUTAGES

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection without transactions. Errors are typed."""
        engine = self.engine(isolation_level="AUTOCOMMIT", poolclass=NullPool)
        try:
            async with engine.connect() as connection:
                yield connection
        except Exception as error:
            raise self.translate(error) or error from error
        finally:
            await engine.dispose()

    def now(self, connection: Connection) -> datetime:
        """Return the time of the server, because the clocks of its clients may differ."""
        return connection.execute(_NOW).scalar_one()

    def identify(
        self,
        connection: Connection,
        buffer_id: int,
        uids: Sequence[str],
        *,
        children: Sequence[Write],
    ) -> Identified:
        """Take new ids from the sequence of the id column.

        Payloads are inserted before their groups, so this checks that no group has the ids already.
        """
        is_small = fit_together(children)
        identify = sequences.identify_groups(buffer_id, uids, children if is_small else ())
        [found] = execute(connection, identify)
        known = dict(zip(found.known_uids or (), found.known_ids or (), strict=True))
        error = None
        if found.is_taken:
            reason = sequences.explain_behind(episode_group.name)
            error = DatabaseError(f"{self.shown}: {reason}")
            if len(known) < len(uids):
                raise error
        return Identified(known, list(found.ids or ()), is_small, error)

    def read_payloads(self, connection: Connection, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Read the rows with their data."""
        return [row._asdict() for row in execute(connection, select_payloads(ids))]

    async def _connect(self, url: PostgresqlURL, settings: Mapping[str, str]) -> asyncpg.Connection:
        connection = await self._shortage.connect(url, settings)
        self._is_standby = standby.is_standby(connection)
        return connection

    def engine(
        self,
        settings: Mapping[str, str] = _NO_SETTINGS,
        *,
        url: PostgresqlURL | None = None,
        **options: Any,
    ) -> AsyncEngine:
        """Return an engine. Without `poolclass`, connections are pooled."""
        url = self.url if url is None else url
        server_settings = {
            "application_name": "replaydb",
            **settings,
            **url.settings,
        }
        unnamed = {"prepared_statement_cache_size": 0, "prepared_statement_name_func": str}
        engine = create_async_engine(
            "postgresql+asyncpg://",  # SQLAlchemy never sees the password
            connect_args={
                "async_creator_fn": partial(self._connect, url, server_settings),
                **({} if url.prepares else unnamed),
            },
            hide_parameters=True,
            execution_options={TOGETHER: True},
            **options,
        )
        self._log.listen_to(engine)
        if "poolclass" not in options:
            self._shortage.listen_to(engine)
        event.listen(engine.sync_engine, "handle_error", _give_up_if_outdated)
        return engine


def _give_up_if_outdated(context: ExceptionContext) -> None:
    """Treat a connection as lost if its statements were prepared before a table was changed."""
    error = context.original_exception.__cause__
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        context.is_disconnect = True


_NOW = select(func.clock_timestamp(type_=DateTime(timezone=True)))
