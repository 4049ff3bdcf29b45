"""Concurrent puts share transactions. A failed or cancelled put does not affect the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import select

import replaydb as rdb
from replaydb import Buffer, EpisodeGroup, OnDuplicate, SamplingPolicy, Store
from replaydb.database.runtime.protocol import LostRaceError
from replaydb.database.runtime.session import Session
from replaydb.database.tables import schema
from support.connections import transaction
from support.groups import episode, group, groups, long_group
from support.invariants import check_invariants
from support.postgres import PostgresServer
from support.tables import table_sizes
from support.watching import counted_commits, num_used


@asynccontextmanager
async def blocked_puts(url: str) -> AsyncIterator[None]:
    """Block puts to known tasks at their first write until the block ends."""
    async with transaction(url) as connection:
        await connection.execute(select(schema.task).with_for_update())
        yield
        await connection.rollback()  # tests count commits


async def test_many_puts_share_few_transactions(store: Store, buffer: Buffer) -> None:
    with counted_commits(store) as commits:
        ids = await asyncio.gather(*(buffer.put(group(f"{i}")) for i in range(64)))
    assert len({one for [one] in ids}) == 64
    assert await buffer.count() == 64
    found = await buffer.get([one for [one] in ids])
    assert [one.group_uid for one in found] == [f"{i}" for i in range(64)]
    assert 1 <= len(commits) <= 4


async def test_puts_made_during_a_transaction_share_the_next_one(
    store: Store, buffer: Buffer, url: str
) -> None:
    await buffer.put(group())
    with counted_commits(store) as commits:
        async with blocked_puts(url):
            puts = []
            for i in range(12):
                puts.append(asyncio.create_task(buffer.put([group(f"a{i}"), group(f"b{i}")])))
                await asyncio.sleep(0.01)
            assert not any(one.done() for one in puts)
        ids = [one for several in await asyncio.gather(*puts) for one in several]
    assert len(set(ids)) == await buffer.count() - 1 == 24
    assert len(commits) == 2


async def test_a_put_that_comes_during_an_outage_is_tried(
    buffer: Buffer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not fail together with the put that has waited for the database since before."""
    await buffer.put(group())
    patience = iter([0.5, 60.0])
    monkeypatch.setattr(buffer._puts, "_allowance", lambda num_bytes: next(patience))
    async with blocked_puts(url):
        first = asyncio.create_task(buffer.put(group("first")))
        while buffer._puts._running is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        late = asyncio.create_task(buffer.put(group("late")))
        with pytest.raises(rdb.DatabaseUnavailableError):
            await first
    await late
    assert await buffer.count() == 2


async def test_a_timeout_between_two_attempts(
    store: Store,
    buffer: Buffer,
    pass_time: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first attempt is known to be rolled back, so the outcome is not unknown."""
    await buffer.put(group())
    writer, attempts = store._database.writer, 0
    write = writer.write

    async def attempt(work: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal attempts
        attempts += 1

        def lose(session: Session) -> None:
            work(session)
            raise LostRaceError

        if attempts == 1:
            await write(lose, *arguments, **options)
        pass_time(100)
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write", attempt)
        with pytest.raises(rdb.DatabaseUnavailableError) as caught:
            await buffer.put(group("late"), timeout=60)
    assert (type(caught.value), attempts) == (rdb.DatabaseUnavailableError, 2)
    assert await buffer.count() == 1


async def test_large_puts_do_not_wait_for_each_other(
    store: Store, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaydb.database.runtime.group_commit.MOST_BYTES", 100_000)
    await buffer.put(group())
    with counted_commits(store) as commits:
        await asyncio.gather(*(buffer.put(long_group(f"{i}", 14_000)) for i in range(8)))
    assert 3 <= len(commits) <= 8
    assert await buffer.count() == 9


async def test_puts_of_several_stores_do_not_get_in_each_others_way(url: str) -> None:
    stores = await asyncio.gather(*(Store.open(url, run=f"{i}") for i in range(3)))
    buffers = [await store.buffer("math") for store in stores]
    tasks = ("gsm8k", "code", "chat")
    puts = [
        buffer.put([group(f"{i}-{j}", tasks[(i + j) % 3]), group(f"{i}-{j}b", tasks[j % 3])])
        for j in range(12)
        for i, buffer in enumerate(buffers)
    ]
    ids = [one for several in await asyncio.gather(*puts) for one in several]
    assert len(set(ids)) == await buffers[0].count() == 72
    for store in stores:
        await store.close()
    await check_invariants(url)


async def test_a_refused_put_leaves_no_payloads(buffer: Buffer, url: str) -> None:
    """Those of its new groups are written before it is known that another is stored."""
    await buffer.put(group("first"))
    before = await table_sizes(url)
    good = [buffer.put(long_group(f"good-{i}", 10)) for i in range(6)]
    mixed = buffer.put([long_group("new", 10), group("first")])
    outcomes = await asyncio.gather(*good, mixed, return_exceptions=True)
    assert [type(one) for one in outcomes] == [list] * 6 + [rdb.DuplicateGroupError]
    added = {"episode_group": 6, "payload": 6, "episode": 6, "transcript": 6}
    assert await table_sizes(url) == {name: before[name] + n for name, n in added.items()}
    await buffer.put(long_group("new", 10))


async def test_the_same_uid_put_by_many_at_once_is_stored_once(buffer: Buffer, url: str) -> None:
    async with Store.open(url) as second:
        there = await second.buffer("math")
        puts = [one.put(group("same")) for one in (buffer, there) * 8]
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        assert sum(isinstance(one, rdb.DuplicateGroupError) for one in outcomes) == 15
        again = [one.put(group("same"), on_duplicate="ignore") for one in (buffer, there) * 4]
        replacing = [
            one.put(group("same", priority=2.0), on_duplicate="replace")
            for one in (buffer, there) * 4
        ]
        ids = [one for several in await asyncio.gather(*again, *replacing) for one in several]
    assert len(set(ids)) == await buffer.count() == 1
    assert (await buffer.get(ids[:1]))[0].priority == 2.0


@pytest.mark.parametrize("on_duplicate", ["replace", "renew"])
async def test_clients_that_overwrite_the_same_groups_lose_no_race(
    url: str, on_duplicate: OnDuplicate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="replaydb.database.runtime.transactions")
    stores = await asyncio.gather(*(Store.open(url, run=f"{i}") for i in range(3)))
    buffers = [await store.buffer("math") for store in stores]
    uids = ["a", "b", "c"]
    await buffers[0].put([group(uid) for uid in uids])

    async def overwrite(buffer: Buffer, seed: int) -> list[int]:
        rng, ids = random.Random(seed), []
        for _ in range(8):
            again = [group(uid, rng.choice(["gsm8k", "code"])) for uid in rng.sample(uids, 3)]
            ids += await buffer.put(again, on_duplicate=on_duplicate)
        return ids

    several = await asyncio.gather(*(overwrite(one, i) for i, one in enumerate(buffers)))
    ids = {one for ids in several for one in ids}
    assert len(ids) == (3 if on_duplicate == "replace" else 3 * 8 * 3)
    assert {one.group_uid for one in await buffers[0].find(ids)} == set(uids)
    assert await buffers[0].count() == 3
    assert "IntegrityError" not in caplog.text  # why a transaction was run again
    for store in stores:
        await store.close()
    await check_invariants(url)


def hopeless(uid: str) -> list[EpisodeGroup]:
    """Two groups, the second with a priority that has no weight under an exponent of 2."""
    return [long_group(f"{uid}-long", 50), group(uid, "another task", priority=1e-200)]


@pytest.mark.parametrize("known", [True, False])
async def test_a_put_that_fails_does_not_fail_the_others(
    store: Store, url: str, known: bool
) -> None:
    buffer = await store.buffer("math", priority_exponent=2.0)
    if known:
        await buffer.put([group("first"), group("x", "another task")])
    before = await table_sizes(url)
    good = [buffer.put(long_group(f"good-{i}", 10)) for i in range(6)]
    bad = [buffer.put(hopeless(f"bad-{i}")) for i in range(3)]
    twice = [buffer.put(group("twice")), buffer.put([group("left out"), group("twice")])]
    outcomes = await asyncio.gather(*good, *bad, *twice, return_exceptions=True)
    kinds = [type(one) for one in outcomes]
    assert kinds == [list] * 6 + [rdb.InvalidInputError] * 3 + [list, rdb.DuplicateGroupError]
    added = {"episode_group": 7, "payload": 7, "episode": 8, "transcript": 6}
    assert await table_sizes(url) == {name: before[name] + n for name, n in added.items()}
    counters = {one.task_name: one for one in (await buffer.stats()).tasks}
    if not known:
        assert set(counters) == {"gsm8k"}
    assert counters["gsm8k"].num_inserted == 7 + known


async def test_a_put_that_fails_alone_leaves_nothing(store: Store, url: str) -> None:
    buffer = await store.buffer("math", priority_exponent=2.0)
    with pytest.raises(rdb.InvalidInputError):
        await buffer.put(hopeless("bad"))
    assert set((await table_sizes(url)).values()) == {0}
    assert (await buffer.stats()).tasks == ()
    [group_id] = await buffer.put(long_group("good", 5))
    assert (await buffer.sample(1)).ids == [group_id]


@pytest.mark.parametrize("neighbours", [0, 3])
async def test_a_put_cancelled_before_its_commit_stores_nothing(
    buffer: Buffer, url: str, neighbours: int
) -> None:
    await buffer.put(group())
    async with blocked_puts(url):
        put = asyncio.create_task(buffer.put([long_group("a", 9), group("b")]))
        others = [asyncio.create_task(buffer.put(group(f"{i}"))) for i in range(neighbours)]
        await asyncio.sleep(0.1)
        late = asyncio.create_task(buffer.put(group("queued")))
        await asyncio.sleep(0.05)
        for one in (put, late):
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(one, 60)
    assert len({one for [one] in await asyncio.gather(*others)}) == neighbours
    await buffer.put(group("after"))
    assert await buffer.count() == 2 + neighbours
    assert (await table_sizes(url))["transcript"] == 0


async def test_a_put_that_waits_for_a_lock_can_be_cancelled_at_once(
    buffer: Buffer, url: str
) -> None:
    ids = await buffer.put(groups(3, version=0))
    before = await buffer.stats()
    async with blocked_puts(url):
        calls: list[Coroutine[Any, Any, object]] = [
            buffer.sample(1),
            buffer.delete(ids),
            buffer.update_priorities(ids, [2.0] * 3),
            buffer.advance_policy(9),
            buffer.update_settings(max_staleness=0),
        ]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert [type(one) for one in outcomes] == [asyncio.CancelledError] * len(calls)
    async with blocked_puts(url):
        pass
    assert await buffer.stats() == before
    assert await buffer.delete(ids) == 3


async def test_cancelling_at_any_moment_leaves_groups_whole_or_absent(
    store: Store, buffer: Buffer, url: str
) -> None:
    rng = random.Random(3)
    policies: list[SamplingPolicy] = [rdb.Uniform(), rdb.Prioritized(), rdb.Lifo()]
    await buffer.put(groups(20, version=0))
    for number in range(40):
        trio = [long_group(f"{number}-{i}", 40, "code", priority=i + 0.5) for i in range(3)]
        calls = [
            buffer.put(trio),
            buffer.sample(5, rng.choice(policies)),
            buffer.update_priorities(range(1, 9), [rng.uniform(0, 3) for _ in range(8)]),
            buffer.delete(tasks="code", where=rdb.col.group_uid.like(f"{number - 2}-%")),
            buffer.advance_policy(number),
            buffer.sample(3, tasks="not there", timeout=60),
        ]
        tasks = [asyncio.create_task(call) for call in calls]
        for one in rng.sample(tasks, len(tasks)):
            await asyncio.sleep(rng.choice([0, 0, 0.0005, 0.002, 0.01]))
            one.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        unexpected = [
            one
            for one in outcomes
            if isinstance(one, BaseException) and not isinstance(one, asyncio.CancelledError)
        ]
        assert not unexpected
        stored = await buffer.count(where=rdb.col.group_uid.like(f"{number}-%"))
        assert stored in (0, 3)
        if isinstance(outcomes[0], list):
            assert stored == 3
    await buffer.put(group("after"), on_duplicate="error")
    assert len(await buffer.sample(21)) == 21
    await check_invariants(url)
    assert num_used(store) == 0


@pytest.mark.parametrize("call", ["put", "add_episode"])
async def test_a_put_that_times_out_before_its_commit_is_not_stored(
    postgresql_url: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A lock that another client holds stops its last statement; COMMIT was not sent."""
    loop = asyncio.get_running_loop()
    now = loop.time
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math")
        await buffer.open_group("gsm8k", "open", 2)
        async with transaction(postgresql_url) as holder:
            table = schema.run if call == "put" else schema.commit_proof
            await holder.execute(select(table).with_for_update())
            late: Coroutine[Any, Any, object] = (
                buffer.put(group("late"), timeout=600)
                if call == "put"
                else buffer.add_episode("open", episode(), timeout=600)
            )
            started = asyncio.create_task(late)
            await postgres.until_blocked(postgresql_url)
            monkeypatch.setattr(loop, "time", lambda: now() + 600)
            with pytest.raises(rdb.DatabaseUnavailableError, match="nothing was stored") as caught:
                await started
            assert type(caught.value) is rdb.DatabaseUnavailableError
        assert await buffer.count(where=rdb.col.num_episodes > 0) == 0
        assert await buffer.put(group("late"))
    await check_invariants(postgresql_url)
