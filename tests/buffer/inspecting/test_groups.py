"""Reading, counting, reprioritizing and deleting groups."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import replaydb as rdb
from replaydb import Buffer, GroupStatus, GroupTotals, Store, TaskCounters
from replaydb.database.repository import tasks
from support.groups import group, groups, long_group
from support.in_transaction import await_in_transaction
from support.invariants import check_invariants
from support.tables import table_sizes


async def test_get_keeps_the_order_asked_for(buffer: Buffer) -> None:
    ids = await buffer.put([*groups(3), long_group("text", 5), group("f", status="failed")])
    wanted = [ids[4], ids[0], ids[3], ids[0]]
    for asked in (wanted, tuple(wanted), np.array(wanted), torch.tensor(wanted), iter(wanted)):
        found = await buffer.get(asked)
        assert [one.id for one in found] == wanted
    assert found[2].episodes[0].text == "xxxxx"
    assert await buffer.get([]) == []


async def test_unknown_groups_are_named(store: Store, buffer: Buffer) -> None:
    ids = await buffer.put(groups(2))
    [elsewhere] = await (await store.buffer("code")).put(group())
    with pytest.raises(rdb.UnknownGroupError, match="99") as caught:
        await buffer.get([ids[0], 99, elsewhere, 2**63 - 1, 0])
    assert caught.value.group_ids == (99, elsewhere, 2**63 - 1, 0)
    assert isinstance(caught.value, LookupError)
    assert caught.value.batch is not None
    assert caught.value.batch.ids == ids[:1]


async def test_groups_are_read_by_their_uids(store: Store, buffer: Buffer) -> None:
    ids = await buffer.put(groups(3))
    await (await store.buffer("code")).put(group("elsewhere"))
    found = await buffer.get(uids=["gsm8k-2", "gsm8k-0", "gsm8k-2"])
    assert [one.id for one in found] == [ids[2], ids[0], ids[2]]
    assert [one.id for one in await buffer.get(uids="gsm8k-1")] == [ids[1]]
    assert await buffer.get(uids=[]) == []
    with pytest.raises(rdb.UnknownGroupError, match="elsewhere") as caught:
        await buffer.get(uids=["gsm8k-1", "elsewhere", "gsm8k-0"])
    assert caught.value.group_ids == ("elsewhere",)
    assert caught.value.batch is not None
    assert caught.value.batch.ids == [ids[1], ids[0]]


async def test_the_other_groups_are_read_if_a_payload_is_gone(store: Store) -> None:
    buffer = await store.buffer("math", archived_payload="drop", max_times_sampled=1)
    ids = await buffer.put(groups(3))
    await buffer.sample(1, rdb.Fifo())
    with pytest.raises(rdb.PayloadGoneError) as caught:
        await buffer.get(ids)
    assert caught.value.group_ids == (ids[0],)
    assert caught.value.batch is not None
    assert caught.value.batch.ids == ids[1:]


async def test_count(buffer: Buffer) -> None:
    assert await buffer.count() == 0
    await buffer.put([*groups(3), *groups(2, "code"), group(status="failed", task="code")])
    assert await buffer.count() == 6
    assert await buffer.count(tasks="code") == 3
    assert await buffer.count(tasks=["code", "unseen"], statuses=GroupStatus.FAILED) == 1
    assert await buffer.count(statuses=["completed", GroupStatus.FAILED]) == 6
    assert await buffer.count(statuses=[]) == 0
    assert await buffer.count(statuses="completed", where=rdb.col.group_uid.like("%-1")) == 2


async def test_stats(store: Store) -> None:
    buffer = await store.buffer("math", max_staleness={"code": 9})
    empty = await buffer.stats()
    assert (empty.name, empty.num_groups, empty.tasks, empty.totals) == ("math", 0, (), ())
    await buffer.put(
        [
            group(rewards=[1, 0], version=1),
            group(rewards=[1, 1, 1], version=2),
            group(rewards=[None]),
            group(status="failed", rewards=[0.5]),
            group(task="code", rewards=[None, None]),
        ]
    )
    await buffer.advance_policy(4)
    await buffer.sample(2, rdb.Fifo())
    await buffer.sample(1, tasks="code")
    stats = await buffer.stats()
    sizes = {(one.task_name, one.status): one.num_bytes for one in stats.totals}
    assert min(sizes.values()) > 0
    completed, failed = GroupStatus.COMPLETED, GroupStatus.FAILED
    code = sizes["code", completed]
    good, bad = sizes["gsm8k", completed], sizes["gsm8k", failed]
    assert stats.totals == (
        GroupTotals("code", completed, 1, 2, 10, code, None, None, None, None),
        GroupTotals("gsm8k", completed, 3, 6, 30, good, 2, 2.5, 3, 0.75),
        GroupTotals("gsm8k", failed, 1, 1, 5, bad, None, None, None, 0.5),
    )
    assert stats.tasks == (
        TaskCounters("code", 9, 1, 0, 0, 1, 0, 1, 1, 10, code, None, None),
        TaskCounters("gsm8k", None, 3, 0, 0, 4, 0, 2, 4, 35, good + bad, 2, 3),
    )
    assert await buffer.stats(totals=False) == dataclasses.replace(stats, totals=())
    assert (stats.num_groups, stats.policy_version, stats.settings) == (5, 4, buffer.settings)
    assert all(type(one.num_tokens) is int for one in stats.totals)


async def test_delete_by_any_condition(buffer: Buffer, url: str) -> None:
    ids = await buffer.put([*groups(4), *groups(3, "code"), long_group("text", 5, "chat")])
    assert await buffer.delete([ids[0], 999, ids[0]]) == 1
    assert await buffer.delete(ids, tasks="code", where=rdb.col.group_uid == "code-1") == 1
    assert await buffer.delete(tasks=["chat", "unseen"]) == 1
    await check_invariants(url)
    assert await buffer.delete(where=rdb.col.reward_std > 99) == 0
    assert await buffer.delete([]) == 0
    assert await buffer.delete(statuses="failed") == 0
    assert await buffer.delete(uids=["gsm8k-9", "text"]) == await buffer.delete(uids=[]) == 0
    await buffer.put(groups(2, "by-uid"))
    assert await buffer.delete(uids="by-uid-1", statuses="failed") == 0
    assert await buffer.delete(uids=["by-uid-1", "by-uid-0"], tasks="by-uid") == 2
    assert await buffer.count() == 5
    assert sorted((await buffer.sample(5)).ids) == [*ids[1:4], ids[4], ids[6]]
    assert await buffer.delete(statuses="completed") == 5
    assert set((await table_sizes(url)).values()) == {0}
    assert [one.num_inserted for one in (await buffer.stats()).tasks] == [2, 1, 3, 4]


async def test_a_task_made_while_groups_are_deleted_is_left_alone(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put waits until the delete has committed. (On SQLite nothing else writes meanwhile.)"""
    lock, loop = tasks.states_of, asyncio.get_running_loop()
    putting: list[asyncio.Task[Any]] = []

    async def begin_to_put() -> None:
        putting.append(asyncio.create_task(there.put(group("new", "new task"))))
        await asyncio.wait(putting, timeout=0.1)

    def lock_and_put(*arguments: Any) -> Any:
        monkeypatch.undo()
        locked = lock(*arguments)
        await_in_transaction(begin_to_put(), loop)
        return locked

    async with Store.open(postgresql_url) as first, Store.open(postgresql_url) as second:
        here, there = await first.buffer("math"), await second.buffer("math")
        await here.put(groups(2))
        monkeypatch.setattr(tasks, "states_of", lock_and_put)
        assert await here.delete(statuses="completed") == 2
        await asyncio.wait(putting)
        assert [one.group_uid for one in (await there.sample(1)).groups] == ["new"]
    await check_invariants(postgresql_url)


async def test_everything_is_not_deleted_by_accident(buffer: Buffer) -> None:
    await buffer.put(group())
    with pytest.raises(rdb.InvalidInputError):
        await buffer.delete()
    with pytest.raises(rdb.InvalidInputError):
        await buffer.delete(None, tasks=None, statuses=None, where=None)
    assert await buffer.count() == 1


async def test_ids_are_never_reused(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    first = await buffer.put(groups(3))
    await buffer.delete(first)
    async with Store.open(url) as second:
        again = await (await second.buffer("math")).put(groups(3))
    assert min(again) > max(first)
    await buffer.delete(again[1:])
    [last] = await buffer.put(group())
    assert last > again[2]


async def test_the_next_draw_uses_new_priorities(buffer: Buffer) -> None:
    ids = await buffer.put([group(priority=1.0) for _ in range(4)])
    assert await buffer.update_priorities(ids[:3], [0.0, 2.0, 7.0]) == 3
    batch = await buffer.sample(3, rdb.Prioritized())
    chances = dict(zip(batch.ids, batch.probabilities, strict=True))
    assert chances == pytest.approx({ids[1]: 0.2, ids[2]: 0.7, ids[3]: 0.1})
    assert (await buffer.sample(4, rdb.TopPriority())).ids == [ids[i] for i in (2, 1, 3, 0)]
    assert [one.priority for one in await buffer.get(ids)] == [0.0, 2.0, 7.0, 1.0]
    await buffer.update_priorities(ids, [0.0] * 4)
    nothing = await buffer.sample(4, rdb.Prioritized())
    assert nothing.probabilities.tolist() == [0.0] * 4
    await buffer.update_priorities(ids[3:], [1e-3])
    assert (await buffer.sample(1, rdb.Prioritized())).probabilities.tolist() == [1.0]


async def test_priorities_in_any_form(buffer: Buffer) -> None:
    ids = await buffer.put(groups(2))
    for i, values in enumerate(
        (
            [2, 3],
            (2.0, 3.0),
            np.array([2, 3], np.float32),
            torch.tensor([2.0, 3.0], dtype=torch.bfloat16),
            (x for x in [2.0, np.float64(3.0)]),
        )
    ):
        await buffer.update_priorities(ids, [1.0 + i, 1.0])
        assert await buffer.update_priorities(np.array(ids), values) == 2
        assert [one.priority for one in await buffer.get(ids)] == [2.0, 3.0]


async def test_priorities_of_deleted_or_archived_groups(buffer: Buffer) -> None:
    ids = await buffer.put([*groups(2), group(status="aborted"), group(task="code")])
    await buffer.delete(ids[:1])
    wanted = [999, *ids, ids[1]]
    assert await buffer.update_priorities(wanted, [9.0, 9.0, 2.0, 3.0, 4.0, 5.0]) == 3
    assert [one.priority for one in await buffer.get(ids[1:])] == [5.0, 3.0, 4.0]
    assert await buffer.update_priorities([], []) == 0


async def test_a_priority_without_weight_changes_nothing(store: Store) -> None:
    buffer = await store.buffer("math", priority_exponent=2.0)
    ids = await buffer.put(groups(2))
    with pytest.raises(rdb.InvalidInputError):
        await buffer.update_priorities(ids, [3.0, 1e200])
    assert [one.priority for one in await buffer.get(ids)] == [1.0, 1.0]


@pytest.mark.parametrize("large", [1e16, 1e100])
async def test_totals_stay_right_over_many_changes(buffer: Buffer, url: str, large: float) -> None:
    """When a large weight leaves the sum, rounding has lost the digits of the small ones."""
    ids = await buffer.put(groups(6))
    small = [0.1 * one for one in range(6)]
    for i in range(6):
        await buffer.update_priorities(ids, small[i:] + small[:i])
        await buffer.update_priorities(ids[i : i + 1], [large])
        await buffer.update_priorities(ids[i : i + 1], [0.7])
        await check_invariants(url)
    [guest] = await buffer.put(group(priority=large))
    await buffer.delete([guest])
    await check_invariants(url)
    async with buffer.lease(1, rdb.TopPriority(), ttl=60) as lease:
        await buffer.put(group("guest", priority=large))
        await lease.nack()
    async with buffer.lease(1, rdb.TopPriority(), ttl=60) as lease:
        assert lease.batch.groups[0].group_uid == "guest"
    await check_invariants(url)


async def test_concurrent_changes(store: Store, url: str) -> None:
    """The counters agree with the groups in any order of the calls (see `store`)."""
    buffer = await store.buffer("math", max_staleness=6)
    async with Store.open(url) as second:
        there = await second.buffer("math")
        for i in range(6):
            outcomes = await asyncio.gather(
                buffer.put([*groups(2, f"{i}"), group(f"r{i}", version=i)]),
                there.put([group(f"{i}-a", f"{i}"), group(f"r{i - 1}", f"{i}", version=i)],
                          on_duplicate="replace"),
                there.update_priorities(range(1, 30), [0.5 * i] * 29),
                buffer.delete(where=rdb.col.id % 5 == i),
                there.delete(tasks=f"{i - 1}"),
                there.advance_policy(i + 4),
                there.sample(3, rdb.Prioritized(), at_least=1),
                buffer.sample(3, rdb.Uniform(), at_least=1),
                buffer.update_settings(priority_exponent=1.0 + i % 2),
                return_exceptions=True,
            )  # fmt: skip
            errors = [one for one in outcomes if isinstance(one, BaseException)]
            assert all(isinstance(one, rdb.NotEnoughGroupsError) for one in errors), errors
            await check_invariants(url)
