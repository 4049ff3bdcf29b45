"""PostgreSQL: one server, shared by many machines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any

import asyncpg
from sqlalchemy import BigInteger, DateTime, func, select
from sqlalchemy import Sequence as DbSequence
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import NullPool
from sqlalchemy.sql.compiler import SQLCompiler

from replaydb.database.backend import T, Work
from replaydb.database.connecting import ConnectionLog, connect
from replaydb.database.expressions import (
    among,
    bytewise,
    json_boolean,
    json_double,
    json_integer,
    json_kind,
    json_part,
    json_text,
    matches,
    seconds_between,
)
from replaydb.database.signals import Signal
from replaydb.database.urls import PostgresqlURL
from replaydb.errors import (
    DatabaseError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    ReplayDBError,
)

POOL_SIZE = 8
#: A client that hangs inside a transaction must not hold a task's lock for ever.
IDLE_IN_TRANSACTION_SECONDS = 60
#: Changes made within this time share one NOTIFY, which locks database-wide at commit.
NOTIFY_SECONDS = 0.01
CHANNEL = "replaydb"
_NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
_SCHEMA_LOCK = 0x7265_706C_6179_6462  # "replaydb"

_CONFLICTS = {"40001", "40P01", "23505"}  # serialization, deadlock, unique violation


@compiles(among, "postgresql")
def _compile_among(element: among, compiler: SQLCompiler, **kw: Any) -> str:
    left, values = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"{left} = ANY ({values})"


@compiles(seconds_between, "postgresql")
def _compile_seconds_between(element: seconds_between, compiler: SQLCompiler, **kw: Any) -> str:
    begin, end = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"CAST(EXTRACT(EPOCH FROM ({end} - {begin})) AS DOUBLE PRECISION)"


@compiles(json_part, "postgresql")
def _compile_json_part(element: json_part, compiler: SQLCompiler, **kw: Any) -> str:
    """Each step by `->`, which takes a text for an object's key only, an integer for an array's."""
    path = " -> ".join(compiler.process(clause, **kw) for clause in element.clauses)
    return f"CASE {_JSON_KINDS[type(element)].format(f'({path})')} END"


_JSON_KINDS = {
    json_text: "json_typeof({0}) WHEN 'string' THEN {0} #>> '{{}}'",
    json_integer: (
        "WHEN json_typeof({0}) = 'number' AND {0} #>> '{{}}' ~ '^-?[0-9]{{1,20}}$' THEN"
        " CASE WHEN CAST({0} #>> '{{}}' AS NUMERIC)"
        " BETWEEN -9223372036854775808 AND 9223372036854775807"
        " THEN CAST({0} #>> '{{}}' AS BIGINT) END"
    ),
    json_double: "json_typeof({0}) WHEN 'number' THEN CAST({0} #>> '{{}}' AS DOUBLE PRECISION)",
    json_boolean: "json_typeof({0}) WHEN 'boolean' THEN CAST({0} #>> '{{}}' AS BOOLEAN)",
    json_kind: "json_typeof({0}) WHEN 'null' THEN NULL ELSE json_typeof({0})",
}


@compiles(matches, "postgresql")
def _compile_matches(element: matches, compiler: SQLCompiler, **kw: Any) -> str:
    text, pattern = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({text} LIKE {pattern})"


@compiles(bytewise, "postgresql")
def _compile_bytewise(element: bytewise, compiler: SQLCompiler, **kw: Any) -> str:
    return f'({compiler.process(element.clauses, **kw)} COLLATE "C")'


class PostgresqlBackend:
    """`postgresql://USER:PASSWORD@HOST/DATABASE`."""

    def __init__(self, url: PostgresqlURL, *, read_only: bool = False) -> None:
        self._url = url
        self.read_only = read_only
        self._log = ConnectionLog(url.shown)

    @property
    def shown(self) -> str:
        """Without passwords."""
        return self._url.shown

    @property
    def file(self) -> None:
        """A server has the database."""

    def writer_engine(self) -> AsyncEngine:
        """READ COMMITTED: what must not change is locked, row by row."""
        return self._engine(isolation_level="READ COMMITTED", **_POOL)

    def reader_engine(self) -> AsyncEngine:
        """Every transaction reads one snapshot."""
        engine = self._engine(isolation_level="REPEATABLE READ", **_POOL)
        return engine.execution_options(postgresql_readonly=True)

    def migration_engine(self) -> AsyncEngine:
        """DDL is transactional here; nothing special is needed."""
        return self._engine(isolation_level="READ COMMITTED", poolclass=NullPool)

    async def run(self, connection: AsyncConnection, work: Work[T]) -> T:
        """Where everything runs: the driver lives in the event loop."""
        return await work(connection)

    def signal(self, reader: AsyncEngine) -> Signal:
        """LISTEN and NOTIFY, on connections of their own."""
        # A NOTIFY commits, and a hint is not worth waiting for the disk.
        settings = {"synchronous_commit": "off"}
        return _PostgresqlSignal(
            self._engine(settings, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
        )

    def translate(self, error: BaseException) -> ReplayDBError | None:
        """By SQLSTATE, never by the error's text."""
        cause: BaseException | None = error.orig if isinstance(error, DBAPIError) else error
        state = getattr(cause, "sqlstate", None)
        if state is None:
            if isinstance(
                cause, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError | DBAPIError
            ) or isinstance(error, DBAPIError):
                return DatabaseUnavailableError(f"{self.shown}: {cause}")
            return None
        kind: type[DatabaseError] = DatabaseError
        if state == "53100":
            kind = DatabaseFullError
        elif state == "25006":
            kind = DatabaseReadOnlyError
        elif state[:2] in {"08", "28", "3D", "53", "57"}:
            kind = DatabaseUnavailableError
        return kind(f"{self.shown}: {cause} (SQLSTATE {state})")

    def is_conflict(self, error: BaseException) -> bool:
        """Lost a race against another client and was rolled back whole."""
        return isinstance(error, DBAPIError) and (
            getattr(error.orig, "sqlstate", None) in _CONFLICTS
        )

    async def check_target(self) -> None:
        """Nothing to check: connecting tells."""

    async def lock_schema(self, connection: AsyncConnection) -> None:
        """An advisory lock, until the transaction ends."""
        await connection.execute(select(func.pg_advisory_xact_lock(_SCHEMA_LOCK)))

    async def check_integrity(self, connection: AsyncConnection) -> None:
        """Nothing to do: constraints stay on during DDL."""

    async def now(self, connection: AsyncConnection) -> datetime:
        """The server's: the clocks of its clients need not agree."""
        return (await connection.execute(_NOW)).scalar_one()

    async def allocate_group_ids(self, connection: AsyncConnection, count: int) -> Sequence[int]:
        """From the sequence of the id column."""
        ids = await connection.scalars(
            select(_GROUP_IDS.next_value()).select_from(func.generate_series(1, count))
        )
        return ids.all()

    def _engine(self, settings: Mapping[str, str] = _NO_SETTINGS, **options: Any) -> AsyncEngine:
        server_settings = {
            "application_name": "replaydb",
            "idle_in_transaction_session_timeout": str(1000 * IDLE_IN_TRANSACTION_SECONDS),
            **settings,
            **self._url.settings,
        }
        engine = create_async_engine(
            "postgresql+asyncpg://",  # SQLAlchemy never sees the password
            async_creator=partial(connect, self._url, server_settings),
            hide_parameters=True,
            **options,
        )
        self._log.listen_to(engine)
        return engine


_POOL: dict[str, Any] = {
    "pool_size": POOL_SIZE,
    "max_overflow": 2 * POOL_SIZE,
    "pool_timeout": 60.0,
    "pool_pre_ping": True,
    "pool_use_lifo": True,
}

_NOW = select(func.clock_timestamp(type_=DateTime(timezone=True)))
_GROUP_IDS = DbSequence("episode_group_id_seq", data_type=BigInteger)


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
            async with self._engine.connect() as connection:
                while self._untold:
                    self._untold = False
                    await connection.execute(select(func.pg_notify(CHANNEL, "")))
                    await asyncio.sleep(NOTIFY_SECONDS)
