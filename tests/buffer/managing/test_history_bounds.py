"""Retention of archived groups and recorded draws."""

from __future__ import annotations

import asyncio
from itertools import count, pairwise

import pytest
from sqlalchemy import text

import replaydb as rdb
from replaydb import Buffer, Capacity, Keep, Store
from replaydb.database.repository import retention
from replaydb.database.repository.puts import OnDuplicate
from replaydb.database.tables.schema import draw, draw_group, episode_group
from replaydb.domain.settings import Eviction
from support.clock import Clock
from support.connections import transaction
from support.engines import postgresql_nightly
from support.groups import group, groups, long_group
from support.invariants import number_of
from support.tables import CHILDREN, table_sizes


async def archived(buffer: Buffer) -> list[str]:
    return [one.group_uid for one in await buffer.find(statuses="archived")]


async def use_up(buffer: Buffer, n: int, task: str | None = None) -> None:
    async with buffer.lease(n, ttl=600, tasks=task):
        pass


@pytest.mark.parametrize("layout", ["inside", "outside"])
async def test_the_newest_archived_groups_of_each_task_are_kept(
    store: Store, layout: str, url: str
) -> None:
    buffer = await store.buffer("math", keep_archived=Keep(count=3))
    await buffer.put([*groups(5), *groups(2, "code"), long_group("long", 20)])
    await use_up(buffer, 8)
    assert len(await archived(buffer)) == 8  # nothing was put since
    await buffer.put(group("new"))
    assert sorted(await archived(buffer)) == ["code-0", "code-1", "gsm8k-3", "gsm8k-4", "long"]
    assert await buffer.count(statuses="completed") == 1
    sizes = await table_sizes(url)
    assert sizes == {"episode_group": 6, "payload": 6, "episode": 11, "transcript": 1}


async def test_archived_groups_are_deleted_by_age(store: Store, clock: Clock) -> None:
    buffer = await store.buffer("math", keep_archived=Keep(seconds=100))
    await buffer.put(groups(3))
    await use_up(buffer, 2)
    clock.jump(60)
    await buffer.put(groups(2, "code"))
    await use_up(buffer, 2, "code")
    clock.jump(60)
    await buffer.sample(1)  # of gsm8k and code, by the next call
    assert await archived(buffer) == ["code-0", "code-1"]
    assert await buffer.count(statuses="completed") == 1  # as old, but not archived
    clock.jump(60)
    await buffer.advance_policy(1)
    assert await archived(buffer) == []


@postgresql_nightly
async def test_large_puts_are_followed_by_large_deletions(store: Store, clock: Clock) -> None:
    by_count = await store.buffer("math", keep_archived=Keep(count=4))
    by_age = await store.buffer("code", keep_archived=Keep(seconds=100))
    for turn in range(3):
        for buffer in (by_count, by_age):
            await buffer.put([group(f"{turn}-{i}", status="archived") for i in range(60)])
        clock.jump(1000)
    for buffer in (by_count, by_age):
        assert await archived(buffer) == [f"2-{i}" for i in range(60)]  # the last put returned them


@postgresql_nightly
async def test_old_groups_are_deleted_in_every_task(store: Store, clock: Clock) -> None:
    """Each call checks some tasks, chosen at random."""
    buffer = await store.buffer("math", keep_archived=Keep(seconds=100))
    tasks = [f"task-{i}" for i in range(retention.TASKS + 4)]
    await buffer.put([group(None, task, status="archived") for task in tasks])
    clock.jump(1000)
    for _ in range(24):
        await buffer.put([group(None, task) for task in tasks])
    assert await archived(buffer) == []


@pytest.mark.parametrize("keep", [Keep(seconds=100), Keep(count=1)])
async def test_a_call_does_not_delete_what_it_reports_as_stored(
    store: Store, clock: Clock, keep: Keep
) -> None:
    buffer = await store.buffer("math")
    ids = await buffer.put([group(f"{i}", status="archived") for i in range(3)])
    await buffer.update_settings(keep_archived=keep)
    clock.jump(101)
    await buffer.put([group("0"), group("new")], on_duplicate="ignore", cursor={"at": 1})
    beyond = [] if keep.seconds else ["2"]
    assert await archived(buffer) == ["0", *beyond]
    if keep.seconds:
        assert await buffer.update(ids[:1], tags={"seen": True}) == 1
        assert (await buffer.find(ids[:1]))[0].tags == {"seen": True}
        assert await buffer.update_priorities(ids[:1], [3.0]) == 1
        assert (await buffer.find(ids[:1]))[0].priority == 3.0
    await buffer.put(group("next"))
    assert await archived(buffer) == beyond


@pytest.mark.parametrize("on_duplicate", ["error", "ignore", "renew", "replace"])
async def test_a_put_does_not_delete_what_it_archives(
    store: Store, on_duplicate: OnDuplicate
) -> None:
    buffer = await store.buffer("math", keep_archived=Keep(count=1))
    old = [group(f"{i}") for i in range(2)]
    if on_duplicate != "error":
        await buffer.put(old)
    new = [group(one.group_uid, status="archived") for one in [*old, group("2"), group("3")]]
    ids = await buffer.put(new, on_duplicate=on_duplicate, cursor={"at": 2})
    assert [one.id for one in await buffer.find(ids)] == ids
    await buffer.put(group("next"))
    assert await archived(buffer) == ["3"]


@pytest.mark.parametrize("eviction", ["oldest", "lowest_priority"])
async def test_a_put_does_not_delete_what_it_refuses(store: Store, eviction: Eviction) -> None:
    buffer = await store.buffer(
        "math", capacity=Capacity(groups=1), eviction=eviction, keep_archived=Keep(count=1)
    )
    await buffer.put(group("best", priority=9.0))
    status = "failed" if eviction == "oldest" else "completed"
    ids = await buffer.put([group(f"{i}", status=status) for i in range(3)])
    assert [one.status for one in await buffer.find(ids)] == ["archived"] * 3
    await buffer.put(group("next", priority=10.0))
    assert await buffer.count(statuses="archived") == 1


async def test_reported_groups_do_not_hold_up_the_others(store: Store, clock: Clock) -> None:
    """As many as a call reads are reported, again and again, and others are archived."""
    buffer = await store.buffer("math", keep_archived=Keep(seconds=100))
    known = [group(f"{i}", status="archived") for i in range(2 * retention.EXTRA_GROUPS)]
    await buffer.put(known)
    for turn in range(3):
        clock.jump(101)
        more = [group(f"{turn}-{i}", status="archived") for i in range(4)]
        await buffer.put([*known, *more], on_duplicate="ignore")
    assert await buffer.count(statuses="archived") == len(known) + 4


async def test_a_batch_that_is_archived_at_once_is_delivered(store: Store, clock: Clock) -> None:
    buffer = await store.buffer("math", keep_archived=Keep(seconds=100), max_times_sampled=1)
    expected = groups(3)
    await buffer.put(expected)
    clock.jump(101)
    batch = await buffer.sample(2, rdb.Fifo())
    async with buffer.lease(1, ttl=60) as lease:
        read = [*batch, *lease.batch]
    assert [one.episodes for one in read] == [one.episodes for one in expected]
    assert await buffer.count() == 0


async def test_a_time_that_cannot_be_read_is_not_compared(sqlite_url: str, clock: Clock) -> None:
    """PostgreSQL cannot store such a time."""
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math", keep_archived=Keep(seconds=100))
        await buffer.put([group(f"{i}", status="archived") for i in range(2)])
        async with transaction(sqlite_url) as connection:
            await connection.execute(text("UPDATE episode_group SET created_at = 'x' WHERE id = 1"))
        clock.jump(1000)
        await buffer.put(group("new"))
        assert await number_of(sqlite_url, episode_group) == 2


async def test_a_long_history_is_reduced_in_steps(store: Store) -> None:
    buffer = await store.buffer("math")
    await buffer.put(groups(100))
    await use_up(buffer, 100)
    await buffer.update_settings(keep_archived=Keep(count=10))
    left = [100]
    for number in count():
        await buffer.put(group(f"new-{number}"))
        left.append(await buffer.count(statuses="archived"))
        if left[-1] == left[-2]:
            break
    assert left[-1] == 10
    assert max(before - after for before, after in pairwise(left)) < 20


async def test_the_newest_draws_and_those_with_leased_groups_are_kept(
    store: Store, clock: Clock, url: str
) -> None:
    buffer = await store.buffer("math", keep_draws=Keep(count=3))
    await buffer.put(groups(4))
    taken = await buffer.lease(2, ttl=1000)
    for step in range(12):
        await buffer.sample(2, step=step)
    kept = await buffer.draws()
    assert [one.step for one in kept] == [11, 10, 9, None]
    assert await number_of(url, draw_group) == 8
    await taken.ack()
    assert (await buffer.draws())[-1].outcomes == ("acked", "acked")
    await buffer.sample(1, step=12)
    assert [one.step for one in await buffer.draws()] == [12, 11, 10]
    (gone,) = {one.id for one in kept} - {one.id for one in await buffer.draws()} - {taken.id, 12}
    with pytest.raises(rdb.UnknownDrawError):
        await buffer.redraw(gone)


async def test_draws_are_deleted_by_age(store: Store, clock: Clock, url: str) -> None:
    buffer = await store.buffer("math", keep_draws=Keep(seconds=100))
    await buffer.put(groups(4))
    await buffer.sample(2, step=0)
    taken = await buffer.lease(1, ttl=10_000, step=1)
    clock.jump(60)
    await buffer.sample(2, step=2)
    clock.jump(60)
    await buffer.put(group("new"))
    assert [one.step for one in await buffer.draws()] == [2, 1]
    assert await buffer.leases()
    await taken.nack()
    assert [one.step for one in await buffer.draws()] == [2]


async def test_draws_of_other_buffers_do_not_count(store: Store) -> None:
    mine = await store.buffer("math", keep_draws=Keep(count=2))
    theirs = await store.buffer("code")
    for buffer in (mine, theirs):
        await buffer.put(group())
    for step in range(5):
        for buffer in (mine, theirs):
            await buffer.sample(1, step=step)
    assert [one.step for one in await mine.draws()] == [4, 3]
    assert len(await theirs.draws()) == 5


@postgresql_nightly
async def test_a_store_does_not_grow(store: Store, engine_name: str, url: str) -> None:
    """However many groups are put and archived."""
    bounds = {"keep_archived": Keep(count=12), "keep_draws": Keep(count=12)}
    buffer = await store.buffer("math", **bounds)  # type: ignore[arg-type]
    sizes = []
    for turn in range(36):
        await buffer.put([long_group(f"{turn}-{i}", 4000) for i in range(4)])
        await use_up(buffer, 4)
        if turn % 12 == 11:
            sizes.append(await _pages(url) if engine_name == "sqlite" else 0)
            for table in (episode_group, draw, *CHILDREN):
                assert await number_of(url, table) <= 12 + 4, table
            assert await number_of(url, draw_group) <= 4 * (12 + 1)
    assert len(set(sizes)) == 1


async def test_bounds_hold_with_concurrent_draws(store: Store, other: Store) -> None:
    bounds = {"keep_archived": Keep(count=8), "keep_draws": Keep(count=8)}
    mine = await store.buffer("math", **bounds)  # type: ignore[arg-type]

    made: list[int | None] = []

    async def work(buffer: Buffer, task: str) -> None:
        for _ in range(8):
            await buffer.put([group(None, task), group(None, task)])
            async with buffer.lease(2, ttl=600, tasks=task) as lease:
                made.append(lease.batch.draw_id)

    theirs = await other.buffer("math")
    await asyncio.gather(
        *(work(buffer, f"{task}{buffer.run}") for buffer in (mine, theirs) for task in "ab")
    )
    for name in ("atest", "btest", "aother", "bother"):
        await mine.put(group(None, name))
        assert await mine.count(tasks=name, statuses="archived") == 8
    made.append((await mine.sample(1)).draw_id)
    assert [one.id for one in await mine.draws()] == sorted(made, reverse=True)[:8]  # type: ignore[type-var]


async def _pages(url: str) -> int:
    async with transaction(url) as connection:
        return int(await connection.scalar(text("PRAGMA page_count")) or 0)
