"""Pending groups claimed by the workers that generate their episodes."""

from __future__ import annotations

import asyncio
import signal

import pytest

import replaydb as rdb
from replaydb import Buffer, Capacity, GroupStatus, Queue, Store
from replaydb.database.tables import schema
from support import child_processes
from support.clock import Clock
from support.damage import damage
from support.engines import sqlite_nightly
from support.groups import episode, group
from support.invariants import check_invariants, group_row, number_of, statuses
from support.workers import Worker, workers


async def opened(buffer: Buffer, count: int, expected: int = 2, **how: float) -> list[int]:
    """Open groups `w0`, `w1` and so on, without episodes."""
    return [await buffer.open_group("gsm8k", f"w{i}", expected, **how) for i in range(count)]  # type: ignore[arg-type]


async def test_claimed_worked_on_and_drawn(buffer: Buffer, url: str) -> None:
    ids = await opened(buffer, 3)
    async with buffer.lease(2, statuses="pending", ttl=60, owner="worker-0") as lease:
        assert lease.batch.ids == ids[:2]
        assert [one.status for one in lease.batch.groups] == [GroupStatus.PENDING] * 2
        assert lease.batch.draw_id is None
        (info,) = await buffer.leases()
        assert (info.owner, info.group_ids, info.draw_id) == ("worker-0", tuple(ids[:2]), None)
        for uid in ("w0", "w1"):
            assert await buffer.add_episode(uid, episode(1.0)) == "pending"
            assert await buffer.add_episode(uid, episode(0.0)) == "completed"
            await check_invariants(url, idle_leases=True)
        assert (await buffer.leases())[0].group_ids == ()
    assert await statuses(url) == {"w0": "completed", "w1": "completed", "w2": "pending"}
    assert await number_of(url, schema.lease) == 0
    # None of this was a draw.
    assert await buffer.draws() == []
    row = await group_row(url, ids[0])
    assert (row["times_sampled"], row["first_sampled_at"], row["attempts"]) == (0, None, 0)
    assert (await buffer.stats()).tasks[0].num_sampled == 0
    assert (await buffer.sample(2, rdb.Fifo())).ids == ids[:2]


async def test_one_worker_at_a_time(buffer: Buffer, other: Store) -> None:
    ids = await opened(buffer, 5)
    buffers = [buffer, await other.buffer("math")]
    calls = [buffers[i % 2].lease(1, statuses="pending", ttl=60) for i in range(5)]
    taken = await asyncio.gather(*calls)
    assert sorted(one for lease in taken for one in lease.batch.ids) == ids
    for policy in (rdb.Fifo(), rdb.Uniform(), rdb.Prioritized()):
        with pytest.raises(rdb.NotEnoughGroupsError) as caught:
            await buffer.lease(1, policy, statuses="pending", ttl=60, owner="late")
        assert sum(caught.value.leased_by.values()) == 5
    waiting = asyncio.ensure_future(buffer.lease(1, statuses="pending", ttl=60, timeout=None))
    await asyncio.sleep(0)
    await taken[3].nack()
    assert (await asyncio.wait_for(waiting, 30)).batch.ids == taken[3].batch.ids


async def test_claimed_groups_count_as_pending(store: Store, url: str) -> None:
    """For the queue limit, for capacity, for admission, and in all counts."""
    buffer = await store.buffer("math", rate_limit=Queue(2), capacity=Capacity(groups=2))
    await opened(buffer, 2)
    lease = await buffer.lease(2, statuses="pending", ttl=60)
    (task,) = (await buffer.stats()).tasks
    assert (task.num_pending, task.num_leased, task.num_available) == (2, 0, 0)
    assert await buffer.count(statuses="pending") == 2
    assert await buffer.count(where=rdb.col.lease_id == lease.id) == 2
    with pytest.raises(rdb.RateLimitedError):
        await buffer.put(group("more"), timeout=0)
    assert await buffer.admission(1, max_staleness=1, timeout=0) == 0
    for uid in ("w0", "w1"):
        for _ in range(2):
            await buffer.add_episode(uid, episode())
    await lease.ack()
    assert len(await buffer.sample(2)) == 2


@pytest.mark.parametrize(
    "limit", [rdb.MinSize(2), rdb.SamplesPerInsert(ratio=1.0, min_size=2, error_buffer=2.0)]
)
async def test_a_limit_on_draws_does_not_block_claims(
    store: Store, limit: rdb.MinSize | rdb.SamplesPerInsert
) -> None:
    buffer = await store.buffer("math", rate_limit=limit)
    await opened(buffer, 2, 1)
    async with buffer.lease(2, statuses="pending", ttl=60) as lease:
        for one in lease.batch.groups:
            await buffer.add_episode(one.group_uid, episode())
    assert len(await buffer.sample(2)) == 2


async def test_acks_and_nacks_of_incomplete_groups(buffer: Buffer, url: str) -> None:
    ids = await opened(buffer, 4, deadline=600)
    await buffer.update_settings(max_attempts=2)
    lease = await buffer.lease(4, statuses="pending", ttl=60)
    await buffer.add_episode("w0", episode(5.0))
    await lease.nack(ids[:2], reason="out of memory")
    await lease.ack(ids[3:])
    await lease.reject(reason="no such prompt")
    assert await buffer.leases() == []
    rows = [await group_row(url, one) for one in ids]
    assert [row["group_status"] for row in rows] == ["pending", "pending", "filtered", "pending"]
    assert [row["attempts"] for row in rows] == [1, 1, 0, 0]
    assert rows[0]["status_reason"] == "out of memory"
    assert rows[2]["status_reason"] == "no such prompt"
    # Another worker continues where the first stopped.
    async with buffer.lease(1, statuses="pending", ttl=60) as lease:
        assert lease.batch.groups[0].rewards.tolist() == [5.0]
        await buffer.add_episode("w0", episode(6.0))
    row = await group_row(url, ids[0])
    assert (row["group_status"], row["attempts"], row["status_reason"]) == ("completed", 0, None)
    lease = await buffer.lease(1, statuses="pending", ttl=60)
    assert lease.batch.ids == ids[1:2]
    await lease.nack()
    row = await group_row(url, ids[1])
    assert (row["group_status"], row["attempts"]) == ("failed", 2)
    with pytest.raises(rdb.GroupClosedError):
        await buffer.add_episode("w1", episode())


async def test_a_claim_that_expires_or_is_revoked(
    buffer: Buffer, other: Store, clock: Clock, url: str
) -> None:
    ids = await opened(buffer, 2)
    slow = await buffer.lease(1, statuses="pending", ttl=30)
    await buffer.add_episode("w0", episode(1.0), position=0)
    clock.jump(31)
    second = await (await other.buffer("math")).lease(2, statuses="pending", ttl=30)
    assert second.batch.ids == ids
    assert second.batch.groups[0].attempts == 1
    with pytest.raises(rdb.LeaseExpiredError):
        await slow.nack()
    # Episodes of the slow worker are accepted; the position decides which one is stored.
    assert await buffer.add_episode("w0", episode(2.0), position=1) == "completed"
    with pytest.raises(rdb.DuplicateEpisodeError):
        await buffer.add_episode("w0", episode(3.0), position=1)
    with pytest.raises(rdb.LeaseExpiredError) as caught:
        await second.ack(ids[:1])  # its claim ended when the group was completed
    assert caught.value.group_ids == (ids[0],)
    assert await buffer.revoke(second.id) == ids[1:]
    assert await statuses(url) == {"w0": "completed", "w1": "pending"}
    assert (await group_row(url, ids[1]))["attempts"] == 1


@pytest.mark.parametrize(("least", "expected"), [(1, "completed"), (2, "failed")])
async def test_a_deadline_passes_during_a_claim(
    buffer: Buffer, clock: Clock, url: str, least: int, expected: str
) -> None:
    ids = await opened(buffer, 2, 2, deadline=20, min_episodes=least)
    lease = await buffer.lease(2, statuses="pending", ttl=600)
    await buffer.add_episode("w0", episode())
    clock.jump(21)
    with pytest.raises(rdb.GroupClosedError):
        await buffer.add_episode("w0", episode())
    assert await statuses(url) == {"w0": expected, "w1": "failed"}
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.nack(ids[:1])
    await lease.ack()  # no group is left
    assert await number_of(url, schema.lease) == 0


async def test_claims_of_replaced_deleted_or_damaged_groups(buffer: Buffer, url: str) -> None:
    ids = await opened(buffer, 3)
    lease = await buffer.lease(2, statuses="pending", ttl=60)
    await buffer.put(group("w0"), on_duplicate="replace")
    await buffer.delete(ids[1:2])
    await lease.ack()
    assert await statuses(url) == {"w0": "completed", "w2": "pending"}
    await buffer.add_episode("w2", episode())
    await damage(url, ids[2])
    with pytest.raises(rdb.CorruptPayloadError):
        await buffer.lease(1, statuses="pending", ttl=60)
    assert (await statuses(url))["w2"] == "failed"
    assert await number_of(url, schema.lease) == 0


@sqlite_nightly
async def test_a_worker_is_killed(buffer: Buffer, url: str) -> None:
    """Its episodes stay. Another worker continues when the lease is revoked or has expired."""
    ids = await opened(buffer, 2)
    how = {"statuses": "pending", "owner": "worker"}
    with workers(Worker(child_processes.die_with_lease, url, 2, how)) as (worker,):
        assert await worker.ended() == -signal.SIGKILL
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.lease(1, statuses="pending", ttl=60)
    (info,) = await buffer.leases()
    lease = await buffer.open_lease(info.id, ttl=60)
    assert lease.batch.ids == ids
    await buffer.add_episode("w0", episode(1.0), position=1)
    assert await buffer.revoke(info.id) == ids[1:]
    async with buffer.lease(1, statuses="pending", ttl=60) as lease:
        assert lease.batch.groups[0].num_episodes == 1
        await buffer.add_episode("w1", episode(1.0), position=1)
    assert set((await statuses(url)).values()) == {"completed"}
    assert [one.attempts for one in await buffer.get(ids)] == [0, 0]
