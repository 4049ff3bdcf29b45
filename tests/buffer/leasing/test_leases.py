"""Leases: taken, acked, nacked, extended, expired."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.database.repository import leases
from replaydb.database.tables import schema
from support.clock import Clock
from support.connections import transaction
from support.engines import postgresql_nightly
from support.groups import group, groups
from support.invariants import group_row, number_of, statuses


async def test_acked_when_the_block_ends_and_nacked_when_it_raises(
    buffer: Buffer, url: str
) -> None:
    ids = await buffer.put(groups(3))
    async with buffer.lease(2, ttl=60) as lease:
        assert lease.batch.ids == ids[:2]
        assert list((await statuses(url)).values()) == ["leased", "leased", "completed"]
    assert list((await statuses(url)).values()) == ["archived", "archived", "completed"]
    row = await group_row(url, ids[0])
    assert (row["status_reason"], row["times_sampled"]) == ("acked", 1)

    with pytest.raises(ZeroDivisionError):
        async with buffer.lease(1, ttl=60):
            raise ZeroDivisionError("it blew\0 up \ud800")
    row = await group_row(url, ids[2])
    assert (row["group_status"], row["attempts"], row["times_sampled"]) == ("completed", 1, 0)
    assert row["status_reason"] == "ZeroDivisionError: it blew up ?"
    assert await number_of(url, schema.lease) == 0


@postgresql_nightly
@pytest.mark.parametrize("policy", [rdb.Fifo(), rdb.Uniform(), rdb.Prioritized()])
async def test_a_lease_is_one_draw_with_any_strategy(
    buffer: Buffer, url: str, policy: rdb.SamplingPolicy
) -> None:
    [group_id] = await buffer.put(group())
    lease = await buffer.lease(1, policy, ttl=60)
    assert (await group_row(url, group_id))["times_sampled"] == 1
    await lease.nack()
    assert (await group_row(url, group_id))["times_sampled"] == 0


async def test_leased_groups_are_not_drawn_again(buffer: Buffer, other: Store) -> None:
    ids = await buffer.put(groups(4))
    theirs = await other.buffer("math")
    async with buffer.lease(3, ttl=60):
        assert (await theirs.sample(1)).ids == ids[3:]
        with pytest.raises(rdb.NotEnoughGroupsError) as caught:
            await theirs.sample(2)
        assert caught.value.available == 1
        second = await theirs.lease(1, ttl=60)
        assert second.batch.ids == ids[3:]
        with pytest.raises(rdb.NotEnoughGroupsError):
            await theirs.lease(1, ttl=60)
        await second.nack()


@pytest.mark.parametrize("live", [True, False])
async def test_an_ack_that_waited_for_a_lock_sees_the_current_lease(
    buffer: Buffer, url: str, live: bool
) -> None:
    await buffer.put([*groups(3), group("another", "code")])
    lease = await buffer.lease(4, ttl=60)
    async with transaction(url) as connection:
        end = datetime.now(UTC) + timedelta(seconds=90 if live else -1)
        await connection.execute(update(schema.lease).values(expires_at=end))
        ack = asyncio.create_task(lease.ack())
        await asyncio.sleep(0.1)
        assert not ack.done()
    if live:
        await ack
        assert set((await statuses(url)).values()) == {"archived"}
        assert await number_of(url, schema.lease) == 0
        return
    with pytest.raises(rdb.LeaseExpiredError):
        await ack
    assert set((await statuses(url)).values()) == {"leased"}


async def test_some_of_a_lease(buffer: Buffer, url: str) -> None:
    ids = await buffer.put(groups(5))
    lease = await buffer.lease(5, ttl=60)
    await lease.ack(ids[:2])
    await lease.nack([ids[2]], reason="odd")
    expected = ["archived", "archived", "completed", "leased", "leased"]
    assert list((await statuses(url)).values()) == expected
    assert [one.num_groups for one in await buffer.leases()] == [2]
    with pytest.raises(rdb.LeaseExpiredError) as caught:
        await lease.ack([ids[0], ids[3]])
    assert caught.value.group_ids == (ids[0],)
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.nack([ids[2]])
    assert list((await statuses(url)).values()) == expected
    await lease.ack()
    assert await buffer.leases() == []
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.ack()


async def test_groups_acked_or_nacked_inside_the_block_stay_so(buffer: Buffer, url: str) -> None:
    ids = await buffer.put(groups(3))

    async def train() -> None:
        async with buffer.lease(3, ttl=60) as lease:
            await lease.ack(ids[:1])
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        await train()
    assert list((await statuses(url)).values()) == ["archived", "completed", "completed"]
    async with buffer.lease(2, ttl=60) as lease:
        await lease.nack(ids[1:2])
    assert list((await statuses(url)).values()) == ["archived", "completed", "archived"]
    async with buffer.lease(1, ttl=60) as lease:
        await lease.ack()


async def test_groups_of_an_expired_lease_are_released(
    buffer: Buffer, clock: Clock, url: str
) -> None:
    ids = await buffer.put(groups(2))
    lease = await buffer.lease(2, ttl=30)
    clock.jump(29)
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(1)
    clock.jump(1)
    assert await buffer.leases() == []
    batch = await buffer.sample(2, rdb.Fifo())
    assert batch.ids == ids
    assert [one.attempts for one in await buffer.get(ids)] == [1, 1]
    assert [one.times_sampled for one in await buffer.get(ids)] == [1, 1]
    assert [one.status_reason for one in await buffer.get(ids)] == ["lease expired"] * 2
    assert await number_of(url, schema.lease) == 0
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.ack()


async def test_an_expired_lease_cannot_be_used_even_if_its_groups_are_free(
    buffer: Buffer, clock: Clock, url: str
) -> None:
    await buffer.put(groups(2))
    lease = await buffer.lease(2, ttl=30)
    clock.jump(30)
    for call in (lease.ack, lease.nack, lease.extend):
        with pytest.raises(rdb.LeaseExpiredError) as caught:
            await call()
        assert caught.value.lease_id == lease.id
    assert set((await statuses(url)).values()) == {"leased"}
    await buffer.put(group())  # the next call releases the groups
    assert set((await statuses(url)).values()) == {"completed"}


async def test_the_first_holder_does_not_affect_the_next_one(
    buffer: Buffer, clock: Clock, other: Store
) -> None:
    ids = await buffer.put(groups(2))
    first = await buffer.lease(2, ttl=30)
    clock.jump(31)
    second = await (await other.buffer("math")).lease(2, ttl=30)
    assert second.batch.ids == ids
    for call in (first.ack, first.nack, first.extend):
        with pytest.raises(rdb.LeaseExpiredError):
            await call()
    with pytest.raises(rdb.LeaseExpiredError):
        await first.ack(ids[:1])
    assert [one.num_groups for one in await buffer.leases()] == [2]
    await second.ack()


async def test_a_lease_over_two_tasks_ends_in_both(buffer: Buffer, clock: Clock, url: str) -> None:
    await buffer.put([*groups(1, "a"), *groups(1, "b")])
    lease = await buffer.lease({"a": 1, "b": 1}, ttl=30)
    clock.jump(31)
    await buffer.sample(1, tasks="a")  # runs maintenance of task a only
    assert await statuses(url) == {"a-0": "completed", "b-0": "leased"}
    for call in (lease.ack, lease.nack, lease.extend):
        with pytest.raises(rdb.LeaseExpiredError):
            await call()
    clock.jump(-20)  # a clock may be set back: an expired lease stays expired
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.extend()
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.ack()
    clock.jump(20)
    await buffer.sample(1, tasks="b")
    assert await statuses(url) == {"a-0": "completed", "b-0": "completed"}
    assert await number_of(url, schema.lease) == 0


async def test_extending(buffer: Buffer, clock: Clock) -> None:
    await buffer.put(groups(1))
    lease = await buffer.lease(1, ttl=30)
    clock.jump(20)
    await lease.extend()
    clock.jump(20)
    await lease.extend(100)
    clock.jump(99)
    assert len(await buffer.leases()) == 1
    await lease.ack()


@postgresql_nightly
async def test_the_heartbeat_keeps_a_lease_alive(
    buffer: Buffer, other: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaydb.buffer.heartbeat.HEARTBEATS_PER_TTL", 1200)
    await buffer.put(groups(1))
    async with buffer.lease(1, ttl=60):
        for _ in range(3):
            clock.jump(40)
            soon = clock.now() + timedelta(seconds=30)
            while (await buffer.leases())[0].expires_at < soon:  # noqa: ASYNC110 - in a database
                await asyncio.sleep(0.01)
        with pytest.raises(rdb.NotEnoughGroupsError):
            await (await other.buffer("math")).sample(1)
    assert await buffer.count(statuses="archived") == 1


class Extensions:
    """Attempts to extend leases, by ttl in seconds. Heartbeats come every few milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int = 0) -> None:
        self.tried: list[float] = []
        self._succeeded = asyncio.Semaphore(0)
        loop, extend = asyncio.get_running_loop(), leases.extend

        def recorded(*arguments: Any) -> None:
            self.tried.append(arguments[-1])
            if len(self.tried) <= failures:
                # A retry does not wait for the next heartbeat.
                monkeypatch.setattr("replaydb.buffer.heartbeat.HEARTBEATS_PER_TTL", 1)
                raise rdb.DatabaseError("no memory")
            extend(*arguments)
            loop.call_soon_threadsafe(self._succeeded.release)

        monkeypatch.setattr(leases, "extend", recorded)
        monkeypatch.setattr("replaydb.buffer.heartbeat.HEARTBEATS_PER_TTL", 10_000)
        monkeypatch.setattr("replaydb.buffer.heartbeat.RETRIES_PER_TTL", 10_000)

    async def succeeded(self, count: int) -> None:
        """Wait for `count` of them."""
        async with asyncio.timeout(30):
            for _ in range(count):
                await self._succeeded.acquire()


async def test_a_heartbeat_that_fails_is_tried_again_soon(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    extensions = Extensions(monkeypatch, failures=2)
    await buffer.put(groups(1))
    async with buffer.lease(1, ttl=60):
        await extensions.succeeded(1)
    assert extensions.tried == [60, 60, 60]


async def test_the_heartbeat_uses_the_ttl_of_the_last_extension(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if that is shorter than the time until the next heartbeat was due."""
    extensions = Extensions(monkeypatch)
    await buffer.put(groups(1))
    async with buffer.lease(1, ttl=600_000) as lease:
        await lease.extend(60)
        await extensions.succeeded(2)
    assert extensions.tried[:2] == [60, 60]


async def test_an_extension_is_not_undone_by_a_heartbeat_under_way(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    extensions = Extensions(monkeypatch)
    await buffer.put(groups(1))
    lease = await buffer.lease(1, ttl=60)
    await asyncio.gather(lease.extend(600), lease.extend())
    assert extensions.tried == [600, 600]


@postgresql_nightly
async def test_the_heartbeat_stops_when_the_lease_is_lost(buffer: Buffer, clock: Clock) -> None:
    await buffer.put(groups(1))

    async def train(error: Exception | None) -> None:
        async with buffer.lease(1, ttl=0.3):
            clock.jump(60)
            await asyncio.sleep(0.2)
            if error is not None:
                raise error

    with pytest.raises(rdb.LeaseExpiredError):
        await train(None)
    with pytest.raises(KeyError):  # an error of the block is not hidden by that of the lease
        await train(KeyError())


async def test_leases_are_listed(store: Store, buffer: Buffer, clock: Clock) -> None:
    await buffer.put(groups(3))
    begin = clock.now()
    first = await buffer.lease(1, ttl=30, owner="trainer-0")
    second = await buffer.lease(2, ttl=60)
    one, two = await buffer.leases()
    assert (one.id, one.owner, one.num_groups) == (first.id, "trainer-0", 1)
    assert (two.id, two.num_groups) == (second.id, 2)
    assert begin <= one.acquired_at <= clock.now()
    assert 29.9 < (one.expires_at - one.acquired_at).total_seconds() < 30.1
    assert await (await store.buffer("other")).leases() == []
    clock.jump(31)
    assert [info.id for info in await buffer.leases()] == [second.id]
    assert await buffer.leases(expired=True) == [one, two]
    await buffer.put([group("new")])  # this releases the group
    assert await buffer.leases(expired=True) == [two]


async def test_statuses_that_cannot_be_leased(buffer: Buffer) -> None:
    for wrong in ([], ["leased"], ["archived"], ["pending", "aborted"]):
        with pytest.raises(rdb.InvalidInputError, match="statuses"):
            await buffer.lease(1, ttl=10, statuses=wrong)


async def test_a_store_that_is_closed_under_a_lease(url: str) -> None:
    store = await Store.open(url)
    buffer = await store.buffer("math")
    await buffer.put(groups(1))

    async def train() -> None:
        async with buffer.lease(1, ttl=0.3):
            await store.close()
            await asyncio.sleep(0.2)
            raise KeyError

    with pytest.raises(KeyError):
        await train()
