"""Leases by id: resumed by another process, acked or revoked."""

from __future__ import annotations

import asyncio
import math
import signal

import pytest

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.database.tables import schema
from support import child_processes
from support.clock import Clock
from support.damage import damage
from support.engines import postgresql_nightly
from support.groups import group, groups, long_group
from support.invariants import number_of, statuses
from support.workers import Worker, workers


@pytest.fixture
async def elsewhere(other: Store, buffer: Buffer) -> Buffer:
    """The same buffer in another process."""
    return await other.buffer("math", create=False)


async def test_leases_list_their_groups(store: Store, buffer: Buffer) -> None:
    await buffer.put(groups(4))
    first = await buffer.lease(3, rdb.Lifo(), ttl=60, owner="trainer-0", step=7)
    await buffer.update_settings(record_draws=False)
    second = await buffer.lease(1, ttl=60, step=8)
    one, two = await buffer.leases()
    assert (one.id, one.owner, one.num_groups) == (first.id, "trainer-0", 3)
    assert (one.group_ids, one.draw_id, one.step) == ((4, 3, 2), first.batch.draw_id, 7)
    assert (two.group_ids, two.draw_id, two.step) == ((1,), None, None)
    await first.ack([3])
    assert (await buffer.leases())[0].group_ids == (4, 2)
    await first.ack()
    assert [info.id for info in await buffer.leases()] == [second.id]
    assert await (await store.buffer("code")).leases() == []


async def test_another_process_resumes_a_lease(
    buffer: Buffer, elsewhere: Buffer, clock: Clock, url: str
) -> None:
    ids = await buffer.put(groups(4))
    first = await buffer.lease(4, rdb.Prioritized(), ttl=30, step=7)
    done, *kept = first.batch.ids
    await first.ack([done])
    clock.jump(20)
    lease = await elsewhere.open_lease(first.id, ttl=60)
    assert (lease.id, lease.ttl, lease.batch.ids) == (first.id, 60, kept)
    assert lease.batch.draw_id == first.batch.draw_id
    assert lease.batch.probabilities.tolist() == first.batch.probabilities[1:].tolist()
    assert lease.batch.weights.tolist() == first.batch.weights[1:].tolist()
    assert list(lease.batch.groups) == list(first.batch.groups[1:])
    clock.jump(50)  # after the first ttl, within the new one
    async with elsewhere.open_lease(first.id, ttl=60) as again:
        await again.nack(kept[:1])
        await again.reject(kept[1:2], reason="odd")
        await again.extend()
    assert sorted((await statuses(url)).values()) == [
        "archived",
        "archived",
        "completed",
        "filtered",
    ]
    assert await buffer.leases() == []
    with pytest.raises(rdb.LeaseExpiredError):
        await elsewhere.open_lease(first.id, ttl=60)
    assert len(ids) == await buffer.count()


async def test_the_first_ack_or_nack_of_two_holders_wins(
    buffer: Buffer, elsewhere: Buffer, url: str
) -> None:
    ids = await buffer.put(groups(3))
    first = await buffer.lease(3, ttl=60)
    second = await elsewhere.open_lease(first.id, ttl=60)
    await second.ack(ids[:1])
    with pytest.raises(rdb.LeaseExpiredError) as caught:
        await first.nack(ids[:1])
    assert caught.value.group_ids == (ids[0],)
    await first.nack(ids[1:2])
    await second.ack()  # the remaining groups
    assert list((await statuses(url)).values()) == ["archived", "completed", "archived"]
    for call in (first.ack, first.nack, first.extend, second.ack, second.extend):
        with pytest.raises(rdb.LeaseExpiredError):
            await call()


async def test_acked_by_its_id(buffer: Buffer, elsewhere: Buffer, url: str) -> None:
    ids = await buffer.put(groups(3))
    first = await buffer.lease(3, ttl=600)
    await first.nack(ids[:1])
    await elsewhere.ack(first.id)
    assert list((await statuses(url)).values()) == ["completed", "archived", "archived"]
    assert await number_of(url, schema.lease) == 0
    (record,) = await buffer.draws()
    assert record.outcomes == ("nacked", "acked", "acked")
    for call in (first.ack, first.nack, first.extend):
        with pytest.raises(rdb.LeaseExpiredError):
            await call()
    with pytest.raises(rdb.LeaseExpiredError):
        await elsewhere.ack(first.id)


async def test_an_expired_lease_is_not_acked(buffer: Buffer, clock: Clock, url: str) -> None:
    await buffer.put(groups(1))
    lease = await buffer.lease(1, ttl=10)
    clock.jump(11)
    with pytest.raises(rdb.LeaseExpiredError):
        await buffer.ack(lease.id)
    await buffer.ack((await buffer.lease(1, ttl=10)).id)
    assert list((await statuses(url)).values()) == ["archived"]


async def test_revoked_at_once(buffer: Buffer, elsewhere: Buffer, url: str) -> None:
    ids = await buffer.put(groups(3))
    first = await buffer.lease(3, ttl=600)
    await first.ack(ids[:1])
    assert await elsewhere.revoke(first.id, reason="restarted") == ids[1:]
    assert await buffer.leases() == []
    assert await number_of(url, schema.lease) == 0
    for call in (first.ack, first.nack, first.extend):
        with pytest.raises(rdb.LeaseExpiredError):
            await call()
    for one in await buffer.get(ids[1:]):
        facts = (one.status, one.leased_from, one.attempts, one.times_sampled, one.status_reason)
        assert facts == ("completed", None, 1, 0, "revoked: restarted")
    (record,) = await buffer.draws()
    assert record.outcomes == ("acked", "nacked", "nacked")
    assert record.outcome_reasons == (None, "revoked: restarted", "revoked: restarted")
    async with elsewhere.lease(2, ttl=60) as lease:
        assert lease.batch.ids == ids[1:]
        assert await buffer.revoke(first.id) == []  # no groups of the next holder
    assert set((await statuses(url)).values()) == {"archived"}


async def test_revoking_an_expired_lease_counts_as_an_attempt(
    store: Store, clock: Clock, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = await store.buffer("math", max_attempts=1)
    ids = await buffer.put(groups(2))
    lease = await buffer.lease(1, ttl=10)
    assert await buffer.revoke(lease.id) == ids[:1]
    assert f"groups {ids[0]} failed at their last attempt: revoked" in caplog.text
    lease = await buffer.lease(1, ttl=10)
    clock.jump(11)
    assert await buffer.revoke(lease.id) == ids[1:]
    assert set((await statuses(url)).values()) == {"failed"}
    assert (await buffer.get(ids))[1].status_reason == "revoked (attempt 1 of 1)"


async def test_an_ack_and_a_revocation_at_once(buffer: Buffer, elsewhere: Buffer, url: str) -> None:
    for _ in range(5):
        ids = await buffer.put([group(), group()])
        lease = await buffer.lease(2, rdb.Lifo(), ttl=600)
        acked, revoked = await asyncio.gather(
            lease.ack(), elsewhere.revoke(lease.id), return_exceptions=True
        )
        ends = {one.status for one in await buffer.get(ids)}
        if isinstance(acked, rdb.AckReport):
            assert acked == rdb.AckReport(settled=tuple(ids))
            assert (revoked, ends) == ([], {"archived"})
        else:
            assert isinstance(acked, rdb.LeaseExpiredError)
            assert (revoked, ends) == (ids, {"completed"})
        await buffer.delete(ids)


@postgresql_nightly
async def test_a_block_whose_lease_is_revoked(buffer: Buffer, elsewhere: Buffer) -> None:
    await buffer.put(groups(1))

    async def train(error: Exception | None) -> None:
        async with buffer.lease(1, ttl=60) as lease:
            await elsewhere.revoke(lease.id)
            if error is not None:
                raise error

    with pytest.raises(rdb.LeaseExpiredError):
        await train(None)
    with pytest.raises(KeyError):
        await train(KeyError())


async def test_leases_of_other_buffers_are_unknown(store: Store, buffer: Buffer, url: str) -> None:
    await buffer.put(groups(1))
    lease = await buffer.lease(1, ttl=60)
    wrong = await store.buffer("code")
    assert await wrong.revoke(lease.id) == []
    for lease_id in (lease.id, lease.id + 1):
        with pytest.raises(rdb.LeaseExpiredError) as caught:
            await wrong.open_lease(lease_id, ttl=60)
        assert caught.value.lease_id == lease_id
    await lease.ack()


async def test_opened_without_a_record_of_the_draw_or_with_nothing_left(store: Store) -> None:
    buffer = await store.buffer("math", record_draws=False)
    ids = await buffer.put([long_group("a", 50), group("b")])
    first = await buffer.lease(2, rdb.Lifo(), ttl=60)
    batch = (await buffer.open_lease(first.id, ttl=60)).batch
    assert (batch.ids, batch.draw_id) == (ids, None)
    assert all(math.isnan(one) for one in [*batch.probabilities, *batch.weights])
    assert batch.groups[0].episodes[0].text == "x" * 50
    await buffer.put([group("a"), group("b")], on_duplicate="replace")
    lease = await buffer.open_lease(first.id, ttl=60)
    assert len(lease.batch) == 0
    assert await buffer.revoke(first.id) == []
    assert await buffer.leases() == []
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.ack()


async def test_damage_found_when_it_is_opened(buffer: Buffer, url: str) -> None:
    ids = await buffer.put(groups(3))
    first = await buffer.lease(3, ttl=60)
    await damage(url, ids[1])
    with pytest.raises(rdb.CorruptPayloadError) as caught:
        await buffer.open_lease(first.id, ttl=60)
    assert caught.value.group_ids == (ids[1],)
    assert list((await statuses(url)).values()) == ["completed", "failed", "completed"]
    assert await number_of(url, schema.lease) == 0
    (record,) = await buffer.draws()
    assert record.outcomes == ("nacked", "lost", "nacked")


@postgresql_nightly
async def test_a_restarted_trainer_revokes_its_old_lease(buffer: Buffer, url: str) -> None:
    """Its process was killed, and the lease would last ten more minutes."""
    ids = await buffer.put(groups(4))
    for how in ({"step": 7}, {"step": 8}):
        with workers(
            Worker(child_processes.die_with_lease, url, 2, {"owner": "trainer", **how})
        ) as (worker,):
            assert await worker.ended() == -signal.SIGKILL
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.lease(1, ttl=60)
    unfinished, stray = (one for one in await buffer.leases() if one.owner == "trainer")
    assert (unfinished.step, stray.step) == (7, 8)
    async with buffer.open_lease(unfinished.id, ttl=60) as lease:
        assert lease.batch.ids == ids[:2]
    assert await buffer.revoke(stray.id) == ids[2:]
    assert list((await statuses(url)).values()) == ["archived"] * 2 + ["completed"] * 2
    assert [one.attempts for one in await buffer.get(ids)] == [0, 0, 1, 1]
