"""Cancelling a lease at any time: no group stays leased beyond the ttl, and nothing counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.database.runtime.transactions import Database
from replaydb.database.tables import schema
from support.engines import sqlite_nightly
from support.groups import groups
from support.invariants import check_invariants, group_rows, number_of, statuses


@pytest.mark.usefixtures("reading")
async def test_cancelled_at_any_moment(store: Store, url: str) -> None:
    buffer = await store.buffer("math", max_attempts=1000)
    await buffer.put(groups(8))
    for step in range(60):
        task = asyncio.ensure_future(_take(buffer))
        await asyncio.sleep(step * 0.0004)
        task.cancel()
        await asyncio.wait([task])
    # The groups are released before the ttl, even if the cancelled commit was made.
    batch = await buffer.sample(8)
    assert len(batch) == 8
    assert set((await statuses(url)).values()) == {"completed"}
    assert await number_of(url, schema.lease) == 0


async def _take(buffer: Buffer) -> None:
    async with buffer.lease(4, ttl=500):
        await asyncio.sleep(60)  # never acked


@pytest.mark.usefixtures("from_snapshots")
async def test_cancelled_during_the_transfer_of_payloads(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await store.buffer("math", max_attempts=1)
    await buffer.put(groups(2))
    reached, read = asyncio.Event(), Database._read
    loop = asyncio.get_running_loop()

    async def stuck(*arguments: Any) -> Any:
        await read(*arguments)
        loop.call_soon_threadsafe(reached.set)
        await asyncio.sleep(60)

    with monkeypatch.context() as patch:
        patch.setattr(Database, "_read", stuck)
        task = asyncio.ensure_future(buffer.lease(2, ttl=60).__aenter__())
        await reached.wait()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert set((await statuses(url)).values()) == {"completed"}
    assert {row["attempts"] for row in await group_rows(url)} == {0}
    assert await number_of(url, schema.lease) == 0


@pytest.mark.usefixtures("from_snapshots")
async def test_many_cancelled_at_once_do_not_block_each_other(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To release their leases all need the writer, while calls that have it wait for readers."""
    buffer = await store.buffer("math")
    await buffer.put(groups(40))
    read, loop = Database._read, asyncio.get_running_loop()
    reading, all_reading, is_stuck = 0, asyncio.Event(), True

    async def slow(*arguments: Any) -> Any:
        nonlocal reading
        found = await read(*arguments)
        reading += 1
        if reading == 4:
            loop.call_soon_threadsafe(all_reading.set)
        while is_stuck:  # noqa: ASYNC110 - an event belongs to one loop
            await asyncio.sleep(0.01)
        return found

    monkeypatch.setattr(Database, "_read", slow)
    tasks = [asyncio.ensure_future(buffer.lease(1, ttl=60).__aenter__()) for _ in range(10)]
    await all_reading.wait()
    await asyncio.sleep(0.1)  # one more has the writer, and waits for a reader
    for task in tasks[:4]:
        task.cancel()
    await asyncio.sleep(0.1)
    is_stuck = False
    async with asyncio.timeout(60):
        await asyncio.wait(tasks[:4])
        leases = await asyncio.gather(*tasks[4:])
    for lease in leases:
        await lease.__aexit__(None, None, None)
    await check_invariants(url)
    assert list((await statuses(url)).values()).count("archived") == 6


async def test_cancelled_inside_the_block(buffer: Buffer, url: str) -> None:
    await buffer.put(groups(2))
    entered = asyncio.Event()

    async def hold() -> None:
        async with buffer.lease(2, ttl=60):
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.ensure_future(hold())
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert set((await statuses(url)).values()) == {"completed"}
    assert {row["attempts"] for row in await group_rows(url)} == {1}


@sqlite_nightly
async def test_waiting_for_a_lease_that_expires(buffer: Buffer) -> None:
    """Nothing is committed when a lease expires, so the waiting call must check by itself."""
    ids = await buffer.put(groups(1))
    await buffer.lease(1, ttl=0.3)
    second = await buffer.lease(1, ttl=60, timeout=60)
    assert second.batch.ids == ids
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.lease(1, ttl=60, timeout=0.05)
    await second.ack()


@sqlite_nightly
async def test_cancelled_while_the_block_ends(buffer: Buffer, url: str) -> None:
    """At any point of the ack, long before the lease would expire."""
    await buffer.put(groups(2))
    await buffer.update_settings(on_ack="return")
    for moment in range(60):
        leave = asyncio.Event()

        async def hold(leave: asyncio.Event = leave) -> None:
            async with buffer.lease(2, ttl=500):
                await leave.wait()

        task = asyncio.create_task(hold())
        while not await buffer.leases():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        leave.set()
        for _ in range(moment % 20):
            await asyncio.sleep(0)
        if moment >= 20:
            await asyncio.sleep(moment * 0.0001)
        task.cancel()
        await asyncio.wait([task])
        assert await buffer.leases() == []
    assert set((await statuses(url)).values()) == {"completed"}


@sqlite_nightly
@pytest.mark.usefixtures("reading")
async def test_a_loader_cancelled_while_it_closes(buffer: Buffer, url: str) -> None:
    await buffer.put(groups(8))
    for moment in range(1, 30):
        loader = buffer.loader(2, rdb.Fifo(), lease=True, ttl=500, prefetch=2)
        await anext(loader)
        task = asyncio.create_task(loader.aclose())
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert await buffer.leases() == []
    assert set((await statuses(url)).values()) == {"completed"}
