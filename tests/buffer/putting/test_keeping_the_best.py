"""`eviction="lowest_priority"`: a full buffer keeps the groups with the highest priorities."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import select

import replaydb as rdb
from replaydb import Buffer, Capacity, Store
from replaydb.database.tables.schema import buffer as buffer_table
from replaydb.domain.settings import OnEvict
from support.connections import transaction
from support.groups import group, long_group
from support.invariants import check_invariants, group_rows, statuses


async def best_of(store: Store, groups: int, **settings: Any) -> Buffer:
    capacity = Capacity(groups=groups)
    return await store.buffer("math", capacity=capacity, eviction="lowest_priority", **settings)


def ranked(*priorities: float, task: str = "gsm8k") -> list[rdb.EpisodeGroup]:
    return [group(f"{task}-{one:g}", task, priority=one) for one in priorities]


async def kept(url: str) -> set[str]:
    return {uid for uid, status in (await statuses(url)).items() if status != "archived"}


async def test_a_new_group_with_the_lowest_priority_is_refused(store: Store, url: str) -> None:
    buffer = await best_of(store, 2)
    await buffer.put(ranked(5, 3))
    (refused,) = await buffer.put(ranked(1))
    assert await kept(url) == {"gsm8k-5", "gsm8k-3"}
    (row,) = [row for row in await group_rows(url) if row["id"] == refused]
    assert (row["group_status"], row["status_reason"]) == ("archived", "refused: lowest_priority")
    with pytest.raises(rdb.PayloadGoneError):
        await buffer.get([refused])
    await buffer.put(ranked(4))
    assert await kept(url) == {"gsm8k-5", "gsm8k-4"}
    (evicted,) = [row for row in await group_rows(url) if row["group_uid"] == "gsm8k-3"]
    assert evicted["status_reason"] == "evicted: lowest_priority"
    await buffer.put(group("as good as the worst", priority=4.0))
    assert await kept(url) == {"gsm8k-5", "as good as the worst"}
    await check_invariants(url)


@pytest.mark.parametrize("on_evict", ["archive", "delete"])
async def test_a_put_larger_than_capacity_keeps_its_highest_priorities(
    store: Store, url: str, on_evict: OnEvict
) -> None:
    buffer = await best_of(store, 3, on_evict=on_evict)
    await buffer.put(ranked(4.5))
    ids = await buffer.put([*ranked(*range(9)), group("useless", status="failed", priority=99.0)])
    assert len(set(ids)) == 10
    assert await kept(url) == {"gsm8k-8", "gsm8k-7", "gsm8k-6"}
    assert await buffer.count() == (3 if on_evict == "delete" else 11)
    await check_invariants(url)


async def test_task_capacity_and_buffer_capacity(store: Store, url: str) -> None:
    buffer = await best_of(store, 3, task_capacity={"a": Capacity(groups=1)})
    await buffer.put([*ranked(8, 9, task="a"), *ranked(1, 2, 3, task="b")])
    assert await kept(url) == {"a-9", "b-3", "b-2"}
    await buffer.put([*ranked(7, task="a"), *ranked(1.5, 2.5, task="b")])
    assert await kept(url) == {"a-9", "b-3", "b-2.5"}


async def test_nothing_is_refused_only_because_of_leased_groups(store: Store, url: str) -> None:
    buffer = await best_of(store, 3)
    await buffer.put(ranked(5, 4))
    await buffer.open_group("gsm8k", "slow", 2, priority=0.0)
    lease = await buffer.lease(2, ttl=60)
    before = await statuses(url)
    for several in (ranked(9), ranked(1, 2)):
        with pytest.raises(rdb.BufferFullError):
            await buffer.put(several, timeout=0)
    assert await statuses(url) == before
    await buffer.put(group("useless", status="failed"), timeout=0)
    await lease.nack(lease.batch.ids[:1])
    await buffer.put(ranked(1), timeout=0)  # gsm8k-5 is available and has a higher priority
    await buffer.put(ranked(6), timeout=0)
    assert await kept(url) == {"slow", "gsm8k-4", "gsm8k-6"}
    await check_invariants(url)


async def test_a_put_that_waits_for_capacity_is_not_counted(store: Store, url: str) -> None:
    """Even if it shares the transaction of a put that is stored."""
    limit = rdb.SamplesPerInsert(1.0, min_size=1, error_buffer=20.0)
    buffer = await best_of(store, 2, rate_limit=limit)
    await buffer.put(ranked(1, 2))
    await buffer.lease(2, ttl=60)
    refused, stored = await asyncio.gather(
        buffer.put(ranked(3), timeout=0),
        buffer.put(group(status="filtered")),
        return_exceptions=True,
    )
    assert isinstance(refused, rdb.BufferFullError)
    assert isinstance(stored, list)
    async with transaction(url) as connection:
        assert await connection.scalar(select(buffer_table.c.limited_inserts)) == 3


async def test_a_group_larger_than_capacity_raises(store: Store, url: str) -> None:
    capacity = Capacity(tokens=50)
    buffer = await store.buffer("math", capacity=capacity, eviction="lowest_priority")
    await buffer.put(long_group("stored", 30))
    with pytest.raises(rdb.InvalidInputError, match="groups"):
        await buffer.put([long_group("wide", 51, priority=9.0), *ranked(9)])
    assert await kept(url) == {"stored"}
    await buffer.put([long_group(f"better-{i}", 25, priority=2.0) for i in range(3)])
    assert await kept(url) == {"better-1", "better-2"}
