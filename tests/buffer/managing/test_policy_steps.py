"""The policy advances at once; rows of groups are updated in short transactions."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import select, text

import replaydb as rdb
from replaydb import Buffer, Capacity, MinSize, Queue, Store
from replaydb.database.repository import aging, policy
from replaydb.database.tables.schema import task
from support import child_processes
from support.connections import transaction
from support.engines import in_turn, postgresql_nightly
from support.groups import episode, group
from support.invariants import check_invariants, group_rows
from support.workers import Worker, workers

SIZE = 3


class Stopped(Exception):
    """Simulated end of the process between two transactions."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the version changes at once, and other calls do not update rows."""
    monkeypatch.setattr(policy, "AT_ONCE", 0)
    monkeypatch.setattr(aging, "STEP_GROUPS", (SIZE, SIZE, SIZE))
    monkeypatch.setattr(aging, "COST_PER_TASK", 0)
    monkeypatch.setattr(aging, "GROUPS_PER_CALL", 0)


Stop = Callable[[int], Any]


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """Stop the calls in the block after `steps` transactions."""

    @asynccontextmanager
    async def block(steps: int) -> AsyncIterator[None]:
        left, step = steps, aging.step

        def counted(buffer: Any, most: int) -> None:
            nonlocal left
            if most > 0:
                left -= 1
                if left < 0:
                    raise Stopped
            step(buffer, most)

        with monkeypatch.context() as patch:
            patch.setattr(aging, "step", counted)
            with pytest.raises(Stopped):
                yield

    return block


async def behind(url: str) -> bool:
    """Whether rows remain to be updated."""
    async with transaction(url) as connection:
        rows = (await connection.execute(select(task.c.is_expiring, task.c.aged_to))).all()
    return any(row.is_expiring or row.aged_to is not None for row in rows)


async def fill(buffer: Buffer) -> dict[int, int | None]:
    """Put groups of every status and two tasks. Return the staleness of each at version 20."""
    ids = await buffer.put([group(version=v, task=t) for v in range(6) for t in ("gsm8k", "code")])
    ids += await buffer.put([group(version=v, status="aborted") for v in (1, 2)])
    ids += await buffer.put(group(version=None))
    expected: dict[int, int | None] = {
        one: 20 - v for one, v in zip(ids, [*(i // 2 for i in range(12)), 1, 2], strict=False)
    }
    expected[ids[-1]] = None
    dead = await buffer.put([group(version=3, status=s) for s in ("failed", "filtered")])
    pending = await buffer.open_group("gsm8k", "open", 2)
    await buffer.add_episode("open", episode(version=4))
    await buffer.lease(2, rdb.Fifo(), ttl=600, tasks="code")
    return expected | dict.fromkeys(dead, -3) | {pending: 16}


async def test_the_update_of_rows_is_invisible(store: Store, url: str, stopped: Stop) -> None:
    buffer = await store.buffer("math")
    expected = await fill(buffer)
    async with stopped(2):
        await buffer.advance_policy(20)
    stored = {row["id"]: row["staleness"] for row in await group_rows(url)}
    assert 2 < sum(stored[one] != expected[one] for one in expected) < len(expected) - 4
    assert await behind(url)
    known = sorted(value for value in expected.values() if value is not None)
    async with Store.open(url, read_only=True) as reading:
        there = await reading.buffer("math", create=False)
        assert there.policy_version == 20
        assert {one.id: one.staleness for one in await there.get(list(expected))} == expected
        shown = await there.find(order_by=rdb.col.staleness)
        assert {one.id: one.staleness for one in shown} == expected
        assert [one.staleness for one in shown if one.staleness is not None] == known
        second = await there.find(order_by=rdb.col.staleness.desc(), limit=5)
        third = await there.find(order_by=rdb.col.staleness.desc(), limit=5, after=second[-1])
        best = sorted(known, reverse=True)[:10]
        assert [one.staleness for one in (*second, *third)] == best
        fresh = sum(value <= 16 for value in known)
        assert await there.count(where=rdb.col.staleness <= 16) == fresh
        assert await there.count(where=~(rdb.col.staleness <= 16)) == len(known) - fresh
        assert await there.count(where=rdb.col.staleness > 16) == len(known) - fresh
        assert await there.count(where=rdb.col.staleness == 17) == known.count(17)
        assert await there.count(where=rdb.col.staleness.between(16, 17)) == sum(
            value in (16, 17) for value in known
        )
        assert await there.count(where=rdb.col.staleness.is_(None)) == 1
        peeked = await there.peek(9, rdb.Uniform(), max_staleness=17, at_least=1)
        assert all(value is not None and value <= 17 for value in peeked.staleness)
        totals = (await there.stats()).totals
        assert max(t.max_staleness for t in totals if t.max_staleness is not None) == 20
        assert (await there.metrics())["buffer/staleness_max"] == 20
    async with transaction(url) as connection:
        rows = await connection.execute(text("SELECT group_id, staleness FROM group_overview"))
        assert {row.group_id: row.staleness for row in rows} == expected
        rows = await connection.execute(
            text("SELECT task_name, max_seen_staleness AS most FROM task_overview")
        )
        assert {row.task_name: row.most for row in rows} == {"gsm8k": 20, "code": 20}
    batch = await buffer.sample(3, rdb.Lifo(), max_staleness=19, where=rdb.col.staleness > 15)
    assert batch.staleness == [expected[one] for one in batch.ids]
    [draw] = await buffer.draws(limit=1)
    assert list(draw.staleness) == batch.staleness
    assert await behind(url)
    assert await buffer.advance_policy(20) == 0
    assert not await behind(url)
    stored = {row["id"]: row["staleness"] for row in await group_rows(url)}
    assert stored == expected


@postgresql_nightly
@pytest.mark.parametrize("call", ["put", "sample"])
async def test_the_next_call_resumes_the_update(
    store: Store, url: str, stopped: Stop, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    buffer = await store.buffer("math")
    await buffer.put([group(version=v) for v in range(10)])
    async with stopped(1):
        await buffer.advance_policy(3)
    monkeypatch.setattr(aging, "GROUPS_PER_CALL", 100)
    assert await behind(url)
    await (buffer.put(group(version=3)) if call == "put" else buffer.sample(1))
    assert not await behind(url)


@pytest.mark.parametrize(
    ("engine_name", "how"),
    in_turn([rdb.Uniform(), rdb.Prioritized(), rdb.Fifo(), "lease", "peek"]),
)
async def test_nothing_too_stale_is_drawn(store: Store, url: str, stopped: Stop, how: Any) -> None:
    buffer = await store.buffer("math", max_staleness=2, rate_limit=MinSize(3))
    await buffer.put([group(version=0, priority=9.0) for _ in range(4 * SIZE)])
    fresh = await buffer.put([group(version=v) for v in (7, 8, 9)])
    async with stopped(1):
        await buffer.advance_policy(9)
    assert sum(row["group_status"] == "completed" for row in await group_rows(url)) > 3 * SIZE
    async with Store.open(url, read_only=how == "peek") as store:
        there = await store.buffer("math", create=False)
        draw = there.peek if how == "peek" else there.sample
        policy = rdb.Uniform() if isinstance(how, str) else how
        with pytest.raises(rdb.NotEnoughGroupsError):
            await draw(4, policy)
        if how == "lease":
            lease = await there.lease(3, ttl=60)
            batch = lease.batch
            await lease.nack()
        else:
            batch = await draw(3, policy)
    assert sorted(batch.ids) == fresh
    if how in ("peek", rdb.Uniform(), rdb.Prioritized()):
        assert batch.probabilities.tolist() == pytest.approx([1 / 3] * 3)
    assert await behind(url)
    assert await buffer.advance_policy(9) == (3 * SIZE if how == "peek" else 0)


async def test_a_draw_that_waits_for_expiry_draws_what_it_would_have(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a seed, it draws the same groups as if all had expired at once."""
    drawn = []
    for name, at_once in (("one", 1000), ("steps", 0)):
        monkeypatch.setattr(policy, "AT_ONCE", at_once)
        buffer = await store.buffer(name, max_staleness=2, seed=7)
        given = [group(f"{v}-{i}", version=v, priority=1.0 + i) for v in range(5) for i in range(8)]
        await buffer.put(given)
        uids = []
        for version in (3, 4, 6):
            advancing = asyncio.create_task(buffer.advance_policy(version))
            await _moved(buffer, version)
            batch = await buffer.sample(5, rdb.Prioritized())
            uids.append((await advancing, [one.group_uid for one in batch]))
        drawn.append(uids)
    assert drawn[0] == drawn[1]
    assert [expired for expired, _ in drawn[0]] == [8, 8, 16]


async def test_limits_count_only_groups_that_are_not_too_stale(store: Store, stopped: Stop) -> None:
    buffer = await store.buffer("queue", max_staleness=1, rate_limit=Queue(9))
    await buffer.put([group(version=0) for _ in range(9)])
    async with stopped(1):
        await buffer.advance_policy(2)
    await buffer.put([group(version=2) for _ in range(9)], timeout=0)
    with pytest.raises(rdb.RateLimitedError):
        await buffer.put(group(version=2), timeout=0)
    await buffer.advance_policy(2)


async def test_groups_that_are_too_stale_are_evicted(store: Store, stopped: Stop) -> None:
    buffer = await store.buffer(
        "math", max_staleness=1, capacity=Capacity(groups=6), eviction="newest"
    )
    await buffer.put([group(version=0) for _ in range(4)])
    fresh = await buffer.put([group(version=v) for v in (4, 5)])
    async with stopped(0):
        await buffer.advance_policy(5)
    fresh += await buffer.put([group(version=5) for _ in range(4)])
    statuses = {one.id: one.status for one in await buffer.get(fresh)}
    assert statuses == dict.fromkeys(fresh, "completed")
    await buffer.advance_policy(5)


async def test_an_update_that_evicts_while_groups_expire(
    store: Store, url: str, stopped: Stop
) -> None:
    """A group that the update has read is not counted as if it had not expired meanwhile."""
    buffer = await store.buffer("math", max_staleness=1, capacity=Capacity(groups=3))
    ids = await buffer.put([group(version=v) for v in (5, 0, 0)])
    await buffer.update(ids[:1], status="archived")
    await buffer.put(group(version=0))
    async with stopped(0):
        await buffer.advance_policy(5)
    assert await buffer.update(ids[:2], status="aborted") == 2
    assert (await buffer.stats()).tasks[0].num_available == 0
    await check_invariants(url)


async def test_groups_that_do_not_age_keep_their_staleness(
    store: Store, url: str, stopped: Stop
) -> None:
    buffer = await store.buffer("math", on_ack="archive")
    ids = await buffer.put([group(version=1) for _ in range(7)])
    async with await buffer.lease(1, rdb.Fifo(), ttl=60) as lease:
        async with stopped(0):
            await buffer.advance_policy(5)
        assert [row["staleness"] for row in await group_rows(url)] == [-1] * 7
    assert lease.batch.ids == ids[:1]
    await buffer.update(ids[1:2], status="filtered")
    await buffer.update(ids[2:3], status="failed")
    await buffer.update(ids[3:4], status="archived")
    async with await buffer.lease(1, rdb.Fifo(), ttl=60) as lease:
        await lease.reject(reason="of no use")
    await buffer.advance_policy(8)
    assert [one.staleness for one in await buffer.get(ids)] == [4] * 5 + [7, 7]


async def test_advances_in_the_middle_of_another(
    store: Store, other: Store, url: str, stopped: Stop
) -> None:
    """Back and forth, and by a run that takes over, each interrupted."""
    buffer, theirs = await store.buffer("math"), await other.buffer("math")
    ids = await buffer.put([group(version=v % 3) for v in range(9)])
    for version in (6, 5, 6):
        async with stopped(2):
            await buffer.advance_policy(version, rewind=True)
        assert [one.staleness for one in await buffer.get(ids)] == [
            version - v % 3 for v in range(9)
        ]
    async with stopped(1):
        await theirs.advance_policy(2, take_over=True)
    assert [one.staleness for one in await buffer.get(ids)] == [None] * 9
    assert await behind(url)
    async with stopped(1):
        await buffer.advance_policy(9, take_over=True)
    assert await buffer.count(where=rdb.col.staleness >= 8) == 6
    await buffer.advance_policy(11)
    assert [row["staleness"] for row in await group_rows(url)] == [11 - v % 3 for v in range(9)]


async def _moved(buffer: Buffer, version: int) -> None:
    """Whether the policy has advanced, even if rows remain to be updated."""
    while buffer.policy_version < version:  # noqa: ASYNC110 - there is no event of that
        await asyncio.sleep(0)


async def test_two_at_once(store: Store, other: Store, url: str) -> None:
    buffer, theirs = await store.buffer("math", max_staleness=5), await other.buffer("math")
    run = [group(version=v, task=f"task-{v % 3}") for v in range(30)]
    await buffer.put(run)
    async with asyncio.TaskGroup() as calls:
        calls.create_task(buffer.advance_policy(20))
        calls.create_task(_until_right(buffer, 21))
        await _moved(buffer, 20)
        calls.create_task(buffer.advance_policy(21))
    assert not await behind(url)
    assert (await theirs.stats()).policy_version == 21


async def _until_right(buffer: Buffer, version: int) -> None:
    while buffer.policy_version < version:
        batch = await buffer.sample(3, at_least=0)
        assert all(value is not None and value <= 5 for value in batch.staleness)


async def test_others_write_between_the_steps(store: Store, other: Store) -> None:
    buffer, theirs = await store.buffer("math"), await other.buffer("math")
    await buffer.put([group(version=0) for _ in range(40 * SIZE)])
    advancing = asyncio.create_task(buffer.advance_policy(1))
    await _moved(buffer, 1)
    await theirs.put(group(version=1))
    assert not advancing.done()
    await advancing


async def test_a_lower_max_staleness_expires_in_steps_too(
    store: Store, url: str, stopped: Stop
) -> None:
    buffer = await store.buffer("math", max_staleness=9)
    await buffer.put([group(version=v) for v in range(10)])
    await buffer.advance_policy(9)
    async with stopped(1):
        await buffer.update_settings(max_staleness=1)
    assert len(await buffer.sample(9, at_least=0)) == 2
    assert not await behind(url)


async def test_by_the_newest_token(store: Store) -> None:
    buffer = await store.buffer("math", max_staleness=1, expire_by="newest_token")
    long = [rdb.Episode(prompt_ids=[1], response_ids=[2, 3], policy_version=[0, 9])]
    await buffer.put([rdb.EpisodeGroup("gsm8k", long) for _ in range(4 * SIZE)])
    await buffer.put([group(version=0) for _ in range(2 * SIZE)])
    assert await buffer.advance_policy(9) == 2 * SIZE
    assert len(await buffer.sample(4 * SIZE)) == 4 * SIZE


@postgresql_nightly
async def test_killed_between_two_steps(store: Store, url: str) -> None:
    buffer = await store.buffer("math", max_staleness=3)
    async with Store.open(url) as of_any_run:
        await (await of_any_run.buffer("math")).put([group(version=v) for v in range(5)])
    with workers(Worker(child_processes.die_advancing, url)) as (worker,):
        assert await worker.ended() == -signal.SIGKILL
    assert await behind(url)
    assert (await buffer.stats()).policy_version == 5
    batch = await buffer.sample(9, at_least=1)
    assert set(batch.staleness) == {1, 2, 3}
    await buffer.advance_policy(6, take_over=True)
