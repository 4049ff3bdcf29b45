"""Recorded draws, cursors, prompts, runs, and copies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import select

import replaydb as rdb
from replaydb import Buffer, Capacity, Store
from replaydb.database.runtime.transactions import end_in
from replaydb.database.tables.schema import cursor, draw, draw_group
from replaydb.database.tables.views import training_history
from support.clock import Clock
from support.connections import transaction
from support.engines import postgresql_nightly
from support.groups import conversation, episode, group, groups, long_group
from support.invariants import group_rows, number_of, statuses


async def test_draws_are_on_record(buffer: Buffer, other: Store) -> None:
    await buffer.put(groups(6, version=0))
    await buffer.advance_policy(2)
    first = await buffer.sample(3, rdb.Prioritized(beta=0.5), step=10)
    theirs = await (await other.buffer("math")).sample(2, rdb.Lifo(), step=10)
    lease = await buffer.lease({"gsm8k": 2}, rdb.Fifo(), ttl=60, step=11)
    third, second, one = await buffer.draws()
    assert [info.id for info in (one, second, third)] == [
        batch.draw_id for batch in (first, theirs, lease.batch)
    ]
    assert one.group_ids == tuple(first.ids)
    assert one.probabilities == tuple(first.probabilities.tolist())
    assert one.weights == tuple(first.weights.tolist())
    assert one.staleness == (2, 2, 2) == tuple(first.staleness)
    assert (one.run_name, one.step, one.policy) == ("test", 10, "Prioritized(beta=0.5)")
    assert (second.run_name, second.group_ids) == ("other", (6, 5))
    assert third.group_ids == (1, 2)

    async def ids(**which: object) -> list[int]:
        return [info.id for info in await buffer.draws(**which)]  # type: ignore[arg-type]

    assert await ids(step=10) == [second.id, one.id]
    assert await ids(step=10, runs="test") == [one.id]
    assert await ids(runs=["other", "nobody"]) == [second.id]
    assert second.id in await ids(group_id=6)
    assert await ids(group_id=6, runs="other") == [second.id]
    assert await ids(limit=2) == [third.id, second.id]
    assert await ids(limit=2, before=second.id) == [one.id]
    assert await ids(before=one.id) == []
    await buffer.sample(1)
    assert await buffer.steps() == [10, 11]
    assert await buffer.steps(above=10) == [11] == await buffer.steps(below=12, limit=1)
    assert await buffer.steps(above=11) == [] == await buffer.steps(below=10)
    assert await buffer.steps(runs="other") == [10] == await buffer.steps(runs="test", below=11)
    assert await buffer.steps(runs="other", above=10) == [] == await buffer.steps(runs="nobody")
    await lease.nack()


async def test_redrawing(store: Store, url: str) -> None:
    buffer = await store.buffer("math", seed=1, max_times_sampled=2, archived_payload="drop")
    await buffer.put(groups(5, version=0))
    batch = await buffer.sample(4, rdb.Prioritized())
    before = [dict(row) for row in await group_rows(url)]
    await buffer.advance_policy(3)
    assert batch.draw_id is not None
    again = await buffer.redraw(batch.draw_id)
    assert again.ids == batch.ids
    assert again.probabilities.tolist() == batch.probabilities.tolist()
    assert again.weights.tolist() == batch.weights.tolist()
    assert again.staleness == batch.staleness == [0] * 4
    assert [list(one.episodes) for one in again.groups] == [list(g.episodes) for g in batch.groups]
    after = await group_rows(url)
    assert [row["times_sampled"] for row in after] == [row["times_sampled"] for row in before]
    assert len(await buffer.draws()) == 1

    async with buffer.lease(1, rdb.Fifo(), ttl=60, where=rdb.col.id == batch.ids[2]):
        pass
    with pytest.raises(rdb.PayloadGoneError) as caught:
        await buffer.redraw(batch.draw_id)
    assert caught.value.group_ids == (batch.ids[2],)
    await buffer.delete([batch.ids[0]])
    with pytest.raises(rdb.PayloadGoneError) as caught:
        await buffer.redraw(batch.draw_id)
    assert caught.value.group_ids == (batch.ids[0], batch.ids[2])
    assert (await buffer.draws(limit=1000))[-1].group_ids == tuple(batch.ids)
    with pytest.raises(rdb.UnknownDrawError):
        await buffer.redraw(10**6)
    with pytest.raises(rdb.UnknownDrawError):
        await (await store.buffer("other")).redraw(batch.draw_id)


async def test_redrawing_some_groups(buffer: Buffer, url: str) -> None:
    await buffer.put(groups(5))
    batch = await buffer.sample(4, rdb.Lifo())
    assert batch.draw_id is not None
    some = await buffer.redraw(batch.draw_id, [2, 4])
    assert (some.ids, some.draw_id) == ([4, 2], batch.draw_id)  # the order of the draw
    assert some.weights.tolist() == [1.0, 1.0]
    assert len(await buffer.redraw(batch.draw_id, [])) == 0
    with pytest.raises(
        rdb.InvalidInputError, match=r"ids: expected groups of draw 1, got \[1, 9\]"
    ):
        await buffer.redraw(batch.draw_id, [9, 2, 1])
    await buffer.delete([3, 5])
    assert (await buffer.redraw(batch.draw_id, [2, 4])).ids == [4, 2]
    with pytest.raises(rdb.PayloadGoneError) as caught:
        await buffer.redraw(batch.draw_id, [2, 3])
    assert caught.value.group_ids == (3,)
    assert caught.value.batch is not None
    assert caught.value.batch.ids == [2]


async def test_replaced_groups_are_not_redrawn(buffer: Buffer, url: str) -> None:
    await buffer.put(groups(4, rewards=[0.0]))
    first = await buffer.sample(4, rdb.Fifo())
    await buffer.put(group("gsm8k-1", rewards=[1.0]), on_duplicate="replace")
    await buffer.delete([3])
    second = await buffer.sample(2, rdb.Fifo())
    assert first.draw_id is not None
    assert second.draw_id is not None
    with pytest.raises(rdb.PayloadGoneError, match="2 were replaced since") as caught:
        await buffer.redraw(first.draw_id)
    assert (caught.value.group_ids, caught.value.replaced) == ((2, 3), (2,))
    others = caught.value.batch
    assert others is not None
    assert (others.ids, others.draw_id) == ([1, 4], first.draw_id)
    assert others.rewards.tolist() == [0.0, 0.0]
    assert (await buffer.redraw(second.draw_id)).rewards.tolist() == [0.0, 1.0]
    history = training_history.table.c
    shown = select(history.reward_mean).order_by(history.draw_id, history.position)
    async with transaction(url) as connection:
        assert (await connection.scalars(shown)).all() == [0.0, 0.0, None, 0.0, 0.0, 1.0]
    await buffer.put(group("gsm8k-1", rewards=[1.0]), on_duplicate="replace")
    with pytest.raises(rdb.PayloadGoneError):  # even if the tokens are the same again
        await buffer.redraw(second.draw_id)


async def test_without_a_record(store: Store, url: str) -> None:
    buffer = await store.buffer("math", record_draws=False)
    await buffer.put(groups(3))
    assert (await buffer.sample(2)).draw_id is None
    async with buffer.lease(1, ttl=60) as lease:
        assert lease.batch.draw_id is None
    assert await number_of(url, draw) == await number_of(url, draw_group) == 0


async def test_a_failed_draw_is_not_on_record(buffer: Buffer, url: str) -> None:
    await buffer.put(groups(1))
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(2)
    assert await number_of(url, draw) == 0


async def test_cursors(store: Store, other: Store, buffer: Buffer, url: str) -> None:
    assert await buffer.cursor("dataset") is None
    state = {"epoch": 1, "row": [3, 4.5, None, "é"], "done": False}
    await buffer.put(groups(1), cursor={"dataset": state, "seed": 0})
    theirs = await other.buffer("math")
    assert await theirs.cursor("dataset") == state
    assert await theirs.cursor("seed") == 0
    assert await (await store.buffer("other")).cursor("dataset") is None
    with pytest.raises(rdb.DuplicateGroupError):
        await buffer.put([group("new"), *groups(1)], cursor={"dataset": 2})
    assert await buffer.cursor("dataset") == state
    await theirs.put([], cursor={"dataset": 2})
    assert await buffer.cursor("dataset") == 2
    lease = await buffer.lease(1, ttl=60)
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.ack([99], cursor={"step": 1})
    assert await buffer.cursor("step") is None
    await lease.ack(cursor={"step": 1, "dataset": [3]})
    assert (await buffer.cursor("step"), await buffer.cursor("dataset")) == (1, [3])
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.ack(cursor={"step": 2})
    assert await buffer.cursor("step") == 1
    assert await number_of(url, cursor) == 3


async def test_only_successful_puts_of_a_transaction_move_cursors(
    store: Store,
) -> None:
    for name, capacity in (("free", None), ("limited", Capacity(groups=50))):
        buffer = await store.buffer(name, capacity=capacity)
        await buffer.put(groups(1))
        outcomes = await asyncio.gather(
            buffer.put(group("a"), cursor={"x": 1, "y": 1}),
            buffer.put(groups(1), cursor={"x": 2, "z": 2}),
            buffer.put(group("b"), cursor={"y": 3}),
            buffer.put(groups(1), cursor={"y": 4}),
            return_exceptions=True,
        )
        assert [type(one) for one in outcomes] == [
            list,
            rdb.DuplicateGroupError,
            list,
            rdb.DuplicateGroupError,
        ]
        assert [await buffer.cursor(one) for one in "xyz"] == [1, 3, None]


async def test_prompts(store: Store) -> None:
    buffer = await store.buffer("math", max_staleness=1, max_attempts=1)
    await buffer.put(
        [
            group("a", prompt_uid="p1", rewards=[1.0, 0.0], version=0),
            group("b", prompt_uid="p1", rewards=[1.0, 1.0], version=2),
            group("c", prompt_uid="p1", rewards=[0.5], status="filtered"),
            group("d", "code", prompt_uid="p1", version=2),
            group("e", prompt_uid="p2", rewards=[None, None], version=2),
            group("f"),
        ]
    )
    await buffer.advance_policy(2)
    await buffer.sample(1, where=rdb.col.group_uid == "b")
    await buffer.sample(1, where=rdb.col.group_uid == "b")
    lease = await buffer.lease(1, ttl=60, where=rdb.col.group_uid == "e")
    await lease.nack()
    code, one, two = await buffer.prompts()
    assert (code.task_name, code.prompt_uid, code.num_groups) == ("code", "p1", 1)
    assert (one.task_name, one.num_groups, one.num_episodes) == ("gsm8k", 3, 5)
    assert (one.times_sampled, one.num_groups_sampled) == (2, 1)
    assert (one.num_expired, one.num_filtered, one.num_failed) == (1, 1, 0)
    assert one.reward_mean == pytest.approx((0.5 + 1.0 + 0.5) / 3)
    assert (one.reward_min, one.reward_max) == (0.0, 1.0)
    assert (two.prompt_uid, two.num_failed, two.times_sampled) == ("p2", 1, 0)
    assert (two.reward_mean, two.reward_min) == (None, None)
    assert one.last_put_at.tzinfo is not None
    assert [info.prompt_uid for info in await buffer.prompts(tasks="gsm8k")] == ["p1", "p2"]
    hard = await buffer.prompts(where=rdb.col.reward_mean < 0.9)
    assert [(info.task_name, info.num_groups) for info in hard] == [("code", 1), ("gsm8k", 2)]


async def test_groups_of_some_runs(store: Store, other: Store, buffer: Buffer) -> None:
    await buffer.put(groups(3))
    await (await other.buffer("math")).put(groups(2, "code"))
    assert set((await buffer.sample(3, runs="test")).ids) == {1, 2, 3}
    assert set((await buffer.sample(2, runs=["other", "nobody"])).ids) == {4, 5}
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(1, runs="nobody")
    async with buffer.lease(5, ttl=60, runs=["test", "other"]) as lease:
        assert len(lease.batch) == 5


@postgresql_nightly
async def test_versions_compare_within_a_lineage(store: Store, url: str) -> None:
    buffer = await store.buffer("math", max_staleness=1)
    async with (
        Store.open(url, run="stranger") as strange,
        Store.open(url, run="fork", lineage="test") as fork,
        Store.open(url) as nameless,
    ):
        stores = [store, strange, fork, nameless]
        await store._current_run(end_in(60))
        buffers = [await one.buffer("math") for one in stores]
        for one, uid in zip(buffers, ("own", "strange", "fork", "nameless"), strict=True):
            await one.put(group(uid, version=0))
        # Until the buffer is advanced, it accepts any lineage.
        assert [row["staleness"] for row in await group_rows(url)] == [0, 0, 0, 0]
        assert await buffer.advance_policy(1) == 0
        assert [row["staleness"] for row in await group_rows(url)] == [1, None, 1, 1]
        assert [row["comparable_version"] for row in await group_rows(url)] == [0, None, 0, 0]
        await buffers[1].put(group("strange-2", version=0))
        await buffers[1].open_group("gsm8k", "strange-3", 1)
        await buffers[1].add_episode("strange-3", episode(1.0, 0))
        assert await buffers[2].advance_policy(2) == 3
        found = await statuses(url)
        assert {uid for uid, status in found.items() if status == "completed"} == {
            "strange",
            "strange-2",
            "strange-3",
        }
        with pytest.raises(rdb.NotEnoughGroupsError):
            await buffer.sample(1, max_staleness=100)
        with pytest.raises(rdb.InvalidInputError):
            await buffers[1].advance_policy(9)
        assert await buffers[1].advance_policy(1, take_over=True) == 0
        live = {row["group_uid"]: row["staleness"] for row in await group_rows(url)}
        assert {live["strange"], live["strange-2"], live["strange-3"]} == {1}
        # Versions that are not comparable are still stored.
        assert {row["min_policy_version"] for row in await group_rows(url)} == {0}
        for run in ("test", "stranger", "fork"):
            mine = rdb.col.min_policy_version == 0
            lease = await buffer.lease(
                1, ttl=60, where=mine, runs=run, statuses=["completed", "expired"]
            )
            await lease.nack()
        with pytest.raises(rdb.InvalidInputError):
            await buffer.advance_policy(9)
        await buffer.put(group("own-2", version=0))
        assert (await group_rows(url))[-1]["staleness"] is None
        await nameless.buffer("math")
        assert await buffers[3].advance_policy(2) == 3


@postgresql_nightly
async def test_copying(store: Store, url: str, tmp_path: Path) -> None:
    buffer = await store.buffer("math")
    talk = rdb.EpisodeGroup("code", [conversation(), episode(0.5, 2)], group_uid="talk")
    ids = await buffer.put([*groups(70, version=1), talk, long_group("long", 90)])
    await buffer.put([group("half", status="aborted"), group("bad", status="failed")])
    await buffer.open_group("gsm8k", "open", 2)
    lease = await buffer.lease(1, ttl=60)
    await buffer.sample(5)
    target = f"sqlite:///{tmp_path / 'copy.db'}"
    seen: list[tuple[int, int]] = []
    async with Store.open(target, run="copy") as elsewhere:
        there = await elsewhere.buffer("archive")
        assert await buffer.copy_to(there, progress=lambda *at: seen.append(at)) == 73
        assert seen[-1] == (73, 73)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert len(seen) > 1
        assert await there.count() == 73
        originals = {one.group_uid: one for one in await buffer.get(ids[1:])}
        for copied in await there.get(range(1, 72)):
            assert copied == originals[copied.group_uid]
            assert copied.times_sampled == 0
        assert [one.text for one in originals["talk"].episodes] == ["two turns", None]
        # Again: existing groups are skipped, new ones are copied.
        await lease.nack()
        assert await buffer.copy_to(there) == 74
        assert await there.count() == 74
        back = await store.buffer("back")
        assert await there.copy_to(back, tasks="code", statuses="completed") == 1
        assert await there.copy_to(back, where=rdb.col.group_uid == "long") == 1
        assert await back.count() == 2
    with pytest.raises(rdb.InvalidInputError):
        await buffer.copy_to(buffer)


@postgresql_nightly
async def test_the_staleness_of_copies_depends_on_their_lineage(
    url: str, store: Store, tmp_path: Path
) -> None:
    buffer = await store.buffer("math", max_staleness=50)
    async with Store.open(url, run="forked", lineage="else") as other:
        await (await other.buffer("math")).put(group("forked", version=200))
    async with Store.open(url) as unnamed:
        await (await unnamed.buffer("math")).put(group("unnamed", version=226))
    await buffer.put([group("old", version=225), group("unknown")])
    await buffer.advance_policy(227)
    target = f"sqlite:///{tmp_path / 'copy.db'}"

    async def staleness(there: Buffer) -> dict[str, int | None]:
        assert await buffer.copy_to(there) == 4
        return {one.group_uid: one.staleness for one in await there.find()}

    unknown = dict.fromkeys(("forked", "unnamed", "old", "unknown"))
    async with Store.open(target, run="next") as elsewhere:
        # A buffer of a new run, whose versions are not comparable.
        there = await elsewhere.buffer("math", max_staleness=4)
        assert await staleness(there) == unknown
        await there.advance_policy(3)
        assert await staleness(there) == unknown
    async with Store.open(target, run="evaluated", lineage="test") as elsewhere:
        # A buffer of a run that continues the source's lineage: comparable at once or later.
        for order in ("advanced", "copied"):
            there = await elsewhere.buffer(order)
            if order == "copied":
                assert await staleness(there) == unknown
            await there.advance_policy(228)
            found = await staleness(there)
            assert found == {"forked": None, "unnamed": 2, "old": 3, "unknown": None}
        runs = {run.name: run.lineage for run in await elsewhere.runs()}
        assert runs["test"] == "test"
        assert runs["forked"] == "else"


async def test_an_interrupted_copy_resumes(store: Store) -> None:
    buffer = await store.buffer("math")
    await buffer.put(groups(80))
    there = await store.buffer("copy")

    def stop(done: int, _: int) -> None:
        raise InterruptedError(done)

    with pytest.raises(InterruptedError):
        await buffer.copy_to(there, progress=stop)
    assert 0 < await there.count() < 80
    assert await buffer.copy_to(there) == 80
    assert await there.count() == 80


async def test_copying_what_a_deadline_completed(store: Store, clock: Clock) -> None:
    buffer, there = await store.buffer("math"), await store.buffer("copy")
    await buffer.open_group("gsm8k", "g", 3, deadline=10, min_episodes=1)
    await buffer.add_episode("g", episode(1.0, text="x"), position=2)
    clock.jump(11)
    await buffer.put(group())
    assert await buffer.copy_to(there) == 2
    copied = next(one for one in (await there.sample(2)).groups if one.group_uid == "g")
    assert [one.text for one in copied.episodes] == ["x"]
    assert copied.expected_episodes == 3
