"""The PostgreSQL engine: one server, shared by many machines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from replaydb.database.postgresql import limits, transactions
from replaydb.database.postgresql.administration import PostgresqlAdministration
from replaydb.database.postgresql.commits import Acknowledged
from replaydb.database.postgresql.connecting import ARRAYS, Connection
from replaydb.database.postgresql.connections import Connections
from replaydb.database.postgresql.errors import PostgresqlErrors
from replaydb.database.postgresql.schema_changes import PostgresqlSchema
from replaydb.database.postgresql.signal import NoSignal, PostgresqlSignal
from replaydb.database.postgresql.transactions import PostgresqlTransactions
from replaydb.database.runtime.pool import Waits
from replaydb.database.runtime.protocol import Traits
from replaydb.database.runtime.signals import Signal
from replaydb.database.urls import PostgresqlURL
from replaydb.errors import ReplayDBError
from replaydb.util.loop_thread import LoopThread

#: Connections of a pool that are kept open. It may open twice as many more.
POOL_SIZE = 8
#: A draw of this size is received in about one round trip.
SMALL_DRAW_BYTES = 256 << 10


class PostgresqlBackend:
    """`postgresql://USER:PASSWORD@HOST/DATABASE`."""

    def __init__(
        self, url: PostgresqlURL, *, read_only: bool = False, pool_size: int | None = None
    ) -> None:
        self.url = url
        self.read_only = read_only
        self._pool_size = pool_size
        self._concurrent_draws = max(1, pool_size // 2) if pool_size else POOL_SIZE
        self.errors = PostgresqlErrors(url.shown)
        self.connections = Connections(url, self.errors)
        self.acknowledged = Acknowledged()
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
        return self.url.through_pgbouncer or self.connections.is_short()

    def writer(self, waits: Waits) -> PostgresqlTransactions:
        """Return connections for READ COMMITTED transactions, which lock what they depend on."""
        return self._transactions(waits, self.url.frozen_seconds, writes=True)

    def reader(self, waits: Waits) -> PostgresqlTransactions:
        """Return connections for REPEATABLE READ snapshots."""
        return self._transactions(waits, limits.IDLE_IN_TRANSACTION_SECONDS, writes=False)

    def _transactions(
        self, waits: Waits, idle_seconds: float, *, writes: bool
    ) -> PostgresqlTransactions:
        async def prepare(connection: Connection) -> None:
            if not self.url.through_pgbouncer:  # where each transaction sets its limits
                ordinary = limits.text(connection, limits.ORDINARY_SECONDS, idle_seconds)
                await connection.execute(ordinary)
            if writes:
                await connection.fetch(ARRAYS)

        # In a store that only reads, a query uses one core. PgBouncer refuses parameters that it
        # does not know.
        is_alone = self.read_only and not writes and not self.url.through_pgbouncer
        settings = {"max_parallel_workers_per_gather": "0"} if is_alone else {}
        opened = self.connections.opening(settings, prepare=prepare)
        most, kept = self._pool_size or 3 * POOL_SIZE, self._pool_size or POOL_SIZE
        pool = self.connections.pool(opened, most, kept, waits)
        return PostgresqlTransactions(self, pool, idle_seconds)

    def signal(self) -> Signal:
        """Return a signal that uses LISTEN and NOTIFY, on its own connections."""
        open_one, url = self.connections.opening, self.url
        if url.through_pgbouncer and not url.listen_hosts:
            return NoSignal()
        if url.through_pgbouncer:
            listening, notifying = open_one(url=url.direct()), open_one()
        else:
            # A NOTIFY is a commit, but a hint need not be durable.
            listening = notifying = open_one({"synchronous_commit": "off"})
        pool = self.connections.pool(notifying, 1, 1, Waits(url.shown))
        listen = partial(self.connections.connected, listening)
        return PostgresqlSignal(listen, pool, self.connections, self.loop)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[Connection]:
        """Open a connection for the block. Errors are typed."""
        try:
            async with self.connections.connected() as connection:
                yield connection
        except ReplayDBError:
            raise
        except Exception as error:
            if (typed := self.errors.typed(error)) is None:
                raise
            raise typed from error
