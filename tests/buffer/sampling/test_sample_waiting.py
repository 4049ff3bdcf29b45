"""A sample waits for groups of this process, of another store, of another process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import replaydb as rdb
from replaydb import Batch, Buffer, Store
from replaydb.buffer.requests import draw_request
from support.engines import postgresql_nightly
from support.groups import group, groups
from support.other_process import other_process
from support.wait_counter import WaitCounter
from support.watching import recorded


@pytest.fixture(autouse=True)
def _woken_by_signals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable polling."""
    monkeypatch.setattr("replaydb.database.runtime.signals.RECHECK_SECONDS", 600.0)


@asynccontextmanager
async def waiting(buffer: Buffer, n: Any = 1, **arguments: Any) -> AsyncIterator[Awaitable[Batch]]:
    """A sample that has been waiting for a while when the block begins."""
    arguments = {"timeout": 600} | arguments
    sample = asyncio.create_task(buffer.sample(n, rdb.Fifo(), **arguments))
    await asyncio.sleep(0.25)
    assert not sample.done()
    try:
        yield asyncio.wait_for(sample, 30)
    finally:
        sample.cancel()


async def test_when_another_attempt_is_worthwhile(buffer: Buffer) -> None:
    await buffer.put([*(group(task="a") for _ in range(4)), group(task="b")])
    cases: list[tuple[Any, int | None, bool]] = [
        (5, None, True),
        (6, None, False),
        (6, 5, True),
        ({"a": 4, "b": 1}, None, True),
        ({"a": 2, "b": 2}, None, False),  # a surplus of one task does not help the other
        ({"a": 2, "b": 2}, 3, True),
    ]
    for n, at_least, expected in cases:
        request = draw_request(n, rdb.Fifo(), None, None, None, None, at_least)
        assert await buffer._may_suffice(request, None) is expected, (n, at_least)


@postgresql_nightly
@pytest.mark.parametrize("timeout", [None, float("inf")])
async def test_a_wait_without_timeout(buffer: Buffer, timeout: float | None) -> None:
    async with waiting(buffer, timeout=timeout) as sample:
        await buffer.put(group("a"))
        assert len(await sample) == 1


async def test_a_put_of_another_store_wakes(buffer: Buffer, url: str) -> None:
    async with Store.open(url) as second:
        there = await second.buffer("math")
        for _ in range(2):
            async with waiting(buffer) as sample:
                await there.put(group())
                assert len(await sample) == 1
            await buffer.delete(statuses="completed")


async def test_a_put_of_another_process_wakes(buffer: Buffer, url: str) -> None:
    async with (
        other_process("put", url, "math", "a", "b") as other,
        waiting(buffer, 2) as sample,
    ):
        done = await other.act()
        assert (await sample).ids == done["ids"]


@postgresql_nightly
async def test_only_enough_is_enough(buffer: Buffer) -> None:
    await buffer.put([*groups(2), *groups(2, "code", tags={"level": "hard"})])
    hard = rdb.col.tags["level"].as_string() == "hard"
    async with (
        waiting(buffer, 5) as total,
        waiting(buffer, {"gsm8k": 2, "code": 3}) as quotas,
        waiting(buffer, 3, where=hard) as filtered,
        waiting(buffer, 3, tasks="gsm8k") as of_task,
    ):
        await buffer.put(group("easy", "code"))
        assert len(await total) == 5
        assert [one.task_name for one in (await quotas).groups] == ["gsm8k"] * 2 + ["code"] * 3
        await buffer.put(group("hard", "code", tags={"level": "hard"}))
        assert [one.group_uid for one in (await filtered).groups] == ["code-0", "code-1", "hard"]
        await buffer.put(group("last"))
        assert [one.group_uid for one in (await of_task).groups] == ["gsm8k-0", "gsm8k-1", "last"]


async def test_there_is_enough_already(buffer: Buffer) -> None:
    await buffer.put(groups(3))
    for timeout in (0, 0.0, 600, None):
        assert len(await asyncio.wait_for(buffer.sample(3, timeout=timeout), 30)) == 3


@postgresql_nightly
@pytest.mark.parametrize("timeout", [0, 0.3])
async def test_time_runs_out(buffer: Buffer, timeout: float) -> None:
    await buffer.put(groups(2))
    start = time.monotonic()
    with pytest.raises(rdb.NotEnoughGroupsError) as caught:
        await buffer.sample(3, timeout=timeout)
    assert timeout <= time.monotonic() - start
    assert (caught.value.wanted, caught.value.available) == (3, 2)


@postgresql_nightly
async def test_a_wait_ends_at_at_least_groups(buffer: Buffer) -> None:
    first = await buffer.put(groups(2))
    async with (
        waiting(buffer, 9, at_least=4) as some,
        waiting(buffer, {"gsm8k": 9, "code": 1}, at_least=4) as of_tasks,
    ):
        await buffer.put(group("third"))
        more = await buffer.put([group("fourth"), group("fifth")])
        assert (await some).ids == (await of_tasks).ids == [*first, 3, *more]
    with pytest.raises(rdb.NotEnoughGroupsError) as caught:
        await buffer.sample(9, timeout=0.1, at_least=6)
    assert (caught.value.wanted, caught.value.available) == (6, 5)


async def test_a_wait_is_cancelled_at_once(buffer: Buffer) -> None:
    tasks = [asyncio.create_task(buffer.sample(1, timeout=None)) for _ in range(3)]
    await asyncio.sleep(0.2)
    for task in tasks:
        task.cancel()
        await asyncio.wait([task], timeout=30)
        assert task.cancelled()
    ids = await buffer.put(group())
    assert [one.times_sampled for one in await buffer.get(ids)] == [0]


async def test_a_cancellation_that_comes_with_a_change_is_not_lost(buffer: Buffer) -> None:
    task = asyncio.create_task(buffer.sample(1, timeout=600))
    await asyncio.sleep(0.2)
    buffer._database.signal.announce()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(task), 30)


@postgresql_nightly
async def test_a_wait_runs_no_statements(
    store: Store, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as nothing is committed."""
    wait_counter = WaitCounter(monkeypatch)
    async with waiting(buffer) as sample:
        await wait_counter.until_asleep()
        with recorded(store) as asked:
            await asyncio.sleep(0.3)
            assert asked == []
            await buffer.put(group())
            assert len(await sample) == 1
    assert asked


async def test_one_put_ends_many_waits(buffer: Buffer) -> None:
    """A sample does not remove groups, so one put is enough for all."""
    samples = [asyncio.create_task(buffer.sample(1, timeout=20)) for _ in range(12)]
    await asyncio.sleep(0.2)
    await buffer.put(group())
    batches = await asyncio.gather(*samples)
    assert {one.ids[0] for one in batches} == {1}
    assert (await buffer.get([1]))[0].times_sampled == 12


@postgresql_nightly
async def test_other_changes_end_no_wait(buffer: Buffer) -> None:
    async with waiting(buffer) as sample:
        await buffer.put(group(status="failed"))
        await buffer.delete([99])
        await buffer.update_settings(seed=1)
        await buffer.count()  # time for the wait to check after each of them
        [group_id] = await buffer.put(group())
        assert (await sample).ids == [group_id]
