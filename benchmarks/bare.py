"""Baseline: the same rows in the same tables, written and read with the bare driver."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from random import random
from typing import Any, Protocol

import asyncpg
from sqlalchemy import Dialect, Table, insert, make_url
from sqlalchemy.dialects import postgresql, sqlite

import replaydb as rdb
from benchmarks.groups import TASK
from replaydb import codec
from replaydb.database.tables.records import to_record
from replaydb.database.tables.schema import episode, episode_group, payload

#: Rows by table; tables that others refer to come first.
Rows = Mapping[Table, Sequence[tuple[Any, ...]]]
#: Group id, bytes and checksum of a payload.
Payload = tuple[int, bytes, int]

_CLAIM = (
    "SELECT id FROM episode_group WHERE buffer_id = {} AND task_name = {} "
    "AND group_status = 'completed' ORDER BY id LIMIT {}"
)
_MARK = "UPDATE episode_group SET group_status = {} WHERE id {}"
_FETCH = "SELECT group_id, data, checksum FROM payload WHERE group_id {}"


class Driver(Protocol):
    """A connection of a bare driver."""

    dialect: Dialect

    async def write(self, rows: Rows) -> None:
        """Insert rows in one transaction."""

    async def read(self, ids: Sequence[int]) -> list[Payload]:
        """Read payloads by primary key."""

    async def claim(self, buffer_id: int, count: int) -> list[Payload]:
        """Mark the oldest groups as leased and read them, in one transaction."""

    async def release(self, ids: Sequence[int]) -> None:
        """Set the status of leased groups back to completed."""

    async def close(self) -> None:
        """Close the connection."""


async def connect(url: str) -> Driver:
    """Connect with the bare driver of an engine, with the settings that replaydb uses."""
    if url.startswith("sqlite"):
        return _Sqlite(make_url(url).database or "")
    return _Postgresql(await asyncpg.connect(url))


class Encoder:
    """Converts groups to rows with the codec of replaydb, without a store."""

    def __init__(self, driver: Driver, buffer_id: int, first_id: int = 1_000_000) -> None:
        self._sqlite = isinstance(driver, _Sqlite)
        self._buffer_id = buffer_id
        self._next_id = first_id

    def rows(self, groups: Iterable[rdb.EpisodeGroup]) -> Rows:
        """Return rows for every table that a put writes."""
        now: Any = datetime.now(UTC)
        if self._sqlite:
            now = f"{now:%Y-%m-%d %H:%M:%S.%f}"
        tables: dict[Table, list[tuple[Any, ...]]] = {episode_group: [], episode: [], payload: []}
        for group in groups:
            record, group_id = to_record(group, None), self._next_id
            self._next_id += 1
            row = record.facts | {
                "id": group_id, "buffer_id": self._buffer_id, "weight": 1.0,
                "uniform_key": random(), "priority_key": random(), "times_replaced": 0,
                "times_annotated": 0,
                "is_evicted": False,
                "created_at": now, "completed_at": now, "tags": json.dumps(record.facts["tags"]),
            }  # fmt: skip
            tables[episode_group].append(_values(episode_group, row))
            for one in record.episodes:
                row = one | {"group_id": group_id, "metadata": json.dumps(one["metadata"])}
                tables[episode].append(_values(episode, row))
            for one in record.payloads:
                tables[payload].append(_values(payload, one.row(group_id)))
        return tables


def decode(payloads: Iterable[Payload]) -> None:
    """Decode payloads with the codec of replaydb."""
    for _, data, checksum in payloads:
        assert codec.mismatch(data, checksum) is None
        codec.decode([data])


@cache
def insert_statement(table: Table, dialect: Dialect, columns: tuple[str, ...] | None = None) -> str:
    """Return an INSERT statement with a parameter for every column."""
    names = list(columns or table.columns.keys())
    return str(insert(table).compile(dialect=dialect, column_keys=names))


def _values(table: Table, row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in table.columns.keys())  # noqa: SIM118 - of columns


class _Sqlite:
    dialect: Dialect = sqlite.dialect()

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for pragma in (
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "foreign_keys = ON",
            "mmap_size = 1073741824",
        ):
            self._connection.execute(f"PRAGMA {pragma}")

    async def write(self, rows: Rows) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        for table, values in rows.items():
            statement = insert_statement(table, self.dialect)
            self._connection.executemany(statement, values)
        self._connection.execute("COMMIT")

    async def read(self, ids: Sequence[int]) -> list[Payload]:
        fetch = _FETCH.format("= ?")
        return [self._connection.execute(fetch, (one,)).fetchone() for one in ids]

    async def claim(self, buffer_id: int, count: int) -> list[Payload]:
        self._connection.execute("BEGIN IMMEDIATE")
        found = self._connection.execute(_CLAIM.format("?", "?", "?"), (buffer_id, TASK, count))
        ids = [row[0] for row in found]
        self._mark("leased", ids)
        payloads = await self.read(ids)
        self._connection.execute("COMMIT")
        return payloads

    async def release(self, ids: Sequence[int]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._mark("completed", ids)
        self._connection.execute("COMMIT")

    async def close(self) -> None:
        self._connection.close()

    def _mark(self, status: str, ids: Sequence[int]) -> None:
        self._connection.executemany(_MARK.format("?", "= ?"), [(status, one) for one in ids])


class _Postgresql:
    dialect: Dialect = postgresql.asyncpg.dialect()

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def write(self, rows: Rows) -> None:
        async with self._connection.transaction():
            for table, values in rows.items():
                statement = insert_statement(table, self.dialect)
                await self._connection.executemany(statement, values)

    async def read(self, ids: Sequence[int]) -> list[Payload]:
        found: list[Payload] = await self._connection.fetch(_FETCH.format("= ANY ($1)"), list(ids))
        return found

    async def claim(self, buffer_id: int, count: int) -> list[Payload]:
        claim = _CLAIM.format("$1", "$2", "$3") + " FOR UPDATE SKIP LOCKED"
        async with self._connection.transaction():
            ids = [row["id"] for row in await self._connection.fetch(claim, buffer_id, TASK, count)]
            await self._mark("leased", ids)
            return await self.read(ids)

    async def release(self, ids: Sequence[int]) -> None:
        await self._mark("completed", ids)

    async def close(self) -> None:
        await self._connection.close()

    async def _mark(self, status: str, ids: Sequence[int]) -> None:
        await self._connection.execute(_MARK.format("$1", "= ANY ($2)"), status, list(ids))
