"""The same rows into the same tables with a driver and nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import asyncpg
from sqlalchemy import event, make_url

import replaydb as rdb

Insert = tuple[str, Sequence[Any]]


@contextmanager
def recorded_inserts(buffer: rdb.Buffer) -> Iterator[list[Insert]]:
    """What puts send for the groups' own rows, as statements and parameters."""
    inserts: list[Insert] = []
    engine = buffer._database._writer.sync_engine

    def record(
        _connection: Any, _cursor: Any, sql: str, values: Any, _context: Any, many: bool
    ) -> None:
        if sql.startswith("INSERT INTO"):
            inserts.append((sql, list(values) if many else [values]))

    event.listen(engine, "before_cursor_execute", record)
    try:
        yield inserts
    finally:
        event.remove(engine, "before_cursor_execute", record)


class Bare(Protocol):
    """A driver's connection."""

    async def write(self, inserts: Sequence[Insert]) -> None:
        """All in one transaction."""

    async def read(self, ids: Sequence[int]) -> int:
        """Payloads by primary key; how many bytes."""

    async def close(self) -> None:
        """Let go."""


async def connect(url: str) -> Bare:
    """The bare connection of an engine, set up as ours are."""
    if url.startswith("sqlite"):
        return _BareSqlite(make_url(url).database or "")
    return _BarePostgresql(await asyncpg.connect(url))


class _BareSqlite:
    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for pragma in (
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "foreign_keys = ON",
            "mmap_size = 1073741824",
        ):
            self._connection.execute(f"PRAGMA {pragma}")

    async def write(self, inserts: Sequence[Insert]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        for sql, rows in inserts:
            self._connection.executemany(sql, rows)
        self._connection.execute("COMMIT")

    async def read(self, ids: Sequence[int]) -> int:
        total = 0
        for one in ids:
            found = self._connection.execute("SELECT data FROM payload WHERE group_id = ?", (one,))
            total += len(found.fetchone()[0])
        return total

    async def close(self) -> None:
        self._connection.close()


class _BarePostgresql:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def write(self, inserts: Sequence[Insert]) -> None:
        async with self._connection.transaction():
            for sql, rows in inserts:
                await self._connection.executemany(sql, rows)

    async def read(self, ids: Sequence[int]) -> int:
        rows = await self._connection.fetch(
            "SELECT data FROM payload WHERE group_id = ANY ($1)", list(ids)
        )
        return sum(len(row["data"]) for row in rows)

    async def close(self) -> None:
        await self._connection.close()
