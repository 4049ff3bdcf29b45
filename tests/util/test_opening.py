"""Objects that are opened with `async with` are also coroutines."""

from __future__ import annotations

import asyncio
import gc

import pytest

from replaydb import Buffer, InvalidURLError, Lease, NotEnoughGroupsError, Store
from support.groups import groups


def test_a_store_is_opened_by_a_runner(url: str) -> None:
    with asyncio.Runner() as runner:
        store = runner.run(Store.open(url, run="test"))
        assert store.run == "test"
        assert runner.run(store.buffer("math")).run == "test"
        runner.run(store.close())
    with pytest.raises(InvalidURLError):
        asyncio.run(Store.open("nowhere"))


async def test_leases_are_tasks(buffer: Buffer) -> None:
    ids = await buffer.put(groups(4))
    first = await asyncio.create_task(buffer.lease(1, ttl=60))
    second, third = await asyncio.gather(buffer.lease(1, ttl=60), buffer.lease(1, ttl=60))
    fourth = await asyncio.wait_for(buffer.lease(1, ttl=60), 30)
    leases = [first, second, third, fourth]
    assert all(isinstance(lease, Lease) for lease in leases)
    assert sorted(group_id for lease in leases for group_id in lease.batch.ids) == ids
    async with asyncio.TaskGroup() as tasks:
        failed = tasks.create_task(asyncio.wait({asyncio.ensure_future(buffer.lease(1, ttl=60))}))
    ((done,), _) = failed.result()
    assert isinstance(done.exception(), NotEnoughGroupsError)


async def test_a_task_that_waits_for_a_lease_is_cancelled(buffer: Buffer) -> None:
    waiting = asyncio.create_task(buffer.lease(1, ttl=60, timeout=None))
    await asyncio.sleep(0)
    unbegun = asyncio.create_task(buffer.lease(1, ttl=60, timeout=None))
    for task in (waiting, unbegun):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await buffer.leases() == []


async def test_an_opening_runs_once_and_does_not_warn(buffer: Buffer) -> None:
    """Warnings are errors here, including those of a coroutine that is never awaited."""
    await buffer.put(groups(2))
    opening = buffer.lease(1, ttl=60)
    async with opening:
        pass
    with pytest.raises(RuntimeError, match="already awaited"):
        await opening
    buffer.lease(1, ttl=60)
    buffer.lease(1, ttl=60).close()
    gc.collect()
    assert await buffer.leases() == []
