"""PostgreSQL: one server, shared by many machines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any

import asyncpg
from sqlalchemy import (
    Connection,
    DateTime,
    ExceptionContext,
    Table,
    cast,
    column,
    event,
    func,
    select,
    table,
)
from sqlalchemy.dialects.postgresql import REGCLASS
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import ExecutableDDLElement

from replaydb.cancellation import to_the_end
from replaydb.database.engines import (
    postgresql_checkup,
    postgresql_commits,
    postgresql_roles,
    postgresql_sequences,
    postgresql_sql,
)
from replaydb.database.engines.connecting import ConnectionLog, connect
from replaydb.database.engines.postgresql_commits import Acknowledged, Transaction
from replaydb.database.engines.protocol import T, Work
from replaydb.database.engines.signals import Signal
from replaydb.database.engines.urls import PostgresqlURL
from replaydb.database.prepared import execute
from replaydb.database.schema import episode_group, metadata
from replaydb.database.statements.payload import select_payloads
from replaydb.errors import (
    DatabaseError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseReplacedError,
    DatabaseUnavailableError,
    OutcomeUnknownError,
    ReplayDBError,
)
from replaydb.results import Finding

logger = logging.getLogger(__name__)

#: A rollback that takes longer is not waited for.
ROLLBACK_SECONDS = 1.0
#: What a call may take beyond its end to hear of its commit, and once more to ask for it.
COMMIT_SECONDS = 2.0
POOL_SIZE = 8
#: Changes made within this time share one NOTIFY, which locks database-wide at commit.
NOTIFY_SECONDS = 0.01
#: A NOTIFY that takes longer is given up, and the next one takes another connection.
TELL_SECONDS = 5.0
CHANNEL = "replaydb"
_NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
_SCHEMA_LOCK = 0x7265_706C_6179_6462  # "replaydb"

#: Shut down, crashed, starting up, no connection left; no lock within `lock_timeout`.
_OUTAGES = {"57P01", "57P02", "57P03", "53300", "55P03"}
_CONFLICTS = {"40001", "40P01"}  # serialization, deadlock

#: Errors of limits that an administrator may have set, and which setting that is.
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
    "42501": "; if `replaydb db roles` created this role, run it with --apply again after each "
    "upgrade of the schema",
}


class PostgresqlBackend:
    """`postgresql://USER:PASSWORD@HOST/DATABASE`."""

    small_draw_bytes = 256 << 10  # what comes in about a round trip
    syncs = True  # as the server does
    turn_seconds = 0.0  # who waits for a lock is next

    def __init__(
        self, url: PostgresqlURL, *, read_only: bool = False, pool_size: int | None = None
    ) -> None:
        self._url = url
        self.read_only = read_only
        # Through PgBouncer a second connection of the server may not come before this call ends:
        # others wait for the locks that it holds.
        self.has_one_connection = url.through_pgbouncer
        self._pool: dict[str, Any] = {
            "pool_size": pool_size or POOL_SIZE,
            "max_overflow": 0 if pool_size else 2 * POOL_SIZE,
            "pool_timeout": None,  # the call has an end
            "pool_use_lifo": True,
        }
        self.concurrent_writes = pool_size or 3 * POOL_SIZE
        self.concurrent_draws = max(1, pool_size // 2) if pool_size else POOL_SIZE
        self._log = ConnectionLog(url.shown)
        self._acknowledged = Acknowledged()

    @property
    def shown(self) -> str:
        """Without passwords."""
        return self._url.shown

    @property
    def settling_seconds(self) -> float:
        """To hear of it, and to ask."""
        return 2 * COMMIT_SECONDS

    @property
    def file(self) -> None:
        """A server has the database."""

    def is_new_file(self) -> bool:
        """It is none."""
        return False

    def writer_engine(self) -> AsyncEngine:
        """READ COMMITTED: what must not change is locked, row by row."""
        return self._engine(isolation_level="READ COMMITTED", **self._pool)

    def reader_engine(self) -> AsyncEngine:
        """Every transaction reads one snapshot. Who only looks takes one core."""
        # PgBouncer refuses parameters that it does not know.
        alone = self.read_only and not self._url.through_pgbouncer
        settings = {"max_parallel_workers_per_gather": "0"} if alone else _NO_SETTINGS
        engine = self._engine(settings, isolation_level="REPEATABLE READ", **self._pool)
        return engine.execution_options(postgresql_readonly=True)

    def migration_engine(self) -> AsyncEngine:
        """DDL is transactional here; nothing special is needed."""
        return self._engine(isolation_level="READ COMMITTED", poolclass=NullPool)

    async def begin(self, connection: AsyncConnection, end: float) -> None:
        """Have the transaction write its number, in case the answer to its commit is lost."""
        async with asyncio.timeout_at(end):
            seconds = end - asyncio.get_running_loop().time()
            has_all = await postgresql_commits.begin(connection, seconds, self._acknowledged)
        if not has_all:
            raise DatabaseReplacedError(
                f"{self.shown}: the server has lost commits that it acknowledged: an older state "
                "took over, such as a restored backup or a standby without the newest commits; ids "
                "that this process has may belong to other rows now, so close the store and open "
                "it again"
            )

    async def run(self, connection: AsyncConnection, work: Work[T], end: float) -> T:
        """Where everything runs: the driver lives in the event loop."""
        async with asyncio.timeout_at(end):
            return await connection.run_sync(work)

    async def finish(
        self,
        connection: AsyncConnection,
        work: Work[T],
        end: float,
        hear_by: float,
        *,
        unless: Callable[[T], bool] | None = None,
    ) -> T:
        """One after the other."""
        result = await self.run(connection, work, end)
        if unless is None or not unless(result):
            await self.commit(connection, end, hear_by)
        return result

    async def commit(self, connection: AsyncConnection, end: float, hear_by: float) -> None:
        """Commit. If the answer is lost, read the outcome on another connection."""
        transaction = postgresql_commits.transaction_of(connection)
        try:
            await self._commit(connection, transaction, end, hear_by)
        except asyncio.CancelledError:
            # The caller may now undo what was committed: that must not come any later.
            await to_the_end(self._settle(transaction))
            raise
        self._acknowledged.add(transaction)

    async def _commit(
        self, connection: AsyncConnection, transaction: Transaction, end: float, hear_by: float
    ) -> None:
        loop = asyncio.get_running_loop()
        least = loop.time() + COMMIT_SECONDS
        driver = (await connection.get_raw_connection()).driver_connection
        # Not a timeout: what is cancelled takes seconds to part with a server that is silent.
        cut = loop.call_at(max(hear_by, least), self.cut_off, driver)
        try:
            await connection.commit()
        except Exception as error:
            if not self.is_outage(error):
                raise
            logger.warning("%s: asking what became of a commit: %s", self.shown, error)
            if not await self._was_committed(transaction, max(end, least) + COMMIT_SECONDS):
                raise
        finally:
            cut.cancel()

    async def _settle(self, transaction: Transaction) -> None:
        with suppress(Exception):
            end = asyncio.get_running_loop().time() + COMMIT_SECONDS
            await self._was_committed(transaction, end)

    async def _was_committed(self, transaction: Transaction, end: float) -> bool:
        engine = self._engine(isolation_level="READ COMMITTED", poolclass=NullPool)
        try:
            return await postgresql_commits.was_committed(engine, transaction, end)
        except TimeoutError as error:
            raise OutcomeUnknownError(
                f"{self.shown}: the connection was lost during a commit, and nobody could say "
                "what became of it; repeating the call is safe if it names what it writes"
            ) from error.__cause__

    async def abandon(self, connection: AsyncConnection) -> None:
        """Roll back, unless the network has stalled: then the server has to find out."""
        try:
            async with asyncio.timeout(ROLLBACK_SECONDS):
                await connection.rollback()
        except Exception:  # what matters is told by the error that led here
            with suppress(Exception):
                raw = await connection.get_raw_connection()
                self.cut_off(raw.driver_connection)
                await connection.invalidate()

    def cut_off(self, driver_connection: Any) -> None:
        """Without waiting for the server."""
        driver_connection.terminate()

    def signal(self, watched: Callable[[AsyncEngine], AsyncEngine]) -> Signal:
        """LISTEN and NOTIFY, on connections of their own."""
        if self._url.through_pgbouncer:
            return _NoSignal()
        # A NOTIFY commits, and a hint is not worth waiting for the disk.
        settings = {"synchronous_commit": "off"}
        engine = self._engine(settings, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
        return _PostgresqlSignal(watched(engine))

    def translate(self, error: BaseException) -> ReplayDBError | None:
        """By SQLSTATE, never by the error's text."""
        cause: BaseException | None = error.orig if isinstance(error, DBAPIError) else error
        state = getattr(cause, "sqlstate", None)
        if isinstance(cause, MemoryError):
            return DatabaseUnavailableError(f"{self.shown}: not enough memory")
        if state is None:
            if isinstance(
                cause, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError | DBAPIError
            ) or isinstance(error, DBAPIError):
                reason = str(cause) or "no answer in time"  # a TimeoutError says nothing
                return DatabaseUnavailableError(f"{self.shown}: {reason}")
            return None
        if state == postgresql_sequences.UNIQUE_VIOLATION:
            reason = postgresql_sequences.explain(cause)
            return DatabaseError(f"{self.shown}: {reason} (SQLSTATE {state})")
        kind: type[DatabaseError] = DatabaseError
        if state == "53100":
            kind = DatabaseFullError
        elif state == "25006":
            kind = DatabaseReadOnlyError
        elif state[:2] in {"08", "28", "3D", "53", "57"} or state in _LIMITS:
            kind = DatabaseUnavailableError
        return kind(f"{self.shown}: {cause} (SQLSTATE {state}){_HINTS.get(state, '')}")

    def is_conflict(self, error: BaseException) -> bool:
        """Lost a race against another client and was rolled back whole."""
        if not isinstance(error, DBAPIError):
            return False
        state = getattr(error.orig, "sqlstate", None)
        if state == postgresql_sequences.UNIQUE_VIOLATION:
            return postgresql_sequences.is_race(error.orig)
        return state in _CONFLICTS

    def is_outage(self, error: BaseException) -> bool:
        """The connection broke, or none could be made just now."""
        if isinstance(error, DBAPIError):
            if error.connection_invalidated:
                return True
            error = error.orig or error
        if isinstance(error.__cause__, asyncpg.TargetServerAttributeNotMatched):
            return True  # until a standby is promoted, no host accepts writes
        state = getattr(error, "sqlstate", None) or ""
        return isinstance(error, OSError) or state[:2] == "08" or state in _OUTAGES

    async def check_target(self) -> None:
        """Nothing to check: connecting tells."""

    def examine(self, connection: Connection) -> list[Finding]:
        """The server, its settings, and what has become of our tables."""
        return list(postgresql_checkup.findings(connection))

    def damage(self, connection: Connection) -> list[tuple[str, str]]:
        """It keeps to types, and has no check of its own without an extension."""
        return []

    def check_roles(self) -> None:
        """A server has them."""

    def role_statements(
        self, connection: Connection, prefix: str, tables: Sequence[str]
    ) -> list[ExecutableDDLElement]:
        """By what each does."""
        return list(postgresql_roles.statements(connection, prefix, tables))

    async def lock_schema(self, connection: AsyncConnection) -> None:
        """An advisory lock, until the transaction ends, which may take as long as it takes."""
        await connection.execute(_LIFT_LIMITS)
        lock = func.pg_advisory_xact_lock(_SCHEMA_LOCK)
        await connection.execute(select(postgresql_commits.BOUND_IDLENESS, lock))

    def share_schema(self, connection: Connection) -> None:
        """The same lock, which any number may share."""
        connection.execute(select(func.pg_advisory_xact_lock_shared(_SCHEMA_LOCK)))

    async def check_integrity(self, connection: AsyncConnection) -> None:
        """Nothing to do: constraints stay on during DDL."""

    async def size(self) -> int:
        """The tables, with their indexes and what is stored beside them."""
        async with self._alone() as connection:
            total = 0
            for name in _tables():
                size = select(func.pg_total_relation_size(cast(name, REGCLASS)))
                total += (await connection.execute(size)).scalar_one()
        return total

    async def vacuum(self) -> None:
        """Table by table: each is locked while it is written anew."""
        async with self._alone() as connection:
            for name, one in _tables().items():
                file = select(func.pg_relation_filenode(cast(name, REGCLASS)))
                before = await connection.scalar(file)
                await connection.execute(postgresql_sql.rewrite_table(one))
                if await connection.scalar(file) == before:  # with no more than a warning
                    raise DatabaseError(
                        f"{self.shown}: the server does not let this user vacuum {name}: that "
                        "takes the owner of the table or of the database, or from PostgreSQL 17 "
                        "on MAINTAIN on the table (SQLSTATE 42501)"
                    )

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[AsyncConnection]:
        """A connection without transactions; errors are typed."""
        engine = self._engine(isolation_level="AUTOCOMMIT", poolclass=NullPool)
        try:
            async with engine.connect() as connection:
                yield connection
        except Exception as error:
            raise self.translate(error) or error from error
        finally:
            await engine.dispose()

    def now(self, connection: Connection) -> datetime:
        """The server's: the clocks of its clients need not agree."""
        return connection.execute(_NOW).scalar_one()

    def allocate_group_ids(self, connection: Connection, count: int) -> Sequence[int]:
        """From the sequence of the id column.

        Payloads go in before their groups, so it is here that an id is found to be taken.
        """
        [found] = execute(connection, postgresql_sequences.new_group_ids(count))
        if found.is_taken:
            reason = postgresql_sequences.explain_behind(episode_group.name)
            raise DatabaseError(f"{self.shown}: {reason}")
        return list(found.ids or ())

    def last_ids(self, connection: Connection) -> dict[str, int | None]:
        """From the sequences, which no transaction isolates: never less than a snapshot has."""
        return postgresql_sequences.last_ids(connection)

    def advance_sequences(self, connection: Connection, ids: Mapping[str, int]) -> None:
        """The same sequences."""
        postgresql_sequences.advance(connection, ids)

    def read_payloads(self, connection: Connection, ids: Sequence[int]) -> list[dict[str, Any]]:
        """As rows."""
        return [row._asdict() for row in execute(connection, select_payloads(ids))]

    def _engine(self, settings: Mapping[str, str] = _NO_SETTINGS, **options: Any) -> AsyncEngine:
        server_settings = {
            "application_name": "replaydb",
            **settings,
            **self._url.settings,
        }
        unnamed = {"prepared_statement_cache_size": 0, "prepared_statement_name_func": str}
        engine = create_async_engine(
            "postgresql+asyncpg://",  # SQLAlchemy never sees the password
            connect_args={
                "async_creator_fn": partial(connect, self._url, server_settings),
                **(unnamed if self._url.through_pgbouncer else {}),
            },
            hide_parameters=True,
            **options,
        )
        self._log.listen_to(engine)
        event.listen(engine.sync_engine, "handle_error", _give_up_if_outdated)
        return engine


def _give_up_if_outdated(context: ExceptionContext) -> None:
    """A connection whose statements were prepared before a table was changed is a lost one."""
    error = context.original_exception.__cause__
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        context.is_disconnect = True


def _tables() -> dict[str, Table]:
    """All of ours; views have no key."""
    return {name: one for name, one in metadata.tables.items() if len(one.primary_key)}


_SETTINGS = table("pg_settings", column("name"))
#: For the transaction. Those that this version of the server does not have are left out.
_LIFT_LIMITS = select(func.set_config(_SETTINGS.c.name, "0", True)).where(
    _SETTINGS.c.name.in_(["statement_timeout", "transaction_timeout"])
)
_NOW = select(func.clock_timestamp(type_=DateTime(timezone=True)))


class _NoSignal(Signal):
    """Nobody tells: LISTEN needs a session. Whoever waits looks again after a while."""

    async def _watch(self) -> None:
        await asyncio.Event().wait()

    def _publish(self) -> None:
        pass


class _PostgresqlSignal(Signal):
    """NOTIFY after commits, gathered and off the path of the writer; LISTEN while waiting."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__()
        self._engine = engine
        self._publisher: asyncio.Task[None] | None = None
        self._untold = False

    async def aclose(self) -> None:
        await super().aclose()
        if self._publisher is not None:
            await asyncio.wait([self._publisher])
        await self._engine.dispose()

    async def _watch(self) -> None:
        async with self._engine.connect() as connection:
            raw: Any = (await connection.get_raw_connection()).driver_connection
            lost = asyncio.Event()
            raw.add_termination_listener(lambda _: lost.set())
            try:
                await raw.add_listener(CHANNEL, lambda *_: self._wake())
                self._wake()  # whatever was committed before LISTEN took effect
                await lost.wait()
            finally:
                await connection.invalidate()  # a connection that listens must not be pooled

    def _publish(self) -> None:
        self._untold = True
        if self._publisher is None or self._publisher.done():
            self._publisher = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        # A lost hint costs a waiter RECHECK_SECONDS; it must not cost the writer an error.
        with suppress(OSError, DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError):
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(TELL_SECONDS):
                    connection = await stack.enter_async_context(self._engine.connect())
                while self._untold:
                    self._untold = False
                    async with asyncio.timeout(TELL_SECONDS):
                        await connection.execute(select(func.pg_notify(CHANNEL, "")))
                    await asyncio.sleep(NOTIFY_SECONDS)
