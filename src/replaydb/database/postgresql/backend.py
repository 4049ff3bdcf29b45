"""The PostgreSQL engine: one server, shared by many machines."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import asyncpg
from sqlalchemy import ExceptionContext, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from replaydb.database.postgresql import standby, transactions
from replaydb.database.postgresql.administration import PostgresqlAdministration
from replaydb.database.postgresql.commits import Acknowledged
from replaydb.database.postgresql.connecting import ConnectionLog, read_types
from replaydb.database.postgresql.errors import PostgresqlErrors
from replaydb.database.postgresql.schema_changes import PostgresqlSchema
from replaydb.database.postgresql.shortage import Shortage
from replaydb.database.postgresql.signal import NoSignal, PostgresqlSignal
from replaydb.database.postgresql.transactions import PostgresqlTransactions
from replaydb.database.runtime.loop_thread import LoopThread
from replaydb.database.runtime.protocol import Traits
from replaydb.database.runtime.signals import Signal
from replaydb.database.runtime.waits import Waits
from replaydb.database.urls import PostgresqlURL
from replaydb.errors import (
    ReplayDBError,
)

logger = logging.getLogger(__name__)

#: Connections of a pool that are kept open. It may open twice as many more.
POOL_SIZE = 8
#: A draw of this size is received in about one round trip.
SMALL_DRAW_BYTES = 256 << 10
_NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


class PostgresqlBackend:
    """`postgresql://USER:PASSWORD@HOST/DATABASE`."""

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
        self._concurrent_draws = max(1, pool_size // 2) if pool_size else POOL_SIZE
        self.errors = PostgresqlErrors(url.shown)
        self._log = ConnectionLog(url.shown)
        self.acknowledged = Acknowledged()
        self.pooled: WeakSet[Any] = WeakSet()  # connections of the driver
        self.loop = LoopThread()

    @property
    def traits(self) -> Traits:
        """What calls take into account."""
        return Traits(
            small_draw_bytes=SMALL_DRAW_BYTES,
            concurrent_draws=self._concurrent_draws,
            turn_seconds=0.0,  # the server grants a lock to the first that waits for it
            # For the answer to the commit, and for its outcome on another connection.
            settling_seconds=2 * transactions.COMMIT_SECONDS,
            syncs=True,  # the server does
        )

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

    def writer(self, waits: Waits) -> PostgresqlTransactions:
        """Return connections for READ COMMITTED transactions, which lock what they depend on."""
        engine = self.engine(isolation_level="AUTOCOMMIT", **self._pool)
        event.listen(engine.sync_engine, "connect", read_types)
        return PostgresqlTransactions(self, engine, self._most, waits)

    def reader(self, waits: Waits) -> PostgresqlTransactions:
        """Return connections for REPEATABLE READ snapshots."""
        engine = self.engine(self._reading(), isolation_level="AUTOCOMMIT", **self._pool)
        return PostgresqlTransactions(self, engine, self._most, waits)

    def reader_engine(self) -> AsyncEngine:
        """Return an engine for snapshots, without a pool."""
        engine = self.engine(self._reading(), isolation_level="REPEATABLE READ", poolclass=NullPool)
        return engine.execution_options(postgresql_readonly=True)

    def _reading(self) -> Mapping[str, str]:
        """Return settings of readers: in a store that only reads, a query uses one core."""
        # PgBouncer refuses parameters that it does not know.
        alone = self.read_only and not self.url.through_pgbouncer
        return {"max_parallel_workers_per_gather": "0"} if alone else _NO_SETTINGS

    def signal(self) -> Signal:
        """Return a signal that uses LISTEN and NOTIFY, on its own connections."""
        options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "pool_pre_ping": True}
        if not self.url.through_pgbouncer:
            # A NOTIFY is a commit, but a hint need not be durable.
            engine = self.engine({"synchronous_commit": "off"}, **options)
            return PostgresqlSignal(engine, engine, self.loop, self._shortage.is_recent)
        if not self.url.listen_hosts:
            return NoSignal()
        direct = self.engine(url=self.url.direct(), **options)
        notifying = self.engine(**options)
        return PostgresqlSignal(direct, notifying, self.loop, self._shortage.is_recent)

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
            raise self.errors.typed(error) or error from error
        finally:
            await engine.dispose()

    async def _connect(self, url: PostgresqlURL, settings: Mapping[str, str]) -> asyncpg.Connection:
        connection = await self._shortage.connect(url, settings)
        self.errors.is_standby = standby.is_standby(connection)
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
