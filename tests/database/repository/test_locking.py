"""What a call reads under its locks was not changed while it waited for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from sqlalchemy import Update, func, select, update

from replaydb import (
    Buffer,
    Capacity,
    Fifo,
    PayloadGoneError,
    SamplingPolicy,
    Store,
    TopPriority,
    Uniform,
)
from replaydb.database.postgresql.session import PostgresqlSession
from replaydb.database.repository.buffers import lock_buffer
from replaydb.database.tables import schema
from support.connections import transaction
from support.groups import group, groups
from support.invariants import check_invariants
from support.postgres import PostgresServer


async def staleness_of(uid: str, url: str) -> int | None:
    """Return the column `staleness` of a group."""
    async with transaction(url) as connection:
        group_uid = schema.episode_group.c.group_uid
        stored = select(schema.episode_group.c.staleness).where(group_uid == uid)
        return await connection.scalar(stored)


@pytest.mark.parametrize("capacity", [None, Capacity(groups=100)], ids=["tasks", "buffer as well"])
async def test_buffer_and_clock_are_read_after_the_wait_for_a_lock(
    postgresql_url: str, postgres: PostgresServer, capacity: Capacity | None
) -> None:
    """The policy version advances while a put and a draw wait for the lock of their task."""
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math", capacity=capacity)
        await buffer.put(groups(4, version=1))
        await buffer.sample(1)  # statements that have run before lock and read in one exchange
        calls: dict[int, Callable[[], Coroutine[Any, Any, Any]]] = {
            5: lambda: buffer.put(group("late", version=1)),
            9: lambda: buffer.sample(5),
        }
        times = []
        for version, call in calls.items():
            async with transaction(postgresql_url) as other:
                for table in (schema.buffer, schema.task):
                    await other.execute(select(table).with_for_update(key_share=True))
                waiting = asyncio.create_task(call())
                await postgres.until_blocked(postgresql_url)
                await other.execute(update(schema.buffer).values(policy_version=version))
                times.append(await other.scalar(select(func.clock_timestamp())))
                await other.commit()
            result = await waiting
            if version == 5:
                assert await staleness_of("late", postgresql_url) == 4
        (late,) = [one for one in result.groups if one.group_uid == "late"]
        assert late.created_at > times[0]
        assert late.last_sampled_at > times[1]
        assert set(result.staleness) == {8}


async def after_a_wait(
    url: str, postgres: PostgresServer, call: Coroutine[Any, Any, Any], *changes: Update
) -> Any:
    """Return the result of a call that waited for locks of a transaction with these changes."""
    async with transaction(url) as other:
        for table in (schema.buffer, schema.task):
            await other.execute(select(table).with_for_update(key_share=True))
        waiting = asyncio.create_task(call)
        await postgres.until_blocked(url)
        for change in changes:
            await other.execute(change)
        await other.commit()
    return await waiting


@pytest.fixture
async def eight_groups(postgresql_url: str) -> AsyncIterator[Buffer]:
    """A buffer of which all statements have run, so that reads are sent with locks."""
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math", on_ack="return")
        await buffer.put(groups(8))
        for policy in (Fifo(), TopPriority(), Uniform()):
            await buffer.sample(1, policy)
            await (await buffer.lease(1, policy, ttl=600)).ack()
        await buffer.update_priorities([1], [1.0])
        yield buffer
    await check_invariants(postgresql_url)


def set_group(group_id: int, **values: Any) -> Update:
    return update(schema.episode_group).where(schema.episode_group.c.id == group_id).values(values)


@pytest.mark.parametrize("policy", [Fifo(), TopPriority(), Uniform()])
async def test_a_draw_reads_groups_after_its_wait(
    eight_groups: Buffer, postgresql_url: str, postgres: PostgresServer, policy: SamplingPolicy
) -> None:
    expire = [set_group(one, group_status="expired") for one in (1, 2, 3, 4, 5)]
    counters = {"num_available": schema.task.c.num_available - 5, "total_weight": 3.0}
    draw = eight_groups.sample(3, policy)
    expire.append(update(schema.task).values(counters))
    batch = await after_a_wait(postgresql_url, postgres, draw, *expire)
    assert set(batch.ids) == {6, 7, 8}


async def test_an_ack_reads_groups_after_its_wait(
    eight_groups: Buffer, postgresql_url: str, postgres: PostgresServer
) -> None:
    lease = await eight_groups.lease(2, Fifo(), ttl=600)
    take = set_group(2, lease_id=None, leased_from=None, group_status="failed")
    counters = {"num_leased": schema.task.c.num_leased - 1}
    count = update(schema.task).values(counters)
    drawn = schema.draw_group.c
    lose = update(schema.draw_group).where(drawn.group_id == 2, drawn.outcome == "leased")
    changes = take, count, lose.values(outcome="lost")
    await after_a_wait(postgresql_url, postgres, lease.ack(), *changes)
    found = {one.id: str(one.status) for one in await eight_groups.find(ids=[1, 2])}
    assert found == {1: "completed", 2: "failed"}


async def test_new_priorities_replace_those_found_after_the_wait(
    eight_groups: Buffer, postgresql_url: str, postgres: PostgresServer
) -> None:
    weigh = set_group(1, weight=5.0, priority=5.0)
    count = update(schema.task).values(total_weight=12.0)
    setting = eight_groups.update_priorities([1], [2.0])
    await after_a_wait(postgresql_url, postgres, setting, weigh, count)
    async with transaction(postgresql_url) as connection:
        assert await connection.scalar(select(schema.task.c.total_weight)) == 9.0


async def test_a_task_that_is_created_during_the_wait(
    eight_groups: Buffer, postgresql_url: str, postgres: PostgresServer
) -> None:
    """It is locked by the second run of the statement, which then waits again."""
    async with Store.open(postgresql_url) as store:
        another = await store.buffer("math")
        await (await another.lease(20, tasks=["code", "gsm8k"], ttl=60, at_least=1)).nack()
        tasks = select(schema.task).with_for_update(key_share=True)
        async with transaction(postgresql_url) as first, transaction(postgresql_url) as second:
            await first.execute(tasks)
            lease = another.lease(20, tasks=["code", "gsm8k"], ttl=60, at_least=1)
            leasing = asyncio.ensure_future(lease)
            await postgres.until_blocked(postgresql_url)
            [new, taken] = await eight_groups.put(groups(2, "code"))
            await second.execute(tasks.where(schema.task.c.task_name == "code"))
            await first.commit()
            await asyncio.sleep(0.3)  # blocked all the time, by another lock
            await postgres.until_blocked(postgresql_url)
            await second.execute(set_group(taken, group_status="failed"))
            of_code = update(schema.task).where(schema.task.c.task_name == "code")
            await second.execute(of_code.values(num_available=1, total_weight=1.0))
            await second.commit()
        ids = (await leasing).batch.ids
    assert new in ids
    assert taken not in ids


async def test_rows_that_were_read_ahead_are_not_older_than_maintenance(
    eight_groups: Buffer, postgresql_url: str
) -> None:
    """A draw first releases the groups of expired leases, and may take them."""
    await eight_groups.lease(2, Fifo(), ttl=600)
    async with transaction(postgresql_url) as connection:
        await connection.execute(update(schema.lease).values(expires_at=schema.lease.c.acquired_at))
    assert (await eight_groups.sample(3, Fifo())).ids == [1, 2, 3]


async def test_puts_and_draws_do_not_wait_for_a_locked_buffer(postgresql_url: str) -> None:
    """What they write refers to the buffer, and its lock does not conflict with that."""
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math")
        await buffer.put(group("a"))
        async with transaction(postgresql_url) as other:
            await other.execute(lock_buffer.build(1))
            async with asyncio.timeout(30):
                await buffer.put(group("b"))
                await buffer.sample(1)


#: Sessions that wait for their turn, not for a row.
_IN_TURN = (
    "SELECT count(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event = 'advisory'"
)


@pytest.mark.parametrize("capacity", [None, Capacity(groups=100)], ids=["tasks", "buffer as well"])
async def test_locks_are_granted_in_the_order_of_arrival(
    postgresql_url: str, postgres: PostgresServer, capacity: Capacity | None
) -> None:
    """Whatever locks the task. Each commit wakes one of those that wait, not all of them."""
    async with Store.open(postgresql_url) as store, Store.open(postgresql_url) as store_of_puts:
        buffer = await store.buffer("math", capacity=capacity)
        putting = await store_of_puts.buffer("math")
        for task in ("gsm8k", "math"):
            await putting.put(groups(8, task))
        lease = await buffer.lease(2, ttl=600, tasks="gsm8k")
        started: list[asyncio.Task[Any]] = []
        async with transaction(postgresql_url) as other:
            for table in (schema.buffer, schema.task):
                await other.execute(select(table).with_for_update(key_share=True))
            for call in (
                buffer.sample(1, tasks="gsm8k"),
                buffer.sample(1),
                buffer.sample(1, tasks=["gsm8k", "math"]),
                lease.ack(),
                putting.put(group("new")),
                buffer.sample(1, tasks="gsm8k"),
            ):
                started.append(asyncio.ensure_future(call))
                await postgres.until_blocked(postgresql_url, len(started))
            in_turn = await asyncio.to_thread(postgres.fetch_int, postgresql_url, _IN_TURN)
            await other.commit()
        results = await asyncio.gather(*started)
    # The first waits for the row, and so does the ack if only the others lock the buffer.
    assert in_turn == len(started) - (1 if capacity is None else 2)
    draws = [one.draw_id for one in results if hasattr(one, "draw_id")]
    assert draws == sorted(draws)
    assert len(draws) == 4


async def test_a_group_that_is_deleted_while_it_is_replaced_gets_a_new_id(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put has read its id before it waited for the locks. Draws name that id."""
    async with Store.open(postgresql_url) as store, Store.open(postgresql_url) as other:
        buffer, drawing = await store.buffer("math"), await other.buffer("math")
        await buffer.update_settings(max_times_sampled=1, on_evict="delete")
        [old] = await buffer.put(group("same", tags={"content": "old"}))
        identify = PostgresqlSession.identify
        loop = asyncio.get_running_loop()

        def then_drawn(session: PostgresqlSession, *args: Any, **more: Any) -> Any:
            found = identify(session, *args, **more)
            monkeypatch.setattr(PostgresqlSession, "identify", identify)
            asyncio.run_coroutine_threadsafe(drawing.sample(1, step=1), loop).result()
            return found

        monkeypatch.setattr(PostgresqlSession, "identify", then_drawn)
        put = buffer.put(group("same", tags={"content": "new"}), on_duplicate="replace")
        [new] = await put
        assert new > old
        (draw,) = await buffer.draws()
        with pytest.raises(PayloadGoneError):
            await buffer.redraw(draw.id)
    await check_invariants(postgresql_url)


async def test_a_put_of_a_new_task_and_a_lock_of_the_buffer_do_not_deadlock(
    postgresql_url: str, postgres: PostgresServer
) -> None:
    """The put locks the buffer twice: before it creates the task, and with all tasks."""
    url = f"{postgresql_url}&options=-c%20deadlock_timeout%3D60s"
    async with Store.open(url) as store, Store.open(url) as other, asyncio.timeout(60):
        buffer = await store.buffer("math", capacity=Capacity(groups=100))
        drawing = await other.buffer("math")
        await buffer.put(groups(4))
        async with transaction(postgresql_url) as holder:
            await holder.execute(select(schema.buffer).with_for_update(key_share=True))
            put = asyncio.ensure_future(buffer.put(group("new", "a new task")))
            await postgres.until_blocked(postgresql_url)
            sample = asyncio.ensure_future(drawing.sample(1))
            await postgres.until_blocked(postgresql_url, 2)
            await holder.commit()
        assert len(await put) == len(await sample) == 1
