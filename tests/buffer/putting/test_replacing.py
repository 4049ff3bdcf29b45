"""`put(on_duplicate="replace")`: consumed groups are refused, and draws keep what they took."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import select

import replaydb as rdb
from replaydb import Buffer, Capacity, Keep, Store, analysis
from replaydb.database.tables.schema import episode, payload
from replaydb.database.tables.views import prompt_overview, training_history
from support.clock import Clock
from support.connections import transaction
from support.engines import in_turn
from support.groups import group, groups
from support.invariants import check_invariants, group_rows, number_of, statuses


async def by_ack(buffer: Buffer, ids: list[int]) -> None:
    async with buffer.lease(len(ids), ttl=60):
        pass


async def by_ack_of_a_task(buffer: Buffer, ids: list[int]) -> None:
    await buffer.ack((await buffer.lease(len(ids), ttl=60)).id)


async def by_update(buffer: Buffer, ids: list[int]) -> None:
    await buffer.update(ids, status="archived", reason="evicted: oldest")


async def by_sampling(buffer: Buffer, ids: list[int]) -> None:
    await buffer.update_settings(max_times_sampled=1)
    await buffer.sample(len(ids))


async def by_replacement(buffer: Buffer, ids: list[int]) -> None:
    copies = groups(len(ids), status="archived")
    assert await buffer.put(copies, on_duplicate="replace") == ids


@pytest.mark.parametrize("archived_payload", ["keep", "drop"])
@pytest.mark.parametrize(
    "consume", [by_ack, by_ack_of_a_task, by_update, by_sampling, by_replacement]
)
async def test_a_consumed_group_is_not_replaced(
    store: Store, url: str, consume: Any, archived_payload: Any
) -> None:
    buffer = await store.buffer("math", archived_payload=archived_payload)
    ids = await buffer.put(groups(2))
    await consume(buffer, ids)
    before, parts = await group_rows(url), await number_of(url, payload)
    put = buffer.put(
        [group("new"), *groups(2, rewards=[9.0])], on_duplicate="replace", cursor={"data": 1}
    )
    with pytest.raises(rdb.ConsumedGroupError, match=r"gsm8k-0, gsm8k-1.*'renew'") as caught:
        await put
    assert isinstance(caught.value, rdb.DuplicateGroupError)
    assert sorted(caught.value.group_uids) == ["gsm8k-0", "gsm8k-1"]
    assert await group_rows(url) == before
    assert (await number_of(url, payload), await buffer.cursor("data")) == (parts, None)
    assert await number_of(url, episode) == 4
    assert await buffer.put(groups(2), on_duplicate="ignore") == ids
    renewed = await buffer.put(groups(2), on_duplicate="renew")
    assert set(renewed).isdisjoint(ids)
    assert await statuses(url) == dict.fromkeys(("gsm8k-0", "gsm8k-1"), "completed")
    await check_invariants(url)


async def test_other_puts_of_the_transaction_are_stored(store: Store, url: str) -> None:
    for settings in ({}, {"capacity": Capacity(groups=9)}):
        buffer = await store.buffer(f"math {len(settings)}", **settings)  # type: ignore[arg-type]
        await buffer.put(group("used", status="archived"))
        first, second, third = await asyncio.gather(
            buffer.put(group("a"), on_duplicate="replace"),
            buffer.put(group("used"), on_duplicate="replace"),
            buffer.put(group("b")),
            return_exceptions=True,
        )
        assert isinstance(second, rdb.ConsumedGroupError)
        assert isinstance(first, list)
        assert isinstance(third, list)
        assert await buffer.count(statuses="completed") == 2
    await check_invariants(url)


async def test_an_evicted_group_is_stored_as_a_new_one(
    store: Store, url: str, clock: Clock
) -> None:
    """Whatever users wrote into `status_reason`, and although it was drawn before."""
    buffer = await store.buffer("math", capacity=Capacity(groups=2))
    await buffer.put(groups(2))
    await buffer.sample(2)
    await buffer.put([group("x"), group("y")])
    await buffer.update(uids=["gsm8k-0"], reason="acked")
    assert (await statuses(url))["gsm8k-0"] == "archived"
    assert await buffer.put(group("gsm8k-0"), on_duplicate="replace") == [5]
    await buffer.put(group("z"))  # evicts the oldest, which is `y`
    assert (await statuses(url))["gsm8k-0"] == "completed"

    await buffer.update_settings(capacity=None, time_to_live=10)
    clock.jump(11)
    await buffer.put(group("v"))
    assert await buffer.put(group("x"), on_duplicate="replace") == [8]
    metrics = await buffer.metrics()
    assert (metrics["gen/groups"], metrics["gen/replaced"]) == (8, 0)
    await buffer.update_settings(
        time_to_live=None, capacity=Capacity(groups=2), eviction="lowest_priority"
    )
    (refused,) = await buffer.put(group("low", priority=0.5))
    assert (await statuses(url))["low"] == "archived"
    assert await buffer.put(group("low", priority=5.0), on_duplicate="replace") == [refused + 1]
    assert (await statuses(url))["low"] == "completed"
    await check_invariants(url)


async def test_a_group_is_consumed_after_it_was_evicted(store: Store, url: str) -> None:
    """Replaced content is another matter: what happened to the old content is forgotten."""
    buffer = await store.buffer("math", capacity=Capacity(groups=1))
    await buffer.put(group("gsm8k-0"))
    await buffer.put(group("gsm8k-1"))
    await buffer.put(group("gsm8k-0"), on_duplicate="replace")
    async with buffer.lease(1, ttl=60):
        pass
    with pytest.raises(rdb.ConsumedGroupError, match="gsm8k-0"):
        await buffer.put(group("gsm8k-0"), on_duplicate="replace")
    await buffer.update(uids=["gsm8k-0"], status="completed")
    await buffer.put(group("gsm8k-0"), on_duplicate="replace")  # it was made drawable on purpose
    await check_invariants(url)


async def test_a_group_that_is_evicted_for_another_put_of_the_transaction(store: Store) -> None:
    buffer = await store.buffer("math", capacity=Capacity(groups=2))
    await buffer.put(groups(2))
    puts = [buffer.put(group("x")), buffer.put(group("gsm8k-0"), on_duplicate="replace")]
    assert await asyncio.gather(*puts) == [[3], [4]]
    assert [one.id for one in await buffer.find(statuses="completed")] == [3, 4]


@pytest.mark.parametrize(
    ("engine_name", "on_evict", "state"),
    in_turn(
        (how, state) for how in ("archive", "delete") for state in ("evicted", "leased", "open")
    ),
)
async def test_new_content_is_not_removed_because_of_the_age_of_the_old(
    store: Store, url: str, clock: Clock, on_evict: Any, state: str
) -> None:
    buffer = await store.buffer("math", time_to_live=100, on_evict=on_evict)
    if state == "open":
        await buffer.open_group("gsm8k", "cut", 1)
    else:
        await buffer.put(group("cut", status="aborted"))
    await buffer.put(group("other"))
    lease = None
    if state == "leased":
        lease = await buffer.lease(1, statuses="aborted", ttl=1000)
    clock.jump(101)
    (new,) = await buffer.put(group("cut", rewards=[9.0]), on_duplicate="replace")
    assert new > 2
    if lease is not None:
        await lease.ack()
    for seconds, expected in ((0, "completed"), (99, "completed"), (2, "archived")):
        clock.jump(seconds)
        await buffer.put(group())
        found = (await statuses(url)).get("cut", "archived")
        assert found == expected
    await check_invariants(url)


async def test_a_younger_group_keeps_its_age(buffer: Buffer, url: str, clock: Clock) -> None:
    await buffer.update_settings(time_to_live=100)
    (old,) = await buffer.put(group("a"))
    clock.jump(99)
    assert await buffer.put(group("a"), on_duplicate="replace") == [old]
    clock.jump(2)
    await buffer.put(group("b"))
    assert (await statuses(url))["a"] == "archived"


@pytest.mark.parametrize("keep", [Keep(seconds=100), Keep(count=1)])
async def test_content_that_is_put_into_the_archive(
    store: Store, clock: Clock, keep: Keep, url: str
) -> None:
    buffer = await store.buffer("math", keep_archived=keep)
    await buffer.put(group("a"))
    clock.jump(101)
    await buffer.put(group("b", status="archived"))
    (new,) = await buffer.put(group("a", status="archived"), on_duplicate="replace")
    await buffer.put(group("c"))
    kept = {one.group_uid: one.id for one in await buffer.find(statuses="archived")}
    assert kept.pop("a") == new == 3
    assert set(kept) == ({"b"} if keep.seconds else set())
    await check_invariants(url)


@pytest.mark.parametrize(("status", "attempts"), [("completed", 0), ("aborted", 2)])
async def test_the_reason_and_the_attempts_of_a_failed_group(
    store: Store, url: str, status: str, attempts: int
) -> None:
    """Completed content starts without attempts, as by an update or its last episode."""
    buffer = await store.buffer("math", max_attempts=2)
    await buffer.put(group("a"))
    for _ in range(2):
        await (await buffer.lease(1, ttl=60)).nack(reason="broken")
    (failed,) = await buffer.find()
    assert (failed.status, failed.attempts) == ("failed", 2)
    await buffer.put(group("a", status=status), on_duplicate="replace")
    (now,) = await buffer.find()
    shown = (now.id, now.status, now.attempts, now.status_reason)
    assert shown == (failed.id, status, attempts, None)
    if status == "completed":
        await (await buffer.lease(1, ttl=60)).nack()
        assert (await statuses(url))["a"] == "completed"
    await check_invariants(url)


async def test_a_group_acked_while_it_is_replaced(buffer: Buffer, other: Store, url: str) -> None:
    """Either the replacement is first, and the ack reports it, or the group is consumed."""
    theirs = await other.buffer(buffer.name)
    for i in range(8):
        (one,) = await buffer.put(group(f"u{i}"))
        lease = await buffer.lease(1, rdb.Lifo(), ttl=60)
        report, put = await asyncio.gather(
            lease.ack(),
            theirs.put(group(f"u{i}", rewards=[9.0]), on_duplicate="replace"),
            return_exceptions=True,
        )
        now = (await statuses(url))[f"u{i}"]
        if isinstance(put, rdb.ConsumedGroupError):
            assert (report, now) == (rdb.AckReport(settled=(one,)), "archived")
        else:
            assert (report, put, now) == (rdb.AckReport(gone=(one,)), [one], "completed")
        await buffer.delete([one])
    await check_invariants(url)


async def history(url: str) -> list[tuple[Any, ...]]:
    """Return what was drawn, as the view shows it, with its outcome."""
    shown = training_history.table.c
    columns = (shown.task_name, shown.prompt_uid, shown.reward_mean, shown.group_run_name)
    versions = (shown.min_policy_version, shown.max_policy_version, shown.num_tokens)
    statement = select(*columns, *versions, shown.outcome)
    async with transaction(url) as connection:
        ordered = statement.order_by(shown.draw_id, shown.position)
        return [tuple(row) for row in await connection.execute(ordered)]


async def sampled(buffer: Buffer) -> None:
    await buffer.sample(1)


async def nacked(buffer: Buffer) -> None:
    await (await buffer.lease(1, ttl=60)).nack()


async def returned(buffer: Buffer) -> None:
    async with buffer.lease(1, ttl=60):
        pass


async def leased(buffer: Buffer) -> None:
    await buffer.lease(1, ttl=60)


@pytest.mark.parametrize("how", ["replace", "renew"])
@pytest.mark.parametrize(
    ("drawn", "outcome"),
    [(sampled, "sampled"), (nacked, "nacked"), (returned, "acked"), (leased, "lost")],
)
async def test_draws_keep_what_they_took(
    store: Store, other: Store, url: str, drawn: Any, outcome: str, how: Any
) -> None:
    buffer = await store.buffer("math", on_ack="return")
    theirs = await other.buffer("math")
    first = group("a", prompt_uid="p0", rewards=[0.25, 0.75, 0.5], version=3)
    await buffer.put(first)
    await drawn(buffer)
    before = await history(url)
    told = (await buffer.metrics())["train/groups"]
    again = group("a", "code", prompt_uid="p1", rewards=[9.0], version=5)
    await theirs.put(again, on_duplicate=how)
    facts = ("gsm8k", "p0", 0.5, store.run, 3, 3, 15)
    assert await history(url) == [(*before[0][:-1], outcome)] == [(*facts, outcome)]
    await drawn(buffer)
    second = ("code", "p1", 9.0, "other", 5, 5, 5)
    both = await history(url)
    assert [row[:-1] for row in both] == [facts, second]
    await buffer.put(group("a"), on_duplicate="renew")
    assert [row[:-1] for row in await history(url)] == [facts, second]
    metrics = await buffer.metrics()
    assert metrics["train/groups"] == 2 * told
    if told:
        assert metrics["train/reward_mean"] == (0.5 + 9.0) / 2
        assert (metrics["train/deleted"], metrics["train/tokens"]) == (0, 20)
    for lease in await buffer.leases():
        await buffer.revoke(lease.id)


async def test_prompts_count_draws_of_what_was_replaced(buffer: Buffer, url: str) -> None:
    async def trained() -> dict[str, tuple[int, int, int]]:
        shown = prompt_overview.table.c
        columns = (shown.prompt_uid, shown.times_sampled, shown.times_trained)
        async with transaction(url) as connection:
            rows = (await connection.execute(select(*columns))).all()
        found = {one.prompt_uid: one for one in await buffer.prompts()}
        assert {uid: times for uid, times, _ in rows} == {
            uid: one.times_sampled for uid, one in found.items()
        }
        return {uid: (*times, found[uid].num_groups_sampled) for uid, *times in rows}

    await buffer.put([group("a", prompt_uid="p0"), group("b", prompt_uid="p1")])
    await buffer.sample(2)
    await buffer.sample(2)
    await (await buffer.lease(1, rdb.Fifo(), ttl=60)).nack()
    await buffer.put(group("a", prompt_uid="p0"), on_duplicate="replace")
    assert await trained() == {"p0": (2, 2, 1), "p1": (2, 2, 1)}
    await buffer.sample(2)
    assert await trained() == {"p0": (3, 3, 1), "p1": (3, 3, 1)}
    await buffer.put(group("a", prompt_uid="p1"), on_duplicate="replace")  # another prompt
    assert await trained() == {"p1": (3, 3, 1)}


async def test_draws_of_a_task_include_what_was_replaced(buffer: Buffer, url: str) -> None:
    await buffer.put([group("a"), group("b", "code")])
    await buffer.sample(2, rdb.Fifo())
    await buffer.put(group("a", "code", rewards=[9.0]), on_duplicate="replace")
    rows = analysis.draws(url, tasks="gsm8k").to_table().to_pylist()
    assert [(row["group_id"], row["task_name"], row["reward_mean"]) for row in rows] == [
        (1, "gsm8k", 0.5)
    ]


async def test_replacements_are_counted_apart(buffer: Buffer, other: Store) -> None:
    await buffer.put(groups(3))
    await buffer.put([group("gsm8k-0"), group("new")], on_duplicate="replace")
    await buffer.put(group("gsm8k-1", "code"), on_duplicate="replace")
    await buffer.put(group("gsm8k-2"), on_duplicate="renew")
    await buffer.delete(uids="gsm8k-0")
    for one in (buffer, await other.buffer(buffer.name)):
        found = await one.metrics()
        numbers = {name: found[name] for name in ("gen/groups", "gen/replaced", "buffer/deleted")}
        assert numbers == {"gen/groups": 5, "gen/replaced": 2, "buffer/deleted": 2}
        assert (found["gen/task/gsm8k"], found["gen/task/code"]) == (5, 0)
        tasks = {task.task_name: task for task in (await one.stats()).tasks}
        assert (tasks["gsm8k"].num_inserted, tasks["gsm8k"].num_replaced) == (6, 1)
        assert (tasks["code"].num_inserted, tasks["code"].num_replaced) == (1, 1)
