"""Bulk loading of buffers with millions of small groups, as if each had been put.

One real put writes the rows that all others are copied from. Only the columns that differ between
groups are generated here. Indexes are built after all rows are inserted.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import asyncpg
import numpy as np
from sqlalchemy import Dialect, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, DropIndex

import replaydb as rdb
from benchmarks.bare import insert_statement
from benchmarks.groups import TASK, small_group
from replaydb.database.tables.schema import episode_group

#: Seven of ten groups are of the first task, one of ten of each other task.
TASKS = (TASK, "code", "chat", "tools")
_SHARES = (7, 1, 1, 1)
#: Every second group is hard, one in 100 is rare, one in 10,000 is rarest, in every task.
LEVELS = ("easy", "hard", "rare", "rarest")
NUM_VERSIONS = 50
CHUNK = 50_000

#: Columns of `payload` and `episode` that all groups copy from the first group.
_CHILDREN = {
    "payload": "part, codec_version, checksum, data",
    "episode": "position, reward, num_tokens, num_loss_tokens, num_turns, "
    "min_policy_version, max_policy_version, metadata",
}
_COPY = (
    "INSERT INTO {table} (group_id, {columns}) SELECT g.id, one.* FROM episode_group AS g "
    "CROSS JOIN (SELECT {columns} FROM {table} WHERE group_id = 1) AS one "
    "WHERE g.id BETWEEN 2 AND {last} ORDER BY g.id"
)
_DELETE = (
    "DELETE FROM episode_group",
    "DELETE FROM payload WHERE group_id > 1",
    "DELETE FROM episode WHERE group_id > 1",
)
_COUNTERS = """
UPDATE task SET num_available = {count}, stored_groups = {count}, num_inserted = {count},
    stored_tokens = {tokens}, stored_bytes = {bytes},
    total_weight = {weight!r}, weight_error = 0, uniform_clock = 0, priority_clock = 0
WHERE task_name = '{task}'
"""


async def fill(url: str, count: int, report: Callable[[str], None] = lambda _: None) -> None:
    """Create the buffer "bench" with `count` groups (at least ten), on a database without rows."""
    await _put_templates(url)
    loader: _Loader = _Sqlite(url) if url.startswith("sqlite") else _Postgresql(url)
    async with loader:
        [template, *_] = await loader.fetch("SELECT * FROM episode_group ORDER BY id LIMIT 1")
        for statement in _DELETE:
            await loader.execute(statement)
        for index in episode_group.indexes:
            await loader.execute(str(DropIndex(index)))
        weights = dict.fromkeys(TASKS, 0.0)
        for columns in _chunks(count):
            for task in TASKS:
                weights[task] += float(columns["weight"][columns["task_name"] == task].sum())
            await loader.insert(template, columns)
            report(f"filling {count:,}: {columns['id'][-1]:,} groups")
        for table, names in _CHILDREN.items():
            report(f"filling {count:,}: {table}")
            await loader.execute(_COPY.format(table=table, columns=names, last=count))
        for index in episode_group.indexes:
            report(f"filling {count:,}: {index.name}")
            await loader.execute(str(CreateIndex(index).compile(dialect=loader.dialect)))
        await _set_counters(loader, template, count, weights)
        report(f"filling {count:,}: statistics")


async def _put_templates(url: str) -> None:
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench", seed=0, on_ack="return")
        for task in TASKS:
            await buffer.put(small_group(task))
        assert buffer.id == 1, "the database must have no other buffer"


async def _set_counters(
    loader: _Loader, template: Mapping[str, Any], count: int, weights: Mapping[str, float]
) -> None:
    await loader.execute(f"UPDATE buffer SET policy_version = {NUM_VERSIONS}")  # noqa: S608
    for i, task in enumerate(TASKS):
        mine = int((_task_indexes(0, count) == i).sum())
        counters = {
            "task": task,
            "count": mine,
            "tokens": mine * template["num_tokens"],
            "bytes": mine * template["num_bytes"],
            "weight": weights[task],
        }
        await loader.execute(_COUNTERS.format_map(counters))


def _task_indexes(first: int, last: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the index into `TASKS` of groups in the order of their ids."""
    return np.repeat(np.arange(len(TASKS)), _SHARES)[np.arange(first, last) % sum(_SHARES)]


def _chunks(count: int) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield the columns that differ between groups, in chunks."""
    rng = np.random.default_rng(0)
    tags = np.array([json.dumps({"level": level}) for level in LEVELS], object)
    for first in range(0, count, CHUNK):
        i = np.arange(first, min(first + CHUNK, count))
        uniform, exponential = rng.exponential(size=(2, len(i)))
        priority = rng.gamma(2.0, 1.0, len(i)) + 0.01
        version = i * NUM_VERSIONS // count
        tens = i // sum(_SHARES)
        rare = np.where(tens % 100 == 0, 2, tens % 2)
        yield {
            "id": i + 1,
            "group_uid": np.array([f"bench-{one:09}" for one in i.tolist()], object),
            "task_name": np.array(TASKS, object)[_task_indexes(first, first + len(i))],
            "priority": priority,
            "weight": priority,
            "uniform_key": uniform,
            "priority_key": exponential / priority,
            "min_policy_version": version,
            "max_policy_version": version,
            "comparable_version": version,
            "staleness": NUM_VERSIONS - version,
            "reward_mean": rng.integers(0, 10, len(i)) / 10,
            "tags": tags[np.where(tens % 10_000 == 1, 3, rare)],
        }


class _Loader(Protocol):
    """A connection for bulk loading."""

    dialect: Dialect

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def execute(self, sql: str) -> None: ...

    async def fetch(self, sql: str) -> list[dict[str, Any]]: ...

    async def insert(self, template: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
        """Insert groups that differ from the template in these columns."""


def _records(
    template: Mapping[str, Any], columns: Mapping[str, Any]
) -> tuple[tuple[str, ...], Iterator[Sequence[Any]]]:
    """Return the names and rows of the columns that are not NULL."""
    count = len(columns["id"])
    full = {name: [value] * count for name, value in template.items() if value is not None}
    full |= {name: column.tolist() for name, column in columns.items()}
    return tuple(full), zip(*full.values(), strict=True)


class _Sqlite:
    """Bulk loading without waiting for the disk."""

    dialect: Dialect = sqlite.dialect()

    def __init__(self, url: str) -> None:
        self._connection = sqlite3.connect(make_url(url).database or "", isolation_level=None)
        self._connection.row_factory = sqlite3.Row

    async def __aenter__(self) -> Self:
        for pragma in ("synchronous = OFF", "cache_size = -1000000", "threads = 2"):
            self._connection.execute(f"PRAGMA {pragma}")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()

    async def execute(self, sql: str) -> None:
        self._connection.execute(sql)

    async def fetch(self, sql: str) -> list[dict[str, Any]]:
        return [dict(row) for row in self._connection.execute(sql)]

    async def insert(self, template: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
        names, rows = _records(template, columns)
        self._connection.execute("BEGIN")
        self._connection.executemany(insert_statement(episode_group, self.dialect, names), rows)
        self._connection.execute("COMMIT")


class _Postgresql:
    """Bulk loading by COPY, without foreign key checks, which requires a superuser."""

    dialect: Dialect = postgresql.asyncpg.dialect()

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> Self:
        self._connection = await asyncpg.connect(self._url)
        for setting in (
            "synchronous_commit = off",
            "session_replication_role = replica",
            "maintenance_work_mem = '1GB'",
        ):
            await self._connection.execute(f"SET {setting}")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._connection.execute(
            "SELECT setval(pg_get_serial_sequence('episode_group', 'id'), max(id)) "
            "FROM episode_group"
        )
        await self._connection.execute("VACUUM ANALYZE")
        await self._connection.close()

    async def execute(self, sql: str) -> None:
        await self._connection.execute(sql)

    async def fetch(self, sql: str) -> list[dict[str, Any]]:
        return [dict(row) for row in await self._connection.fetch(sql)]

    async def insert(self, template: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
        names, rows = _records(template, columns)
        await self._connection.copy_records_to_table("episode_group", columns=names, records=rows)
