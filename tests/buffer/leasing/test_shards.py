"""Leases shared by the ranks of a trainer: each reads its own groups, and one acks all."""

from __future__ import annotations

import asyncio

import pytest

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.database.tables import schema
from support.clock import Clock
from support.damage import damage
from support.groups import group, groups, long_group
from support.invariants import number_of, statuses


@pytest.fixture
async def elsewhere(other: Store, buffer: Buffer) -> Buffer:
    """The same buffer in another process."""
    return await other.buffer("math", create=False)


async def unequal(buffer: Buffer) -> list[int]:
    """Put eight groups of 1 to 8 thousand tokens."""
    return await buffer.put([long_group(f"g{n}", 1000 * n, priority=n) for n in range(1, 9)])


@pytest.mark.parametrize("load", [True, False])
async def test_ranks_share_a_lease(buffer: Buffer, elsewhere: Buffer, url: str, load: bool) -> None:
    await unequal(buffer)
    lease = await buffer.lease(8, rdb.Prioritized(beta=1.0), ttl=60, step=3, load=load)
    assert lease.num_tokens == [1000 * lease.ids[at] for at in range(8)]
    first = await lease.shard(0, 2)
    opened = await elsewhere.open_lease(lease.id, ttl=60, load=load)
    assert (opened.ids, opened.num_tokens) == (lease.ids, lease.num_tokens)
    second = await opened.shard(1, 2)
    assert [first.ids, second.ids] == lease.shards(2)
    assert sorted(first.ids + second.ids) == sorted(lease.ids)
    assert [sum(one.num_tokens for one in batch) for batch in (first, second)] == [18000] * 2
    assert first.draw_id == second.draw_id is not None
    (draw,) = await buffer.draws()
    pairs = zip(draw.probabilities, draw.weights, strict=True)
    recorded = dict(zip(draw.group_ids, pairs, strict=True))
    for batch in (first, second):
        found = zip(batch.probabilities.tolist(), batch.weights.tolist(), strict=True)
        assert list(found) == [recorded[one] for one in batch.ids]
    await lease.ack()
    assert set((await statuses(url)).values()) == {"archived"}
    with pytest.raises(rdb.LeaseExpiredError):
        await elsewhere.read_lease(lease.id)


async def test_only_the_groups_of_a_rank_are_read(buffer: Buffer, url: str) -> None:
    ids = await unequal(buffer)
    lease = await buffer.lease(8, ttl=60, load=False)
    mine, others = lease.shards(2)
    for one in others:
        await damage(url, one)
    assert (await lease.shard(0, 2)).ids == mine
    with pytest.raises(rdb.CorruptPayloadError) as caught:
        await lease.shard(1, 2)
    assert sorted(caught.value.group_ids) == sorted(others)
    assert await buffer.count(statuses="failed") == 4
    await lease.ack()  # the groups that are still leased
    assert sorted(await statuses(url)) == sorted(f"g{one}" for one in ids)
    assert await buffer.count(statuses="archived") == 4
    assert await number_of(url, schema.lease) == 0


async def test_a_lease_without_payloads_reads_none(buffer: Buffer, url: str) -> None:
    (damaged,) = await buffer.put(group())
    await damage(url, damaged)
    lease = await buffer.lease(1, ttl=60, load=False)
    assert (lease.ids, lease.num_tokens) == ([damaged], [10])
    assert (await buffer.open_lease(lease.id, ttl=60, load=False)).ids == [damaged]


async def test_a_read_only_store_reads_a_lease(buffer: Buffer, url: str) -> None:
    """It reports damage without marking the groups."""
    ids = await buffer.put(groups(2))
    lease = await buffer.lease(2, ttl=60)
    await damage(url, ids[0])
    async with Store.open(url, read_only=True) as store:
        there = await store.buffer("math", create=False)
        with pytest.raises(rdb.CorruptPayloadError) as caught:
            await there.read_lease(lease.id)
    assert caught.value.group_ids == (ids[0],)
    assert caught.value.batch is not None
    assert caught.value.batch.ids == [ids[1]]
    assert await buffer.count(statuses="leased") == 2


async def test_a_lease_without_groups_that_were_read(buffer: Buffer) -> None:
    await buffer.put(groups(3))
    lease = await buffer.lease(3, ttl=60, load=False)
    with pytest.raises(rdb.InvalidInputError, match=r"load: expected True to use lease\.batch"):
        _ = lease.batch
    assert repr(lease) == f"Lease(id={lease.id}, 3 of 3 groups leased)"
    held = await buffer.open_lease(lease.id, ttl=60, load=False)
    await lease.nack(lease.ids[:1])
    assert repr(lease) == f"Lease(id={lease.id}, 2 of 3 groups leased)"
    with pytest.raises(rdb.LeaseExpiredError) as caught:
        await held.shard(0, 1)  # it does not know of the nack
    assert caught.value.group_ids == (lease.ids[0],)
    opened = await buffer.open_lease(lease.id, ttl=60, load=False)
    assert (await opened.shard(0, 1)).ids == lease.ids[1:]
    await opened.ack()
    await buffer.delete(lease.ids)
    empty = await buffer.lease(4, ttl=60, at_least=0, load=False)
    assert (empty.id, empty.ids, len(await empty.shard(1, 2))) == (0, [], 0)


@pytest.mark.parametrize("load", [True, False])
async def test_groups_that_were_dropped_have_no_rank(buffer: Buffer, load: bool) -> None:
    await buffer.put(groups(7))
    lease = await buffer.lease(7, ttl=60, load=load)
    await lease.nack(lease.ids[-1:])
    assert sorted(one for part in lease.shards(2) for one in part) == lease.ids[:-1]
    first = await lease.shard(0, 2)
    assert len(first) == 3
    left = sorted(set(lease.ids[:-1]) - set(first.ids))
    await lease.nack(left[:1])  # after the groups were divided
    with pytest.raises(rdb.LeaseExpiredError) as caught:
        await lease.shard(1, 2)
    assert caught.value.group_ids == (left[0],)


async def test_wrong_shards(buffer: Buffer) -> None:
    await buffer.put(groups(6))
    lease = await buffer.lease(6, ttl=60, load=False)
    for rank, size, message in (
        (2, 2, "rank: expected less than world_size, 2, got 2"),
        (-1, 2, "rank: expected an integer >= 0"),
        (0, 4, r"world_size: expected a divisor of 6 \(or even=False\), got 4"),
        (0, 0, "world_size: expected an integer >= 1"),
    ):
        with pytest.raises(rdb.InvalidInputError, match=message):
            await lease.shard(rank, size)
    await lease.shard(0, 3)
    with pytest.raises(rdb.InvalidInputError, match="rank: expected one whose shard was not"):
        await lease.shard(0, 3)
    with pytest.raises(rdb.InvalidInputError, match="world_size: expected 3, as for the other"):
        await lease.shard(1, 2)
    sizes = [len(part) for part in lease.shards(4, even=False)]
    assert sorted(sizes) == [1, 1, 2, 2]


async def test_shards_that_are_requested_at_once(buffer: Buffer) -> None:
    await buffer.put(groups(8))
    lease = await buffer.lease(8, ttl=60, load=False)
    wanted = [(0, 2), (0, 2), (1, 4), (1, 2), (0, 1)]
    found = await asyncio.gather(*(lease.shard(*one) for one in wanted), return_exceptions=True)
    errors = [one for one in found if isinstance(one, rdb.InvalidInputError)]
    assert [error.field for error in errors] == ["rank", "world_size", "world_size"]
    batches = [one for one in found if isinstance(one, rdb.Batch)]
    assert sorted(batches[0].ids + batches[1].ids) == list(lease.ids)


async def test_a_shard_that_cannot_be_read_is_requested_again(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> rdb.Batch:
        raise rdb.DatabaseUnavailableError("no answer in time")

    await buffer.put(groups(6))
    lease = await buffer.lease(6, ttl=60, load=False)
    with monkeypatch.context() as patched:
        patched.setattr(buffer, "read_lease", fail)
        with pytest.raises(rdb.DatabaseUnavailableError):
            await lease.shard(0, 2)
    assert len(await lease.shard(0, 3)) == 2  # nothing was returned, so the division is free


async def test_another_world_size_after_a_restart(
    buffer: Buffer, elsewhere: Buffer, url: str
) -> None:
    """The same lease, of the same step, is divided among other ranks."""
    await unequal(buffer)
    taken = await buffer.lease(8, ttl=600, step=7, load=False)
    await taken.shard(0, 4)  # this world is killed
    (found,) = [one for one in await elsewhere.leases() if one.step == 7]
    opened = await elsewhere.open_lease(found.id, ttl=600, load=False)
    parts = [(await opened.shard(rank, 2)).ids for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(taken.ids)
    await opened.ack()
    with pytest.raises(rdb.LeaseExpiredError):
        await taken.ack()


async def test_groups_of_a_lease_are_read_by_any_process(
    buffer: Buffer, elsewhere: Buffer, clock: Clock
) -> None:
    ids = await unequal(buffer)
    lease = await buffer.lease(4, ttl=60)
    batch = await elsewhere.read_lease(lease.id, [ids[2], ids[0]])
    assert batch.ids == [ids[0], ids[2]]  # the order of the draw
    assert list(batch) == [lease.batch[0], lease.batch[2]]
    assert (await elsewhere.read_lease(lease.id)).ids == ids[:4]
    assert len(await elsewhere.read_lease(lease.id, [])) == 0
    with pytest.raises(rdb.LeaseExpiredError) as caught:
        await elsewhere.read_lease(lease.id, [ids[0], ids[5]])
    assert caught.value.group_ids == (ids[5],)
    clock.jump(61)  # reading does not extend it
    with pytest.raises(rdb.LeaseExpiredError):
        await elsewhere.read_lease(lease.id)


async def test_an_ack_advances_the_policy(store: Store, url: str) -> None:
    buffer = await store.buffer("math", max_staleness=1)
    await buffer.put(groups(4, version=0))
    lease = await buffer.lease(2, ttl=60)
    await lease.ack(cursor={"step": 1}, advance_policy=1)
    assert (buffer.policy_version, await buffer.cursor("step")) == (1, 1)
    assert await buffer.count(statuses="completed") == 2
    await buffer.ack(
        (await buffer.lease(1, ttl=60, load=False)).id, cursor={"step": 2}, advance_policy=2
    )
    assert (await buffer.refresh(), await buffer.cursor("step")) == (2, 2)
    assert await buffer.count(statuses="expired") == 1
    found = await buffer.find(statuses="archived")
    assert [one.staleness for one in found] == [0, 0, 1]  # when their step was trained


async def test_an_ack_that_cannot_advance_the_policy_changes_nothing(buffer: Buffer) -> None:
    await buffer.put(groups(2))
    await buffer.advance_policy(5)
    lease = await buffer.lease(2, ttl=60)
    for version in (4, -1, 2**31, True):
        with pytest.raises(rdb.InvalidInputError, match=r"version|advance_policy"):
            await lease.ack(cursor={"step": 1}, advance_policy=version)
    assert await buffer.count(statuses="leased") == 2
    assert await buffer.cursor("step") is None
    await buffer.revoke(lease.id)
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.ack(cursor={"step": 1}, advance_policy=6)
    assert (await buffer.refresh(), await buffer.cursor("step")) == (5, None)
    await (await buffer.lease(2, ttl=60)).ack(advance_policy=5)  # the current one
    empty = await buffer.lease(9, ttl=60, at_least=0)
    await empty.ack(cursor={"step": 2}, advance_policy=6)
    assert (buffer.policy_version, await buffer.cursor("step")) == (6, 2)


async def test_a_process_that_observes_reads_the_policy_again(
    buffer: Buffer, elsewhere: Buffer
) -> None:
    await buffer.put(group(version=0))
    await buffer.advance_policy(3)
    await buffer.update_settings(max_staleness=7)
    assert (elsewhere.policy_version, elsewhere.settings.max_staleness) == (0, None)
    assert await elsewhere.refresh() == elsewhere.policy_version == 3
    assert elsewhere.settings.max_staleness == 7
