"""Plain database connections for tests that bypass the store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiosqlite
from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from replaydb.database.engines import backend_for
from replaydb.database.postgresql.backend import PostgresqlBackend
from replaydb.database.postgresql.connecting import connect
from replaydb.database.runtime.prepared import Bound
from replaydb.database.runtime.session import Session
from replaydb.database.sqlite.backend import SqliteBackend


def engine_of(url: str, *, foreign_keys: bool = True) -> AsyncEngine:
    """Return an engine for read-write transactions, which begin before they read."""
    backend: Any = backend_for(url)
    if isinstance(backend, PostgresqlBackend):
        settings = {"application_name": "replaydb", **backend.url.settings}
        return create_async_engine(
            "postgresql+asyncpg://",
            connect_args={"async_creator_fn": partial(connect, backend.url, settings)},
            isolation_level="READ COMMITTED",
            poolclass=NullPool,
        )
    return _sqlite_engine(backend, foreign_keys)


def _sqlite_engine(backend: SqliteBackend, foreign_keys: bool) -> AsyncEngine:
    pragmas = backend.pragmas(*(() if foreign_keys else ("PRAGMA foreign_keys = OFF",)))

    async def connect(*_: object, **__: object) -> aiosqlite.Connection:
        backend.path.touch()  # only creating the tables creates the file
        open_file = partial(backend.file.connect, pragmas, timeout=60.0)
        return await aiosqlite.Connection(open_file, iter_chunk_size=64)

    engine = create_async_engine(
        "sqlite+aiosqlite://", connect_args={"async_creator_fn": connect}, poolclass=NullPool
    )

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        driver._conn.check()
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


class CoreSession(Session):
    """Runs the statements of a function of a session with SQLAlchemy, one after the other."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def core(self) -> Connection:
        return self._connection

    def run(self, statement: Any) -> Any:
        values: Any = {}
        if isinstance(statement, Bound):
            statement, values = statement[:2]
        result: Any = self._connection.execute(statement, values)
        return result.all() if result.returns_rows else result.rowcount

    def run_many(self, statement: Any, rows: Any) -> None:
        for row in rows:
            self._connection.execute(statement, row)

    def now(self) -> Any:
        raise NotImplementedError

    def identify(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def read_payloads(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


@asynccontextmanager
async def transaction(url: str, *, foreign_keys: bool = True) -> AsyncIterator[AsyncConnection]:
    """Run one read-write transaction."""
    engine = engine_of(url, foreign_keys=foreign_keys)
    try:
        async with engine.begin() as connection:
            yield connection
    finally:
        await engine.dispose()


async def terminate_connections(url: str) -> None:
    """Terminate all other connections of replaydb, as a restarting server does."""
    async with transaction(url) as connection:
        await connection.execute(
            text(
                "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity "
                "WHERE application_name LIKE 'replaydb %' AND pid <> pg_backend_pid()"
            )
        )
