"""The PostgreSQL engine: one server, shared by many machines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import asyncpg
from sqlalchemy import ExceptionContext, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from replaydb.database.postgresql import messages, sequences, standby, transactions
from replaydb.database.postgresql.administration import PostgresqlAdministration
from replaydb.database.postgresql.commits import Acknowledged
from replaydb.database.postgresql.connecting import ConnectionLog, read_types
from replaydb.database.postgresql.schema_changes import PostgresqlSchema
from replaydb.database.postgresql.shortage import Shortage
from replaydb.database.postgresql.signal import NoSignal, PostgresqlSignal
from replaydb.database.postgresql.transactions import PostgresqlTransactions
from replaydb.database.runtime.loop_thread import LoopThread
from replaydb.database.runtime.protocol import T
from replaydb.database.runtime.signals import Signal
from replaydb.database.runtime.waits import Waits
from replaydb.database.urls import PostgresqlURL
from replaydb.errors import (
    DatabaseError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    ReplayDBError,
)

logger = logging.getLogger(__name__)

#: Connections of a pool that are kept open. It may open twice as many more.
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
        self._most = pool_size or 3 * POOL_SIZE
        self.concurrent_draws = max(1, pool_size // 2) if pool_size else POOL_SIZE
        self._log = ConnectionLog(url.shown)
        self.acknowledged = Acknowledged()
        self.pooled: WeakSet[Any] = WeakSet()  # connections of the driver
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
        return 2 * transactions.COMMIT_SECONDS

    def writer(self, waits: Waits) -> PostgresqlTransactions:
        """Return connections for READ COMMITTED transactions, which lock what they depend on."""
        engine = self.engine(isolation_level="READ COMMITTED", **self._pool)
        event.listen(engine.sync_engine, "connect", read_types)
        return PostgresqlTransactions(self, engine, self._most, waits)

    def reader(self, waits: Waits) -> PostgresqlTransactions:
        """Return connections for REPEATABLE READ snapshots."""
        engine = self.reader_engine(**self._pool)
        return PostgresqlTransactions(self, engine, self._most, waits)

    def reader_engine(self, **options: Any) -> AsyncEngine:
        """Return an engine for snapshots.

        If the store is opened read-only, a query uses one core of the server.
        """
        # PgBouncer refuses parameters that it does not know.
        alone = self.read_only and not self.url.through_pgbouncer
        settings = {"max_parallel_workers_per_gather": "0"} if alone else _NO_SETTINGS
        engine = self.engine(settings, isolation_level="REPEATABLE READ", **options)
        return engine.execution_options(postgresql_readonly=True)

    def run_in_loop(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Run it in the thread of this backend, so that no lock waits for the caller's loop."""
        return self._thread.run(coroutine)

    def loop_time(self, time: float) -> float:
        """Convert a time of the caller's loop. That of the thread has the usual clock."""
        return time - asyncio.get_running_loop().time() + monotonic()

    async def end_loop(self) -> None:
        """End the thread of this backend."""
        await self._thread.close()

    def signal(self) -> Signal:
        """Return a signal that uses LISTEN and NOTIFY, on its own connections."""
        options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "pool_pre_ping": True}
        if not self.url.through_pgbouncer:
            # A NOTIFY is a commit, but a hint need not be durable.
            engine = self.engine({"synchronous_commit": "off"}, **options)
            return PostgresqlSignal(engine, engine, self._thread, self._shortage.is_recent)
        if not self.url.listen_hosts:
            return NoSignal()
        direct = self.engine(url=self.url.direct(), **options)
        notifying = self.engine(**options)
        return PostgresqlSignal(direct, notifying, self._thread, self._shortage.is_recent)

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
        async with self.disposed(engine), engine.connect() as connection:
            yield connection

    @asynccontextmanager
    async def disposed(self, engine: AsyncEngine) -> AsyncIterator[None]:
        """Dispose of an engine after the block, whose errors are typed."""
        try:
            yield
        except ReplayDBError:
            raise
        except Exception as error:
            raise self.translate(error) or error from error
        finally:
            await engine.dispose()

    async def _connect(self, url: PostgresqlURL, settings: Mapping[str, str]) -> asyncpg.Connection:
        connection = await self._shortage.connect(url, settings)
        self._is_standby = standby.is_standby(connection)
        return connection

    def _connected(self, connection: Any, _record: object) -> None:
        self.pooled.add(connection.driver_connection)

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
            **options,
        )
        self._log.listen_to(engine)
        if "poolclass" not in options:
            self._shortage.listen_to(engine)
            event.listen(engine.sync_engine, "connect", self._connected)
        event.listen(engine.sync_engine, "handle_error", _give_up_if_outdated)
        return engine


def _give_up_if_outdated(context: ExceptionContext) -> None:
    """Treat a connection as lost if its statements were prepared before a table was changed."""
    error = context.original_exception.__cause__
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        context.is_disconnect = True
