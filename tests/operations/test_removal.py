"""Groups, draws, buffers and runs are deleted in short steps while they are in use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select, text, update

import replaydb as rdb
from replaydb import Store, operations
from replaydb.database.runtime import transactions
from replaydb.database.runtime.transactions import Database
from replaydb.database.tables.schema import buffer as buffer_table
from replaydb.database.tables.schema import cursor, draw, draw_group, lease, task
from replaydb.operations import removal
from support.clock import Clock
from support.connections import transaction
from support.engines import postgresql_nightly
from support.groups import group, groups, long_group
from support.invariants import check_invariants, number_of
from support.postgres import PostgresServer
from support.tables import table_sizes

NOTHING = {"episode_group": 0, "payload": 0, "episode": 0, "transcript": 0}


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use pages and steps smaller than what a test deletes."""
    monkeypatch.setattr(removal, "PAGE", 7)
    monkeypatch.setattr(removal, "FIRST_STEP", 2)
    monkeypatch.setattr(removal, "LONGEST_STEP", 3)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> list[Awaitable[object]]:
    """Calls of other processes, one after each step."""
    calls: list[Awaitable[object]] = []

    async def others_turn(_: Database) -> None:
        if calls:
            await calls.pop(0)

    monkeypatch.setattr(Database, "let_others_in", others_turn)
    return calls


async def test_groups_are_pruned_by_status_age_and_run(
    store: Store, other: Store, clock: Clock
) -> None:
    mine, theirs = await store.buffer("math"), await other.buffer("math")
    beside = await store.buffer("code")
    await mine.put([*groups(10), *groups(3, "bad", status="failed"), long_group("kept", 9)])
    await theirs.put(groups(4, "theirs"))
    await beside.put(groups(2))
    for buffer in (mine, beside):
        await buffer.update(uids=[f"gsm8k-{i}" for i in range(10)], status="archived")
    await theirs.update(uids=[f"theirs-{i}" for i in range(4)], status="archived")
    clock.jump(1000)
    await mine.put(groups(2, "young"))
    await mine.update(uids=["young-0", "young-1"], status="archived")

    seen: list[tuple[int, int | None]] = []
    dry_run_report = await operations.prune_groups(store, names="math", min_age=500, runs="test")
    assert (dry_run_report.dry_run, dry_run_report.num_groups) == (True, 10)
    assert await mine.count() == 20
    done = await operations.prune_groups(
        store,
        names="math",
        min_age=500,
        runs="test",
        dry_run=False,
        progress=lambda *counts: seen.append(counts),
    )
    assert (done.num_groups, done.num_bytes) == (10, dry_run_report.num_bytes)
    assert done.num_bytes > 0
    assert seen[0][1] == seen[-1][0] == seen[-1][1] == 10
    assert len(seen) > 3
    assert await mine.count(statuses="archived") == 6
    failed = await operations.prune_groups(store, statuses=["failed", "archived"], dry_run=False)
    assert failed.num_groups == 3 + 6 + 2
    assert [one.group_uid for one in await mine.find()] == ["kept"]
    assert await beside.count() == 0


async def test_groups_unarchived_meanwhile_are_kept(
    store: Store, meanwhile: list[Awaitable[object]]
) -> None:
    """Between the read of its id and the step that would delete it."""
    buffer = await store.buffer("math")
    await buffer.put(groups(6))
    await buffer.update(uids=[f"gsm8k-{i}" for i in range(6)], status="archived")
    meanwhile.append(buffer.update(uids="gsm8k-5", status="completed"))
    done = await operations.prune_groups(store, dry_run=False)
    assert done.num_groups == 5
    assert [one.group_uid for one in await buffer.find(statuses="completed")] == ["gsm8k-5"]


async def test_draws_are_pruned_except_those_with_leased_groups(
    store: Store, other: Store, clock: Clock, url: str
) -> None:
    mine, theirs = await store.buffer("math"), await other.buffer("math")
    await mine.put(groups(4))
    held = await mine.lease(2, ttl=10_000, step=0)
    for step in range(1, 9):
        await mine.sample(2, step=step)
    await theirs.sample(1, step=9)
    clock.jump(1000)
    await mine.sample(1, step=10)
    assert (await operations.prune_draws(store, min_age=500)).num_draws == 9
    assert (await operations.prune_draws(store, runs="test", min_age=500)).num_draws == 8
    done = await operations.prune_draws(store, runs="test", min_age=500, dry_run=False)
    assert done == removal.Removal(False, num_draws=8)
    assert [one.step for one in await mine.draws()] == [10, 9, 0]
    assert await number_of(url, draw_group) == 4
    await held.ack()
    assert (await operations.prune_draws(store, dry_run=False)).num_draws == 3
    assert await number_of(url, draw) == 0


@pytest.mark.parametrize("layout", ["inside", "outside"])
async def test_a_buffer_is_deleted_with_all_its_data(
    store: Store, other: Store, layout: str, url: str, meanwhile: list[Awaitable[object]]
) -> None:
    buffer, beside = await store.buffer("math"), await store.buffer("code")
    await buffer.put([*groups(9), long_group("long", 20)], cursor={"data": 1})
    await beside.put(groups(2))
    await buffer.open_group("gsm8k", "open", 2)
    for _ in range(4):
        await buffer.sample(2)
    theirs = await other.buffer("math")
    held = await theirs.lease(3, ttl=600)
    dry_run_report = await operations.delete_buffer(store, "math", dry_run=True)
    assert (dry_run_report.num_groups, dry_run_report.num_draws) == (11, 5)
    assert await buffer.count() == 11
    meanwhile.append(theirs.put(group("late")))  # deleted with the buffer
    done = await operations.delete_buffer(store, "math")
    assert (done.num_groups, done.num_draws, done.num_bytes) == (11, 5, dry_run_report.num_bytes)
    assert [one.name for one in await store.buffers()] == ["code"]
    for table in (draw, draw_group, lease, cursor):
        assert await number_of(url, table) == 0
    assert await number_of(url, task) == await number_of(url, buffer_table) == 1
    assert (await table_sizes(url))["episode_group"] == 2

    for call in (
        theirs.put(group()),
        theirs.sample(1, timeout=60),
        theirs.peek(1),
        theirs.peek(1, at_least=0),
        theirs.find(),
        theirs.find(where=rdb.col.prompt_uid == "any"),
        theirs.get([1]),
        theirs.episodes(1),
        theirs.texts([1]),
        theirs.count(),
        theirs.stats(),
        theirs.prompts(),
        theirs.cursor("data"),
        theirs.draws(),
        theirs.steps(),
        theirs.redraw(1),
        theirs.metrics(),
        theirs.leases(),
        theirs.copy_to(beside),
    ):
        with pytest.raises(rdb.UnknownBufferError):
            await call
    with pytest.raises(rdb.LeaseExpiredError):
        await held.extend(ttl=60)
    with pytest.raises(rdb.ReplayDBError):
        await held.ack()
    again = await other.buffer("math")
    assert again.id != theirs.id
    await again.put(groups(1))
    assert await again.count() == 1
    with pytest.raises(rdb.UnknownBufferError):
        await operations.delete_buffer(store, "maths")


async def test_a_buffer_does_not_use_the_id_of_another(store: Store, url: str) -> None:
    """Another buffer has its id after an older state of the database was restored."""
    mine = await store.buffer("math")
    async with transaction(url) as connection:
        await connection.execute(update(buffer_table).values(name="code"))
    for call in (mine.put(group()), mine.sample(1), mine.stats()):
        with pytest.raises(rdb.UnknownBufferError, match="'math'"):
            await call


async def test_a_buffer_is_deleted_while_in_use(store: Store, other: Store, url: str) -> None:
    theirs = await other.buffer("math")
    await theirs.put(groups(30))
    raised: list[type[Exception]] = []

    async def use(call: Any) -> None:
        try:
            while True:
                await call()
        except rdb.ReplayDBError as error:
            raised.append(type(error))

    async def lease_and_ack() -> None:
        async with theirs.lease(2, ttl=60, timeout=60):
            pass

    users = [
        asyncio.create_task(use(lambda: theirs.put([group(), group()]))),
        asyncio.create_task(use(lambda: theirs.sample(1, timeout=60))),
        asyncio.create_task(use(lease_and_ack)),
    ]
    await operations.delete_buffer(store, "math")
    await asyncio.gather(*users)
    assert set(raised) <= {rdb.UnknownBufferError, rdb.LeaseExpiredError}
    assert rdb.UnknownBufferError in raised
    assert await table_sizes(url) == NOTHING
    assert await number_of(url, lease) == await number_of(url, task) == 0


async def test_waiting_for_groups_of_a_deleted_buffer_raises(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the pre-check before an attempt finds too few groups."""
    theirs = await other.buffer("math")
    checked = asyncio.Event()
    may_suffice = theirs._may_suffice

    async def check(*arguments: Any, **options: Any) -> bool:
        checked.set()
        return await may_suffice(*arguments, **options)

    monkeypatch.setattr(theirs, "_may_suffice", check)
    waiting = asyncio.create_task(theirs.sample(1, timeout=None))
    await checked.wait()
    await operations.delete_buffer(store, "math")
    async with asyncio.timeout(60):
        with pytest.raises(rdb.UnknownBufferError):
            await waiting


async def test_a_run_is_deleted_with_what_it_put_and_drew(
    store: Store, other: Store, url: str
) -> None:
    mine, theirs = await store.buffer("math"), await other.buffer("math")
    beside = await other.buffer("code")
    await mine.put(groups(3))
    await theirs.put(groups(8, "theirs"))
    await beside.put(groups(2))
    await mine.sample(9, step=1)
    await theirs.sample(2, step=2)
    for holder, name in ((mine, "theirs"), (theirs, "gsm8k")):  # groups it has put, or drawn
        held = await holder.lease(1, tasks=name, ttl=600)
        with pytest.raises(rdb.GroupLeasedError):
            await operations.delete_run(store, "other")
        await held.nack()
    dry_run_report = await operations.delete_run(store, "other", dry_run=True)
    assert (dry_run_report.num_groups, dry_run_report.num_draws) == (10, 2)
    assert await mine.count() == 11
    done = await operations.delete_run(store, "other")
    assert (done.num_groups, done.num_draws) == (10, 2)
    assert [one.name for one in await store.runs()] == ["test"]
    assert await mine.count() == 3
    assert [one.step for one in await mine.draws()] == [None, 1]
    with pytest.raises(rdb.InvalidInputError, match="one of the runs test"):
        await operations.delete_run(store, "other")
    late = (
        lambda: theirs.put(group("late")),
        lambda: theirs.open_group("gsm8k", "late", 2),
        lambda: theirs.sample(1),
        lambda: theirs.advance_policy(9),
    )
    for call in late:
        with pytest.raises(rdb.UnknownRunError, match="'other' was deleted"):  # it was active
            await call()
    assert await mine.count(where=rdb.col.group_uid == "late") == 0
    await check_invariants(url)
    async with Store.open(url, run="other") as again:
        await (await again.buffer("math")).put(group("late"))


async def test_groups_leased_while_their_run_is_deleted_are_kept(
    store: Store, other: Store, meanwhile: list[Awaitable[object]]
) -> None:
    mine, theirs = await store.buffer("math"), await other.buffer("math")
    await theirs.put(groups(8))
    meanwhile.append(mine.lease(2, rdb.Lifo(), ttl=600))
    with pytest.raises(rdb.GroupLeasedError) as caught:
        await operations.delete_run(store, "other")
    (held,) = await mine.leases()
    assert set(held.group_ids) == set(caught.value.group_ids)
    assert await mine.count(statuses="leased") == await mine.count(statuses=[*rdb.GroupStatus]) == 2
    await mine.ack(held.id)
    assert (await operations.delete_run(store, "other")).num_groups == 2


async def test_claimed_pending_groups_are_kept(store: Store, other: Store) -> None:
    mine, theirs = await store.buffer("math"), await other.buffer("math")
    for name in ("claimed", "open"):
        await theirs.open_group("gsm8k", name, 2)
    [claim] = await mine.claim(ttl=600)
    with pytest.raises(rdb.GroupLeasedError):
        await operations.delete_run(store, "other")
    pruned = await operations.prune_groups(store, statuses="pending", dry_run=False)
    assert pruned.num_groups == 1
    assert [one.group_uid for one in await mine.find(statuses="pending")] == ["claimed"]
    await claim.release()
    assert (await operations.prune_groups(store, statuses="pending")).num_groups == 1


async def test_a_run_is_deleted_that_only_drew(store: Store, other: Store) -> None:
    await (await store.buffer("math")).put(groups(2))
    await (await other.buffer("math")).sample(1)
    done = await operations.delete_run(store, "other")
    assert (done.num_groups, done.num_draws) == (0, 1)
    assert [one.name for one in await store.runs()] == ["test"]


async def test_draws_locked_by_another_deletion_are_skipped(postgresql_url: str) -> None:
    """SQLite has only one writer."""
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(2))
        for step in range(4):
            await buffer.sample(1, step=step)
        async with transaction(postgresql_url) as connection:
            await connection.execute(select(draw.c.id).where(draw.c.step == 2).with_for_update())
            assert (await operations.prune_draws(store, dry_run=False)).num_draws == 3
        assert [one.step for one in await buffer.draws()] == [2]


async def test_steps_do_not_shrink_while_they_wait(
    postgresql_url: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy clients hold the locks most of the time. On SQLite a step begins with the lock."""
    now = 0.0  # stands still while a step works
    monkeypatch.setattr(removal, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(removal, "FIRST_STEP", 3)
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(6))
        deleted: list[int] = []
        async with transaction(postgresql_url) as connection:
            await connection.execute(select(task.c.id).with_for_update())
            pruning = asyncio.create_task(
                operations.prune_groups(
                    store,
                    statuses="completed",
                    dry_run=False,
                    progress=lambda done, _: deleted.append(done),
                )
            )
            await postgres.until_blocked(postgresql_url)
            now = 3600.0
        await pruning
        assert deleted == [3, 6]


async def test_groups_and_draws_of_large_buffers_are_found_in_time(
    postgresql_url: str, postgres: PostgresServer, pass_time: Callable[[float], None]
) -> None:
    """A lock stands in for reads of millions of rows, which take longer than other calls may."""
    async with Store.open(postgresql_url, run="test") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(2))
        await buffer.sample(1)
        async with transaction(postgresql_url) as connection:
            await connection.execute(text("LOCK TABLE episode_group, draw"))
            found = asyncio.gather(
                operations.prune_groups(store, statuses="completed"),
                operations.prune_draws(store),
                operations.delete_run(store, "test", dry_run=True),
            )
            await postgres.until_blocked(postgresql_url, 3)
            pass_time(2 * transactions.PATIENCE_SECONDS)
        counts = [(one.num_groups, one.num_draws) for one in await found]
        assert counts == [(2, 0), (0, 1), (2, 1)]


async def test_an_active_run_is_not_deleted(
    store: Store, other: Store, meanwhile: list[Awaitable[object]]
) -> None:
    theirs = await other.buffer("math")
    await theirs.put(groups(1))
    meanwhile += [theirs.put(group(f"late{i}")) for i in range(removal.ATTEMPTS)]
    with pytest.raises(rdb.InvalidInputError, match="is active"):
        await operations.delete_run(store, "other")
    assert meanwhile == []
    meanwhile += [theirs.put(group(f"later{i}")) for i in range(2)]
    assert (await operations.delete_run(store, "other")).num_groups == 3
    assert "other" not in [one.name for one in await store.runs()]


@postgresql_nightly
async def test_invalid_arguments_are_refused(store: Store) -> None:
    wrong: list[dict[str, Any]] = [
        {"statuses": "leased"},
        {"statuses": "gone"},
        {"min_age": -1},
        {"min_age": "day"},
        {"names": [3]},
        {"runs": 3},
        {"where": "reward_mean > 1"},
        {"dry_run": "no"},
        {"progress": 3},
    ]
    for given in wrong:
        with pytest.raises(rdb.InvalidInputError, match=next(iter(given))):
            await operations.prune_groups(store, **given)
        if not given.keys() & {"statuses", "where"}:
            with pytest.raises(rdb.InvalidInputError, match=next(iter(given))):
                await operations.prune_draws(store, **given)
    with pytest.raises(rdb.UnknownBufferError):
        await operations.prune_groups(store, names="maths")


async def test_a_read_only_store_deletes_nothing(store: Store, url: str) -> None:
    await (await store.buffer("math")).put(groups(2))
    async with Store.open(url, read_only=True) as reading:
        assert (await operations.delete_buffer(reading, "math", dry_run=True)).num_groups == 2
        with pytest.raises(rdb.DatabaseReadOnlyError):
            await operations.delete_buffer(reading, "math")
    assert (await store._database.read(lambda it: it.run(select(task)))) != []
