"""Plain database connections for tests that bypass the store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.engines import backend_for


@asynccontextmanager
async def transaction(url: str) -> AsyncIterator[AsyncConnection]:
    """Run one read-write transaction with foreign keys enabled."""
    backend = backend_for(url)
    if backend.schema.file is not None:
        backend.schema.file.touch()  # only creating the tables creates the file
    engine = backend.writer_engine()
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
                "WHERE application_name = 'replaydb' AND pid <> pg_backend_pid()"
            )
        )
