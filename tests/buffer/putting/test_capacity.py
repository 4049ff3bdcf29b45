"""Capacity: which groups are evicted before a put."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import replaydb as rdb
from replaydb import Buffer, Capacity, Store
from replaydb.database.tables.schema import payload
from replaydb.domain.settings import Eviction, OnEvict
from support.clock import Clock
from support.engines import in_turn, postgresql_nightly
from support.groups import episode, group, groups, long_group
from support.invariants import check_invariants, group_row, number_of, statuses


async def stored(url: str) -> set[str]:
    return {uid for uid, status in (await statuses(url)).items() if status != "archived"}


async def victims(buffer: Buffer, url: str, count: int) -> list[str]:
    """Return uids in the order in which they are evicted, one by one, by temporary new groups."""
    gone: list[str] = []
    for i in range(count):
        before = await stored(url)
        (newcomer,) = await buffer.put(group(f"new-{i}", priority=1e6, version=1000))
        gone.extend(before - await stored(url))
        await buffer.delete([newcomer])
        if left := len(before) - 1:
            await buffer.update_settings(capacity=Capacity(groups=left))
    return gone


@pytest.mark.parametrize(
    ("engine_name", "eviction", "expected"),
    in_turn(
        [
            ("oldest", ["a", "b", "c", "d", "e"]),
            ("newest", ["e", "d", "c", "b", "a"]),
            ("lowest_priority", ["d", "a", "c", "b", "e"]),
            ("stalest", ["c", "a", "e", "b", "d"]),
            ("most_sampled", ["b", "d", "a", "e", "c"]),
            ("least_recently_sampled", ["d", "b", "a", "e", "c"]),
        ]
    ),
)
async def test_eviction_order(
    store: Store, url: str, eviction: Eviction, expected: list[str]
) -> None:
    buffer = await store.buffer("math", eviction=eviction, capacity=Capacity(groups=5))
    facts: list[tuple[str, float, int | None]] = [
        ("a", 1.0, 3),
        ("b", 2.0, None),
        ("c", 1.0, 1),
        ("d", 0.0, None),
        ("e", 3.0, 3),
    ]
    for uid, priority, version in facts:
        await buffer.put(group(uid, priority=priority, version=version))
    for uids in (["b", "d"], ["d"], ["b"], ["a", "e"]):  # c never, a and e in one draw
        await buffer.sample(len(uids), rdb.Fifo(), where=rdb.col.group_uid.in_(uids))
    assert await victims(buffer, url, 5) == expected


async def test_groups_that_cannot_be_drawn_are_evicted_first(store: Store, url: str) -> None:
    buffer = await store.buffer("math", max_staleness=1, capacity=Capacity(groups=5))
    await buffer.put(group("good", version=0))
    await buffer.advance_policy(1)
    await buffer.put([group("failed", status="failed"), group("old", version=-0)])
    await buffer.put([group("filtered", status="filtered"), group("half", status="aborted")])
    await buffer.delete(where=rdb.col.group_uid == "good")
    await buffer.put(group("good", version=1))
    await buffer.advance_policy(2)
    assert (await statuses(url))["old"] == "expired"
    for left in (4, 3, 2, 1, 0):
        await buffer.put(group(version=2))
        assert len(await stored(url) & {"failed", "old", "filtered", "half", "good"}) == left
        if left == 4:
            assert "failed" not in await stored(url)
        if left == 2:
            assert {"half", "good"} <= await stored(url)
        if left == 1:
            assert "half" not in await stored(url)  # put before `good`


@postgresql_nightly
@pytest.mark.parametrize(
    ("eviction", "on_evict"),
    [("oldest", "delete"), ("lowest_priority", "archive"), ("lowest_priority", "delete")],
)
async def test_archived_groups_do_not_count(
    store: Store, url: str, on_evict: OnEvict, eviction: Any
) -> None:
    buffer = await store.buffer(
        "math",
        capacity=Capacity(groups=2),
        on_evict=on_evict,
        eviction=eviction,
        archived_payload="drop",
    )
    await buffer.put(groups(2))
    ids = await buffer.put([group(f"a{i}", status="archived", priority=9.0) for i in range(3)])
    assert await stored(url) == {"gsm8k-0", "gsm8k-1"}
    found = await buffer.get(ids)
    assert {str(one.status) for one in found} == {"archived"}
    assert all(one.num_tokens and one.archived_at and not one.completed_at for one in found)
    await check_invariants(url)
    await buffer.put(group("a0", status="archived"), on_duplicate="renew", timeout=0)
    await buffer.put(group("gsm8k-0", status="archived"), on_duplicate="replace", timeout=0)
    assert await stored(url) == {"gsm8k-1"}
    batch = await buffer.sample(9, at_least=1)
    assert [one.group_uid for one in batch.groups] == ["gsm8k-1"]
    await check_invariants(url)


@postgresql_nightly
@pytest.mark.parametrize(
    ("status", "on_evict"),
    [("filtered", "archive"), ("failed", "delete"), ("expired", "archive")],
)
async def test_groups_that_cannot_be_drawn_evict_no_others(
    store: Store, url: str, status: str, on_evict: OnEvict
) -> None:
    buffer = await store.buffer(
        "math", max_staleness=0, capacity=Capacity(groups=4), on_evict=on_evict
    )
    await buffer.advance_policy(9)

    def useless(uid: str) -> rdb.EpisodeGroup:
        return group(uid, version=8) if status == "expired" else group(uid, status=status)

    await buffer.put([*groups(2), useless("x")])
    assert await stored(url) == {"gsm8k-0", "gsm8k-1", "x"}
    await buffer.put([useless("y"), useless("z")])  # one group too many: the oldest is evicted
    assert await stored(url) == {"gsm8k-0", "gsm8k-1", "y", "z"}
    await buffer.put([useless("v"), group("a"), useless("w")])
    assert await stored(url) == {"gsm8k-0", "gsm8k-1", "a", "w"}
    await buffer.put([group("b"), useless("u")])
    assert await stored(url) == {"gsm8k-0", "gsm8k-1", "a", "b"}
    lease = await buffer.lease(4, ttl=60)
    await buffer.put([useless(f"n{i}") for i in range(9)], timeout=0)  # does not wait for capacity
    assert (await buffer.count(statuses="leased"), len(await stored(url))) == (4, 4)
    await buffer.put(useless("a"), on_duplicate="replace")
    await lease.nack(list({1, 2}))
    assert len(await stored(url)) == 4


@postgresql_nightly
@pytest.mark.parametrize("on_evict", ["archive", "delete"])
async def test_evicted_groups_keep_their_metadata(
    store: Store, url: str, on_evict: OnEvict
) -> None:
    buffer = await store.buffer("math", on_evict=on_evict, capacity=Capacity(groups=1))
    (group_id,) = await buffer.put(long_group("first", 20))
    await buffer.put(group("second"))
    assert await buffer.count() == (2 if on_evict == "archive" else 1)
    assert await number_of(url, payload) == 1
    if on_evict == "archive":
        row = await group_row(url, group_id)
        assert row["group_status"] == "archived"
        assert row["status_reason"] == "evicted: oldest"
        assert (row["num_tokens"], row["reward_mean"]) == (20, 1.0)
        with pytest.raises(rdb.PayloadGoneError):
            await buffer.get([group_id])
    else:
        with pytest.raises(rdb.UnknownGroupError):
            await buffer.get([group_id])
    await buffer.put(group("first"), on_duplicate="replace")


@postgresql_nightly
@pytest.mark.parametrize(
    ("where", "limit", "left"),
    [
        ("capacity", {"groups": 9, "tokens": 41}, 2),
        ("task_capacity", {"groups": 3}, 3),
        ("task_capacity", {"tokens": 70}, 3),
    ],
)
async def test_groups_and_tokens(
    store: Store, url: str, where: str, limit: dict[str, int], left: int
) -> None:
    settings: dict[str, Any] = {where: Capacity(**limit)}
    buffer = await store.buffer("math", **settings)
    for i in range(6):
        await buffer.put(long_group(f"g{i}", 20))
        assert len(await stored(url)) == min(i + 1, left)
    assert await stored(url) == {f"g{i}" for i in range(6 - left, 6)}
    await buffer.put(long_group("wide", 40))
    assert "wide" in await stored(url)
    with pytest.raises(rdb.InvalidInputError):
        await buffer.put([long_group(f"x{i}", 20) for i in range(10)])


@pytest.mark.parametrize("fits", [2.0, 2.5])
async def test_bytes(store: Store, url: str, fits: float) -> None:
    buffer = await store.buffer("math")
    await buffer.put(long_group("first", 100))
    (row,) = [await group_row(url, 1)]
    await buffer.update_settings(capacity=Capacity(bytes=int(fits * row["num_bytes"])))
    for i in range(4):
        await buffer.put(long_group(f"next-{i}", 100))
    assert await stored(url) == {"next-2", "next-3"}


async def test_task_capacity_and_buffer_capacity(store: Store, url: str) -> None:
    buffer = await store.buffer("math", task_capacity={"a": Capacity(groups=1)})
    for i in range(3):
        await buffer.put([group(f"a{i}", "a"), group(f"b{i}", "b")])
    assert await stored(url) == {"a2", "b0", "b1", "b2"}
    await buffer.update_settings(capacity=Capacity(groups=3))
    await buffer.put(group("a3", "a"))
    assert await stored(url) == {"b1", "b2", "a3"}
    await buffer.put(group("c0", "c"))
    assert len(await stored(url)) == 3


async def test_leased_and_pending_groups_are_not_evicted(
    store: Store, clock: Clock, url: str
) -> None:
    buffer = await store.buffer("math", capacity=Capacity(groups=3))
    await buffer.put(groups(2))
    await buffer.open_group("gsm8k", "slow", 2)
    lease = await buffer.lease(1, ttl=100)
    await buffer.put(group("x"))
    assert await stored(url) == {"gsm8k-0", "slow", "x"}
    second = await buffer.lease(1, ttl=50)
    with pytest.raises(rdb.BufferFullError):
        await buffer.put(group("y"), timeout=0)
    with pytest.raises(rdb.BufferFullError):
        await buffer.put(group("y"), timeout=0.05)
    assert await stored(url) == {"gsm8k-0", "slow", "x"}
    waiting = asyncio.ensure_future(buffer.put(group("y"), timeout=60))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await lease.ack()
    await waiting
    assert await stored(url) == {"slow", "x", "y"}
    clock.jump(60)  # released groups may be evicted at once
    await buffer.put([group("z0"), group("z1")], timeout=0)
    assert await stored(url) == {"slow", "z0", "z1"}
    with pytest.raises(rdb.LeaseExpiredError):
        await second.ack()


async def test_a_put_into_a_full_buffer_is_atomic(store: Store, url: str) -> None:
    buffer = await store.buffer("math", capacity=Capacity(groups=2))
    await buffer.put(groups(2))
    lease = await buffer.lease(1, ttl=100)
    with pytest.raises(rdb.BufferFullError):
        await buffer.put([group("x"), group("y")], timeout=0, cursor={"at": 1})
    with pytest.raises(rdb.BufferFullError, match="or kept by the same put"):
        await buffer.put([group("gsm8k-1"), group("x")], on_duplicate="replace", timeout=0)
    assert await stored(url) == {"gsm8k-0", "gsm8k-1"}
    assert await buffer.cursor("at") is None
    outcomes = await asyncio.gather(
        buffer.put([group("x"), group("y")], timeout=0),
        buffer.put(group("z"), timeout=0),
        return_exceptions=True,
    )
    assert isinstance(outcomes[0], rdb.BufferFullError)
    assert await stored(url) == {"gsm8k-0", "z"}
    await lease.nack()


async def test_groups_that_cannot_be_drawn_never_wait(store: Store, url: str) -> None:
    """Even if leased groups exceed a capacity that was lowered."""
    buffer = await store.buffer("math")
    await buffer.put(groups(3))
    lease = await buffer.lease(2, ttl=100)
    await buffer.update_settings(capacity=Capacity(groups=1))
    await buffer.put(group("bad", status="failed"), timeout=0)
    assert (await statuses(url))["bad"] == "archived"
    await lease.ack()


async def test_replacing_needs_no_capacity(store: Store, url: str) -> None:
    buffer = await store.buffer("math", capacity=Capacity(groups=2))
    await buffer.put(groups(2))
    await buffer.put(groups(2, rewards=[5.0]), on_duplicate="replace")
    assert await stored(url) == {"gsm8k-0", "gsm8k-1"}
    await buffer.put(group("gsm8k-0", "code"), on_duplicate="replace")
    assert await stored(url) == {"gsm8k-0", "gsm8k-1"}


async def test_time_to_live(store: Store, clock: Clock, url: str) -> None:
    buffer = await store.buffer("math", time_to_live=100)
    await buffer.put([*groups(2), group("half", status="aborted"), group("bad", status="failed")])
    await buffer.open_group("gsm8k", "slow", 2)
    lease = await buffer.lease(1, ttl=1000)
    clock.jump(60)
    await buffer.put(group("young"))
    assert len(await stored(url)) == 6
    clock.jump(60)
    await buffer.put(group("fresh"))
    assert await stored(url) == {"gsm8k-0", "slow", "young", "fresh"}
    assert (await group_row(url, 2))["status_reason"] == "outlived time_to_live"
    await lease.nack()
    assert (await buffer.sample(1, rdb.Fifo())).groups[0].group_uid == "young"
    for _ in range(2):  # the age of an open group counts from its opening
        await buffer.add_episode("slow", episode())
    await buffer.put(group("last"))
    assert await stored(url) == {"young", "fresh", "last"}


async def test_time_to_live_where_a_clock_was_wrong(store: Store, clock: Clock, url: str) -> None:
    """Groups that are not old, or have just become old, are among the lowest ids."""
    buffer = await store.buffer("math", time_to_live=100)
    clock.jump(10_000)
    await buffer.put([group(f"ahead-{i}") for i in range(40)])
    clock.jump(-10_000)
    await buffer.put([group(f"old-{i}") for i in range(20)])
    clock.jump(150)
    await buffer.put(group("fresh"))
    assert await stored(url) == {f"ahead-{i}" for i in range(40)} | {"fresh"}
    await buffer.delete(ids=range(2, 41))
    await buffer.put(groups(20))
    clock.jump(9_850)  # the first group is young now
    await buffer.put(group("last"))
    assert await stored(url) == {"ahead-0", "last"}


@postgresql_nightly
@pytest.mark.parametrize("how", ["drawn", "acked", "returned and drawn", "old"])
async def test_on_evict_delete_keeps_nothing(
    store: Store, clock: Clock, url: str, how: str
) -> None:
    buffer = await store.buffer("math", on_evict="delete", max_times_sampled=1, time_to_live=100)
    given = long_group("first", 20)
    (group_id,) = await buffer.put(given)
    match how:
        case "drawn":
            (drawn,) = (await buffer.sample(1)).groups
            assert drawn.episodes == given.episodes
            assert (drawn.status, drawn.times_sampled) == ("archived", 1)
        case "acked":
            async with buffer.lease(1, ttl=60):
                pass
            assert (await buffer.draws())[0].outcomes == ("acked",)
        case "returned and drawn":
            await buffer.update_settings(on_ack="return")
            await (await buffer.lease(1, ttl=60)).ack()
        case "old":
            clock.jump(101)
            await buffer.put(group("fresh"))
            await buffer.delete(where=rdb.col.group_uid == "fresh")
    assert await buffer.count() == 0
    assert await number_of(url, payload) == 0
    if draws := await buffer.draws():
        assert draws[0].group_ids == (group_id,)


async def test_a_smaller_capacity_on_a_live_buffer(store: Store, other: Store, url: str) -> None:
    buffer = await store.buffer("math")
    theirs = await other.buffer("math")
    await theirs.put(groups(40))  # has cached settings without limits
    await buffer.update_settings(capacity=Capacity(groups=4))
    assert len(await stored(url)) == 40
    await theirs.put(group("x"))
    assert await stored(url) == {"gsm8k-37", "gsm8k-38", "gsm8k-39", "x"}
    await theirs.update_settings(capacity=None)
    await buffer.put(groups(9, "code"))
    assert len(await stored(url)) == 13
    await theirs.update_settings(task_capacity=Capacity(groups=2))
    await buffer.put(group("y", "code"))
    assert len(await stored(url)) == 4 + 2
