"""`put(on_duplicate="renew")`: the stored group is deleted and the new one gets a new id."""

from __future__ import annotations

import asyncio

import pytest

import replaydb as rdb
from replaydb import Buffer, Capacity, Queue, Store
from replaydb.database.tables.schema import payload
from replaydb.domain.settings import OnEvict
from support.clock import Clock
from support.groups import group, groups, long_group
from support.invariants import check_invariants, group_row, number_of, statuses
from support.tables import table_sizes


async def test_a_group_is_renewed_under_a_new_id(buffer: Buffer, clock: Clock, url: str) -> None:
    (old,) = await buffer.put(long_group("a", 9))
    await buffer.put([group("b"), group("c", "code")])
    first = await buffer.sample(3, rdb.Fifo())
    lease = await buffer.lease(1, rdb.Fifo(), ttl=60)
    clock.jump(10)
    new = group("a", "code", priority=5.0, version=2)
    assert await buffer.put([group("d"), new], on_duplicate="renew") == [4, 5]
    (stored,) = await buffer.get([5])
    assert stored == new
    assert (stored.times_sampled, stored.first_sampled_at, stored.times_replaced) == (0, None, 0)
    assert stored.created_at is not None
    assert stored.created_at > (await group_row(url, 2))["created_at"]
    assert await table_sizes(url) == {
        "episode_group": 4,
        "payload": 4,
        "episode": 8,
        "transcript": 0,
    }
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.ack([old])
    await lease.ack()  # nothing is left of the old group
    leased, drawn = await buffer.draws()
    assert (leased.outcomes, leased.outcome_reasons) == (("lost",), ("replaced",))
    assert (drawn.group_ids, drawn.outcomes) == (tuple(first.ids), ("sampled",) * 3)
    with pytest.raises(rdb.PayloadGoneError) as caught:
        await buffer.redraw(drawn.id)
    assert caught.value.group_ids == (old,)
    assert (await buffer.sample(4, rdb.Fifo())).ids == [2, 3, 4, 5]
    await check_invariants(url, idle_leases=True)


async def test_concurrent_renewals_of_a_group_leave_one(
    buffer: Buffer, other: Store, url: str
) -> None:
    theirs = await other.buffer(buffer.name)
    await buffer.put(group("same"))
    puts = [one.put(group("same"), on_duplicate="renew") for one in (buffer, theirs) * 4]
    ids = [one for (one,) in await asyncio.gather(*puts)]
    assert len(set(ids)) == 8
    assert await buffer.count() == await number_of(url, payload) == 1
    assert await buffer.count(where=rdb.col.id.in_(ids)) == 1
    await check_invariants(url)


@pytest.mark.parametrize("on_evict", ["archive", "delete"])
async def test_a_renewed_group_is_the_newest(store: Store, url: str, on_evict: OnEvict) -> None:
    buffer = await store.buffer("math", capacity=Capacity(groups=2), on_evict=on_evict)
    await buffer.put(groups(2))
    assert await buffer.put(group("gsm8k-0"), on_duplicate="renew") == [3]
    await buffer.put(group("x"))
    found = await statuses(url)
    assert {uid for uid in found if found[uid] != "archived"} == {"gsm8k-0", "x"}
    await check_invariants(url)


async def test_a_renewed_group_counts_as_put(store: Store, url: str) -> None:
    buffer = await store.buffer("math", rate_limit=Queue(2))
    await buffer.put(groups(2))
    assert await buffer.put(group("gsm8k-0"), on_duplicate="renew", timeout=0) == [3]
    await buffer.sample(1, rdb.Fifo())
    await buffer.put(group("x"))
    with pytest.raises(rdb.RateLimitedError):  # it was drawn, so one group more would wait
        await buffer.put(group("gsm8k-1"), on_duplicate="renew", timeout=0)
    assert (await statuses(url))["gsm8k-1"] == "archived"
    await check_invariants(url)


@pytest.mark.parametrize("how", ["replace", "renew"])
async def test_a_refused_put_overwrites_nothing(
    store: Store, url: str, how: rdb.OnDuplicate
) -> None:
    buffer = await store.buffer("math", priority_exponent=300.0)
    before = group("a", rewards=[5.0])
    (group_id,) = await buffer.put(before)
    puts = [
        buffer.put(group("first")),
        buffer.put(group("second")),
        buffer.put(group("a", priority=9.0), on_duplicate=how),
        buffer.put(group("third")),
    ]
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    assert [isinstance(one, rdb.InvalidInputError) for one in outcomes] == [
        False,
        False,
        True,
        False,
    ]
    assert await buffer.get([group_id]) == [before]
    await check_invariants(url)
