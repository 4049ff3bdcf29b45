"""What a call reads under its locks was not changed while it waited for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from sqlalchemy import func, select, update

from replaydb import Capacity, Store
from replaydb.database import schema
from replaydb.database.statements.buffer import lock_buffer
from support.connections import transaction
from support.groups import group, groups
from support.postgres import PostgresServer


async def staleness_of(uid: str, url: str) -> int | None:
    """Return the column `staleness` of a group."""
    async with transaction(url) as connection:
        group_uid = schema.episode_group.c.group_uid
        stored = select(schema.episode_group.c.staleness).where(group_uid == uid)
        return await connection.scalar(stored)


@pytest.mark.parametrize("capacity", [None, Capacity(groups=100)], ids=["tasks", "buffer as well"])
async def test_buffer_and_clock_are_read_after_the_wait_for_a_lock(
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
        times = []
        for version, call in calls.items():
            async with transaction(postgresql_url) as other:
                for table in (schema.buffer, schema.task):
                    await other.execute(select(table).with_for_update(key_share=True))
                waiting = asyncio.create_task(call())
                await postgres.until_blocked(postgresql_url)
                await other.execute(update(schema.buffer).values(policy_version=version))
                times.append(await other.scalar(select(func.clock_timestamp())))
                await other.commit()
            result = await waiting
            if version == 5:
                assert await staleness_of("late", postgresql_url) == 4
        (late,) = [one for one in result.groups if one.group_uid == "late"]
        assert late.created_at > times[0]
        assert late.last_sampled_at > times[1]
        assert set(result.staleness) == {8}


async def test_puts_and_draws_do_not_wait_for_a_locked_buffer(postgresql_url: str) -> None:
    """What they write refers to the buffer, and its lock does not conflict with that."""
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math")
        await buffer.put(group("a"))
        async with transaction(postgresql_url) as other:
            await other.execute(lock_buffer.build(1))
            async with asyncio.timeout(30):
                await buffer.put(group("b"))
                await buffer.sample(1)
