"""Plain connections for tests that look at a database from below."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.backend import backend_for


@asynccontextmanager
async def transaction(url: str) -> AsyncIterator[AsyncConnection]:
    """One read-write transaction, with foreign keys on."""
    engine = backend_for(url).writer_engine()
    try:
        async with engine.begin() as connection:
            yield connection
    finally:
        await engine.dispose()
