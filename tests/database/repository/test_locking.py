"""What a call reads under its locks was not changed while it waited for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from sqlalchemy import select, update

from replaydb import Capacity, Store
from replaydb.database import schema
from support.connections import transaction
from support.groups import group, groups
from support.postgres import PostgresServer

WAITS_FOR_A_LOCK = (
    "SELECT count(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


async def until_blocked(postgres: PostgresServer, url: str) -> None:
    """Wait until a session waits for a lock."""
    async with asyncio.timeout(20):
        while True:
            if await asyncio.to_thread(postgres.fetch_int, url, WAITS_FOR_A_LOCK):
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("capacity", [None, Capacity(groups=100)], ids=["tasks", "buffer as well"])
async def test_the_buffer_is_read_after_the_wait_for_a_lock(
    postgresql_url: str, postgres: PostgresServer, capacity: Capacity | None
) -> None:
    """The policy version advances while a put and a draw wait for the lock of their task."""
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math", capacity=capacity)
        await buffer.put(groups(4, version=1))
        await buffer.sample(1)  # statements that have run before lock and read in one exchange
        calls: dict[int, Callable[[], Coroutine[Any, Any, Any]]] = {
            5: lambda: buffer.put(group("late", version=1)),
            9: lambda: buffer.sample(5),
        }
        for version, call in calls.items():
            async with transaction(postgresql_url) as other:
                for table in (schema.buffer, schema.task):
                    await other.execute(select(table).with_for_update(key_share=True))
                waiting = asyncio.create_task(call())
                await until_blocked(postgres, postgresql_url)
                await other.execute(update(schema.buffer).values(policy_version=version))
                await other.commit()
            result = await waiting
            if version == 5:
                sql = "SELECT staleness FROM episode_group WHERE group_uid = 'late'"
                assert await asyncio.to_thread(postgres.fetch_int, postgresql_url, sql) == 4
        assert set(result.staleness) == {8}
