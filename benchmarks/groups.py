"""Groups to measure with: made one by one, or a million rows at once."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import asyncpg
import numpy as np
from sqlalchemy import insert, make_url
from sqlalchemy.dialects import sqlite

import replaydb as rdb
from replaydb import codec
from replaydb.codec.flat import flatten
from replaydb.database.schema import buffer, episode_group, payload, task

EPISODES, TOKENS = 8, 1024
NUM_VERSIONS = 50
CHUNK = 20_000


def large_group(rng: np.random.Generator, task_name: str = "bench") -> rdb.EpisodeGroup:
    """8 episodes of 1024 tokens: 72 KB."""
    episodes = [
        rdb.Episode(
            prompt_ids=rng.integers(0, 150_000, 256),
            response_ids=rng.integers(0, 150_000, TOKENS - 256),
            logprobs=rng.standard_normal(TOKENS - 256).astype(np.float32),
            reward=float(i % 2),
            policy_version=0,
        )
        for i in range(EPISODES)
    ]
    return rdb.EpisodeGroup(task_name, episodes, group_uid=uuid4().hex)


def small_group(task_name: str = "bench") -> rdb.EpisodeGroup:
    """One episode of two tokens."""
    episode = rdb.Episode(prompt_ids=[1], response_ids=[2], reward=1.0, policy_version=0)
    return rdb.EpisodeGroup(task_name, [episode], group_uid=uuid4().hex)


async def fill(url: str, count: int) -> None:
    """A buffer "bench" of one task, as `count` puts of small groups would have left it."""
    rng = np.random.default_rng(0)
    priorities = rng.gamma(2.0, 1.0, count) + 0.01
    now = datetime.now(UTC)
    buffer_row = {
        "id": 1, "name": "bench", "settings": rdb.BufferSettings(seed=0).to_json(),
        "policy_version": NUM_VERSIONS, "limited_inserts": 0, "limited_samples": 0,
        "created_at": now,
    }  # fmt: skip
    data = codec.encode(flatten(small_group().episodes), compression=None)
    task_row = {
        "buffer_id": 1, "task_name": "bench", "uniform_clock": 0.0, "priority_clock": 0.0,
        "random_counter": 0, "num_available": count, "total_weight": float(priorities.sum()),
        "weight_error": 0.0, "num_pending": 0, "num_leased": 0, "stored_groups": count,
        "stored_tokens": 2 * count, "stored_bytes": len(data) * count,
        "num_inserted": count, "num_sampled": 0,
    }  # fmt: skip
    part = {
        "part": 0,
        "codec_version": codec.VERSION,
        "checksum": codec.checksum(data),
        "data": data,
    }

    def group_rows(first: int, last: int) -> Iterator[dict[str, Any]]:
        keys = rng.exponential(size=(2, last - first))
        for i in range(first, last):
            priority = float(priorities[i])
            version = i * NUM_VERSIONS // count
            yield {
                "id": i + 1, "buffer_id": 1, "group_uid": f"bench-{i}", "task_name": "bench",
                "group_status": "completed", "staleness": NUM_VERSIONS - version,
                "priority": priority, "weight": priority,
                "uniform_key": float(keys[0, i - first]),
                "priority_key": float(keys[1, i - first]) / priority,
                "min_policy_version": version, "max_policy_version": version, "num_episodes": 1,
                "num_tokens": 2, "num_bytes": len(data), "reward_mean": i % 10 / 10,
                "reward_std": 0.0, "times_sampled": 0, "attempts": 0, "has_transcript": False,
                "tags": {}, "created_at": now, "completed_at": now,
            }  # fmt: skip

    writer: Any = _SqliteWriter(url) if url.startswith("sqlite") else _PostgresqlWriter(url)
    async with writer:
        await writer.write(buffer, [buffer_row])
        await writer.write(task, [task_row])
        for first in range(0, count, CHUNK):
            last = min(first + CHUNK, count)
            await writer.write(episode_group, list(group_rows(first, last)))
            await writer.write(payload, [{"group_id": i + 1, **part} for i in range(first, last)])


class _SqliteWriter:
    """sqlite3 without waiting for the disk."""

    def __init__(self, url: str) -> None:
        self._connection = sqlite3.connect(make_url(url).database or "", isolation_level=None)

    async def __aenter__(self) -> None:
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.execute("PRAGMA cache_size = -400000")

    async def __aexit__(self, *exc_info: object) -> None:
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()

    async def write(self, table: Any, rows: list[dict[str, Any]]) -> None:
        compiled = insert(table).compile(
            dialect=sqlite.dialect(paramstyle="named"), column_keys=list(rows[0])
        )
        for row in rows:
            for name, value in row.items():
                if isinstance(value, dict):
                    row[name] = json.dumps(value)
                elif isinstance(value, datetime):
                    row[name] = f"{value:%Y-%m-%d %H:%M:%S.%f}"
        self._connection.execute("BEGIN")
        self._connection.executemany(str(compiled), rows)
        self._connection.execute("COMMIT")


class _PostgresqlWriter:
    """COPY."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> None:
        self._connection = await asyncpg.connect(self._url)
        await self._connection.execute("SET synchronous_commit = off")

    async def __aexit__(self, *exc_info: object) -> None:
        await self._connection.execute("SELECT setval('episode_group_id_seq', 100000000)")
        await self._connection.execute("SELECT setval('buffer_id_seq', 100)")
        await self._connection.execute("VACUUM ANALYZE")
        await self._connection.close()

    async def write(self, table: Any, rows: list[dict[str, Any]]) -> None:
        columns = list(rows[0])
        await self._connection.copy_records_to_table(
            table.name,
            columns=columns,
            records=[
                tuple(
                    json.dumps(value) if isinstance(value, dict) else value
                    for value in row.values()
                )
                for row in rows
            ]
            if table.name not in {"task"}
            else [tuple(row.values()) for row in rows],
        )
