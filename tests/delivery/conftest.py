"""A store on each engine, a clock that tests set, and books that are checked after every test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb import Buffer, Store
from replaydb.database.postgresql import PostgresqlBackend
from replaydb.database.sqlite import SqliteBackend
from support.ledger import check_books


class Clock:
    """The time that leases and deadlines go by; it runs, and jumps ahead when told."""

    def __init__(self) -> None:
        self._ahead = timedelta()

    def jump(self, seconds: float) -> None:
        self._ahead += timedelta(seconds=seconds)

    def now(self) -> datetime:
        return datetime.now(UTC) + self._ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of both engines' clocks."""
    made = Clock()

    async def now(backend: object, connection: AsyncConnection) -> datetime:
        return made.now()

    for backend in (SqliteBackend, PostgresqlBackend):
        monkeypatch.setattr(backend, "now", now)
    return made


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    """An open store, of the run `test`."""
    async with Store.open(url, run="test") as opened:
        yield opened
    await check_books(url)


@pytest.fixture
async def other(url: str, store: Store) -> AsyncIterator[Store]:
    """The same database through another store, as another process would see it."""
    async with Store.open(url, run="other") as opened:
        yield opened


@pytest.fixture
async def buffer(store: Store) -> Buffer:
    """An empty buffer with default settings."""
    return await store.buffer("math")
