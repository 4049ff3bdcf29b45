"""Connections of a store: `pool_size` limits them, and what happens when one is opened."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import replaydb as rdb
from replaydb import Store
from support.groups import episode, group, groups


async def test_many_calls_share_one_connection_of_each_kind(url: str) -> None:
    async with Store.open(url, run="a", pool_size=1) as store:
        buffer = await store.buffer("math")
        await buffer.put(group())
        calls: list[Any] = []
        for number in range(20):
            calls += [buffer.put(group(f"g{number}")), buffer.sample(1), buffer.count()]
        await asyncio.gather(*calls)
        assert await buffer.count() == 21


async def test_pool_size_limits_connections_to_a_server(postgresql_url: str) -> None:
    direct = await asyncpg.connect(postgresql_url)
    async with Store.open(postgresql_url, run="a", pool_size=2) as store:
        buffer = await store.buffer("math")
        await asyncio.gather(*(buffer.put(group(f"g{number}")) for number in range(20)))
        await asyncio.gather(*(buffer.sample(1) for _ in range(20)), buffer.count())
        mine = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        others = await direct.fetchval(f"{mine} AND pid <> pg_backend_pid()")
    await direct.close()
    assert others <= 2 + 2 + 1  # writers, readers and one for notifications


async def test_pool_size_limits_connections_to_a_file(sqlite_url: str) -> None:
    async with Store.open(sqlite_url, run="a", pool_size=2) as store:
        buffer = await store.buffer("math")
        await buffer.put(group())
        await asyncio.gather(*(buffer.stats() for _ in range(20)))
        assert times_open(Path(sqlite_url.removeprefix("sqlite:///"))) <= 2 + 1 + 1


def times_open(path: Path) -> int:
    """Return how often this process has a file open."""
    files = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
    return files.count(os.path.realpath(path))


@pytest.mark.parametrize("size", [0, -1, 1.5, "8", True])
def test_invalid_pool_sizes_are_refused(sqlite_url: str, size: Any) -> None:
    with pytest.raises(rdb.InvalidInputError) as caught:
        Store.open(sqlite_url, pool_size=size)
    assert caught.value.field == "pool_size"


async def test_array_types_are_read_when_a_connection_is_opened(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncpg would otherwise ask about them when a statement first uses them, under locks."""
    asked: dict[asyncpg.Connection, list[set[int]]] = {}
    introspect = asyncpg.Connection._introspect_types

    async def recorded(connection: asyncpg.Connection, oids: set[int], timeout: float) -> Any:
        asked.setdefault(connection, []).append(set(oids))
        return await introspect(connection, oids, timeout)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", recorded)
    async with Store.open(postgresql_url, pool_size=1) as store:
        buffer = await store.buffer("math", indexed_tags=["kind"], on_ack="return")
        ids = await buffer.put([*groups(8), group(tags={"kind": "rare"})])
        await buffer.sample(2, where=rdb.col.tags["kind"] == "rare", at_least=1)
        for policy in (rdb.Uniform(), rdb.Prioritized(), rdb.Fifo()):
            await (await buffer.lease(2, policy, ttl=60)).ack()
        await buffer.update_priorities(ids[:2], [2.0, 3.0])
        await buffer.update(ids[:2], tags={"level": 1}, priority=2.0)
        await buffer.open_group("gsm8k", "open", 1)
        await buffer.add_episode("open", episode())
        await buffer.advance_policy(3)
        await buffer.delete(ids[:1])
    every = {1000, 1001, 1007, 1016, 1185, 2287}  # bool[], bytea[], ..., record[]
    of_writers = [several for several in asked.values() if any(one >= every for one in several)]
    assert [len(several) for several in of_writers] == [1]
