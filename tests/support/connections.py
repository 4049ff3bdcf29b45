"""Plain connections for tests that look at a database from below."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.engines import backend_for


@asynccontextmanager
async def transaction(url: str) -> AsyncIterator[AsyncConnection]:
    """One read-write transaction, with foreign keys on."""
    backend = backend_for(url)
    if backend.file is not None:
        backend.file.touch()  # a store makes one only for its tables
    engine = backend.writer_engine()
    try:
        async with engine.begin() as connection:
            yield connection
    finally:
        await engine.dispose()


async def cut_off(url: str) -> None:
    """End every other connection of ours, as a restarting server does."""
    async with transaction(url) as connection:
        await connection.execute(
            text(
                "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity "
                "WHERE application_name = 'replaydb' AND pid <> pg_backend_pid()"
            )
        )
