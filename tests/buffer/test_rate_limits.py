"""Rate limits: what they allow, computed by hand, and how calls wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

import replaydb as rdb
from replaydb import Buffer, MinSize, Queue, SamplesPerInsert, Store
from replaydb.buffer import waiting
from support.engines import postgresql_nightly
from support.groups import episode, group, groups


async def puts(buffer: Buffer, count: int, task: str = "gsm8k") -> bool:
    """Whether `count` groups can be put now."""
    try:
        await buffer.put([group(task=task) for _ in range(count)], timeout=0)
    except rdb.RateLimitedError:
        return False
    return True


async def draws(buffer: Buffer, count: int) -> bool:
    try:
        await buffer.sample(count)
    except rdb.RateLimitedError:
        return False
    return True


async def test_min_size(store: Store) -> None:
    buffer = await store.buffer("math", rate_limit=MinSize(3))
    assert await puts(buffer, 1)
    assert await puts(buffer, 1, "code")
    assert not await draws(buffer, 1)
    assert await puts(buffer, 1)
    assert await draws(buffer, 1)
    assert await draws(buffer, 3)
    async with buffer.lease(1, ttl=60):
        assert not await draws(buffer, 1)
    assert not await draws(buffer, 1)  # one was archived


async def test_samples_per_insert_before_min_size(store: Store) -> None:
    # diff = inserts * 2 - samples stays within 4 * 2 -+ 3 = [5, 11] once 4 were put.
    buffer = await store.buffer("math", rate_limit=SamplesPerInsert(2.0, 4, 3.0))
    assert await puts(buffer, 3)
    assert not await draws(buffer, 1)
    assert await puts(buffer, 1)  # diff 8
    assert not await draws(buffer, 4)  # 4
    assert await draws(buffer, 3)  # 5
    assert not await draws(buffer, 1)
    assert await puts(buffer, 3)  # 11
    assert not await puts(buffer, 1)  # 13
    assert await draws(buffer, 1)  # 10
    assert not await puts(buffer, 1)  # 12
    assert await draws(buffer, 1)  # 9
    assert await puts(buffer, 1)  # 11


async def test_puts_are_free_until_min_size(store: Store) -> None:
    buffer = await store.buffer("math", rate_limit=SamplesPerInsert(1.0, 10, 1.0))
    assert await puts(buffer, 10)  # far more than the buffer of 1
    assert await puts(buffer, 1)
    assert not await puts(buffer, 1)
    assert await draws(buffer, 2)
    assert not await draws(buffer, 1)


async def test_fractional_ratio(store: Store) -> None:
    # A group is drawn every second time: diff = inserts / 2 - samples in [0.5 -+ 1] = [-0.5, 1.5].
    buffer = await store.buffer("math", rate_limit=SamplesPerInsert(0.5, 1, 1.0))
    assert await puts(buffer, 3)  # diff 1.5
    assert not await puts(buffer, 1)
    assert await draws(buffer, 2)  # -0.5
    assert not await draws(buffer, 1)
    assert await puts(buffer, 4)  # 1.5


async def test_a_call_that_can_never_pass_is_refused(store: Store) -> None:
    buffer = await store.buffer("math", rate_limit=SamplesPerInsert(2.0, 2, 3.0))
    await buffer.put(groups(2))
    with pytest.raises(rdb.InvalidInputError):
        await buffer.sample(7)
    with pytest.raises(rdb.InvalidInputError):
        await buffer.lease(7, ttl=9, timeout=None)
    with pytest.raises(rdb.InvalidInputError):
        await buffer.put(groups(4, "code"))
    queue = await store.buffer("queue", rate_limit=Queue(2))
    with pytest.raises(rdb.InvalidInputError):
        await queue.put(groups(3))


async def test_queue(store: Store) -> None:
    buffer = await store.buffer("math", rate_limit=Queue(2))
    assert await puts(buffer, 2)
    assert not await puts(buffer, 1)
    first = await buffer.sample(1, rdb.Fifo())
    assert await puts(buffer, 1)
    rest = await buffer.sample(2, rdb.Fifo())
    assert not set(first.ids) & set(rest.ids)
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(1)
    assert await buffer.count(statuses="archived") == 3


async def test_leases_count_as_samples_and_open_groups_as_inserts(store: Store) -> None:
    buffer = await store.buffer("math", rate_limit=SamplesPerInsert(1.0, 2, 1.0))
    await buffer.put(groups(2))
    lease = await buffer.lease(1, ttl=60)  # diff 1
    assert not await draws(buffer, 1)
    await buffer.open_group("gsm8k", "slow", 1)  # 2
    await buffer.open_group("gsm8k", "slower", 1)  # 3
    with pytest.raises(rdb.RateLimitedError):
        await buffer.open_group("gsm8k", "slowest", 1, timeout=0)
    await lease.ack()


async def test_waiting_draws_and_puts(store: Store, other: Store) -> None:
    buffer = await store.buffer("math", rate_limit=SamplesPerInsert(1.0, 1, 1.0))
    theirs = await other.buffer("math")
    drawing = asyncio.ensure_future(buffer.sample(1, timeout=60))
    await asyncio.sleep(0.05)
    assert not drawing.done()
    await theirs.put(groups(1))
    await drawing
    await theirs.put(groups(2, "code"))
    putting = asyncio.ensure_future(theirs.put(group("late"), timeout=60))
    await asyncio.sleep(0.05)
    assert not putting.done()
    await buffer.sample(1)
    await putting


@postgresql_nightly
@pytest.mark.parametrize("limit", [MinSize(2), SamplesPerInsert(1.0, 2, 1.0), Queue(1)])
async def test_timeout_and_cancellation_of_waiting_calls(store: Store, limit: Any) -> None:
    buffer = await store.buffer("math", rate_limit=limit)
    await buffer.put(groups(1))

    async def call(timeout: float | None) -> object:
        if isinstance(limit, Queue):
            return await buffer.put(group("x"), timeout=timeout)
        return await buffer.sample(1, timeout=timeout)

    for timeout in (0, 0.05):
        with pytest.raises(rdb.RateLimitedError):
            await call(timeout)
    task = asyncio.ensure_future(call(None))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task], timeout=30)
    assert task.cancelled()
    assert await buffer.count() == 1


async def test_set_on_a_live_buffer_with_a_history(store: Store, other: Store) -> None:
    buffer = await store.buffer("math")
    theirs = await other.buffer("math")
    await theirs.put(groups(10))
    await theirs.sample(10)
    await buffer.update_settings(rate_limit=SamplesPerInsert(1.0, 1, 2.0))
    # Only what comes from now on counts.
    assert not await draws(theirs, 1)
    assert await puts(theirs, 3)
    assert not await puts(theirs, 1)
    await buffer.update_settings(rate_limit=MinSize(13), seed=3)
    assert await draws(theirs, 13)
    await buffer.update_settings(rate_limit=None)
    assert await puts(theirs, 30)
    assert await draws(theirs, 1)
    await buffer.update_settings(rate_limit=Queue(100))
    assert not await puts(theirs, 60)
    assert await puts(theirs, 5)
    await buffer.update_settings(rate_limit=SamplesPerInsert(1.0, 1, 2.0))
    assert await puts(theirs, 3)
    assert await draws(theirs, 4)
    assert not await draws(theirs, 1)


async def test_a_failed_put_does_not_count(store: Store) -> None:
    buffer = await store.buffer("math", rate_limit=SamplesPerInsert(1.0, 1, 2.0))
    await buffer.put(groups(1))
    for _ in range(5):
        with pytest.raises(rdb.DuplicateGroupError):
            await buffer.put([group("x"), group("gsm8k-0")])
        assert await buffer.put(groups(1), on_duplicate="ignore") == [1]
        assert await buffer.put(groups(1), on_duplicate="replace") == [1]
    assert await puts(buffer, 2)
    assert not await puts(buffer, 1)


@postgresql_nightly
async def test_admission(store: Store) -> None:
    buffer = await store.buffer("math")
    most = 2 * (1 + 1)
    assert await buffer.admission(2, max_staleness=1) == most
    await buffer.open_group("gsm8k", "slow", 1)
    await buffer.put(groups(2))
    assert await buffer.admission(2, max_staleness=1, timeout=0) == 1
    assert await buffer.admission(2, max_staleness=1, n=2, timeout=0) == 0
    assert await buffer.admission(2, max_staleness=1, n=2, timeout=0.02) == 0
    waiting = asyncio.ensure_future(buffer.admission(2, max_staleness=1, n=3, timeout=60))
    lease = await buffer.lease(1, ttl=60)
    await asyncio.sleep(0.05)
    assert not waiting.done()  # leased groups are still to be trained
    await lease.ack()
    await buffer.sample(1)
    assert await waiting == 3
    assert await buffer.admission(2, max_staleness=1, tasks="other", timeout=0) == most
    with pytest.raises(rdb.InvalidInputError):
        await buffer.admission(2, max_staleness=1, n=5)


async def test_admission_counts_groups_that_can_be_drawn(store: Store, other: Store) -> None:
    """After a take-over, groups of the first run and groups that are too stale do not count."""
    buffer, theirs = await store.buffer("math"), await other.buffer("math")
    await buffer.advance_policy(5)
    await buffer.put([*groups(3, version=5), *groups(3, "unversioned")])
    await buffer.open_group("gsm8k", "slow", 1)
    await theirs.put(groups(2, "theirs", version=0))
    assert await buffer.admission(4, max_staleness=1, timeout=0) == 8 - 7
    assert await buffer.admission(4, max_staleness=1, runs="other", timeout=0) == 8 - 2
    await buffer.advance_policy(7)
    assert await buffer.admission(4, max_staleness=1, timeout=0) == 8 - 4
    assert await buffer.admission(4, max_staleness=2, timeout=0) == 12 - 7
    await theirs.advance_policy(1, take_over=True)
    assert await theirs.admission(4, max_staleness=1, n=6, timeout=0) == 8 - 2
    assert await theirs.admission(4, max_staleness=1, runs=["test", "other"], timeout=0) == 0


@postgresql_nightly
async def test_a_long_wait_is_logged_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "LONG_WAIT_SECONDS", 0.0)
    monkeypatch.setattr("replaydb.database.runtime.signals.RECHECK_SECONDS", 0.01)
    buffer = await store.buffer("math", capacity=rdb.Capacity(groups=2))
    await buffer.put(groups(2))
    lease = await buffer.lease(1, ttl=60, owner="trainer-7")
    calls: dict[str, Coroutine[Any, Any, Any]] = {
        "wanted 2 groups, 1 eligible; there are 1 completed, 1 leased; leased by trainer-7 (1)":
            buffer.sample(2, timeout=None),
        "2 groups are ahead of training; at most 2 can be": buffer.admission(1, max_staleness=1),
        "no space in the buffer": buffer.put([group("a"), group("b")]),
    }  # fmt: skip
    for reason, call in calls.items():
        caplog.clear()
        waiter = asyncio.create_task(call)
        async with asyncio.timeout(60):
            while not caplog.records:  # noqa: ASYNC110 - logging has no event
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # it checks again meanwhile
        waiter.cancel()
        await asyncio.wait([waiter])
        (logged,) = [one for one in caplog.records if one.name.startswith("replaydb")]
        assert logged.levelname == "WARNING"
        assert "buffer 'math': a call has waited for 0 s: " in logged.getMessage()
        assert reason in logged.getMessage()
    await lease.nack()


async def test_replacing_a_group_is_not_blocked(store: Store) -> None:
    """The number of groups stays the same, so it does not count as an insert."""
    limit = SamplesPerInsert(1.0, 1, 1.0)
    for name, rate_limit in (("queue", Queue(2)), ("ratio", limit)):
        buffer = await store.buffer(name, rate_limit=rate_limit)
        await buffer.put(groups(2))
        assert not await puts(buffer, 1)
        await buffer.put(groups(2, priority=2.0), on_duplicate="replace", timeout=0)
        assert not await puts(buffer, 1)
        assert await draws(buffer, 1)
        assert await puts(buffer, 1)
        assert not await puts(buffer, 1)


async def test_a_queue_admits_episodes_of_pending_groups(store: Store) -> None:
    buffer = await store.buffer("math", rate_limit=Queue(2))
    await buffer.open_group("gsm8k", "arriving", 1)
    assert await puts(buffer, 1)
    assert not await puts(buffer, 1)
    assert await buffer.add_episode("arriving", episode()) == "completed"
    assert not await puts(buffer, 1)
    assert await draws(buffer, 2)
    assert await puts(buffer, 2)
