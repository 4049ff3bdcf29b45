"""Metadata of groups, without a draw and without their payloads."""

from __future__ import annotations

import math
from datetime import datetime
from itertools import product
from typing import Any

import pytest
from sqlalchemy import literal_column, update

import replaydb as rdb
from replaydb import Buffer, EpisodeGroup, EpisodeInfo, GroupInfo, GroupStatus, Store
from replaydb.database.filters.group_columns import COLUMNS
from replaydb.database.repository import listing, tags
from replaydb.database.tables.schema import episode_group
from support.connections import transaction
from support.groups import conversation, episode, group, groups, long_group
from support.invariants import group_row
from support.watching import recorded
from support.work_counter import counted_work

SORTABLE = [
    name
    for name, column in COLUMNS.items()
    if name != "tags" and column.type.python_type not in (str, bool)
]


@pytest.fixture
async def full(store: Store) -> Buffer:
    """A buffer with two tasks, six statuses, and ties and unknown values in most columns."""
    buffer = await store.buffer("full", max_staleness={"code": 3})
    for i in range(4):
        await buffer.put(
            [
                group(f"a{i}", priority=float(i % 2), version=i),
                group(f"b{i}", "code", rewards=[0.5 * i, None], version=None if i % 2 else i),
                group(f"c{i}", status=("aborted", "failed", "filtered", "completed")[i]),
            ]
        )
    await buffer.open_group("code", "open", 3, min_episodes=2, deadline=600, prompt_uid="p")
    await buffer.add_episode("open", episode())
    await buffer.advance_policy(4)
    await buffer.sample(3, rdb.Lifo(), tasks="gsm8k")
    lease = await buffer.lease(3, ttl=600, tasks="gsm8k")
    await lease.ack(lease.batch.ids[:1])
    return buffer


async def test_everything_about_a_group(store: Store, buffer: Buffer, url: str) -> None:
    [first, _] = await buffer.put([long_group("g", 5, prompt_uid="p", tags={"a": [1]}), group()])
    await buffer.advance_policy(2)
    lease = await buffer.lease(1, ttl=60)
    [found] = await buffer.find(uids="g")
    row = await group_row(url, first)
    names = {"group_status": "status"}
    shown = {names.get(name, name): row[name] for name in [*COLUMNS, "leased_from"]}
    assert {name: getattr(found, name) for name in shown} == shown
    assert (found.status, found.leased_from) == (GroupStatus.LEASED, GroupStatus.COMPLETED)
    assert (found.run_name, found.lease_id, found.tags) == ("test", lease.id, {"a": [1]})
    assert found.created_at.tzinfo is not None
    assert set(GroupInfo.__slots__) == {*shown, "run_name"}  # all columns for filters


async def test_pages_in_any_order(full: Buffer) -> None:
    everything = await full.find()
    assert [one.id for one in everything] == list(range(everything[0].id, everything[0].id + 13))
    for name in SORTABLE:
        for descending in (False, True):
            await in_order(full, everything, name, descending)


async def in_order(buffer: Buffer, everything: list[GroupInfo], name: str, down: bool) -> None:
    column = getattr(rdb.col, name)
    order = column.desc() if down else column.asc()

    def value(one: GroupInfo) -> Any:
        return getattr(one, name)

    by_id = everything[::-1] if down else everything
    known = [one for one in by_id if value(one) is not None]
    known.sort(key=value, reverse=down)  # Python keeps the order of equal items, also in reverse
    expected = known + [one for one in by_id if value(one) is None]

    def start_of(one: GroupInfo) -> GroupInfo | tuple[Any, int]:
        return (value(one), one.id) if down else one  # the same groups

    for statuses in (None, list(GroupStatus)):  # by one scan, and by task and status
        found: list[GroupInfo] = []
        while page := await buffer.find(
            order_by=order,
            limit=5,
            after=start_of(found[-1]) if found else None,
            statuses=statuses,
        ):
            assert len(page) == min(5, 13 - len(found))
            found += page
        assert found == expected, name
    assert await buffer.find([one.id for one in everything], order_by=order) == expected


async def test_pages_by_id_beyond_the_groups_that_are_read_first(
    store: Store, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other buffers, of other statuses, or that do not meet a filter."""
    monkeypatch.setattr(listing, "WINDOW", 4)
    other = await store.buffer("other")
    for i in range(6):
        status = "failed" if i == 4 else "completed"
        await buffer.put([group(f"{i}-{j}", f"task-{i}", status=status) for j in range(3)])
        await other.put([group() for _ in range(i)])
    every = await buffer.find()
    for statuses, where, down in product(
        (None, ["failed"]), (None, rdb.col.group_uid.like("%-1")), (False, True)
    ):
        expected = [
            one
            for one in every
            if (statuses is None or one.status in statuses)
            and (where is None or one.group_uid.endswith("-1"))
        ]
        assert len(expected) == (18 if statuses is None else 3) / (1 if where is None else 3)
        found: list[GroupInfo] = []
        while page := await buffer.find(
            statuses=statuses,
            where=where,
            order_by=rdb.col.id.desc() if down else rdb.col.id,
            limit=2,
            after=found[-1] if found else None,
        ):
            found += page
        assert found == expected[:: -1 if down else 1]


async def test_a_page_costs_the_same_however_many_tasks_there_are(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "WINDOW", 200)
    costs = []
    for number in (3, 300):
        async with Store.open(url) as store:
            buffer = await store.buffer("math")
            await buffer.put([group(task=f"task-{i % number}") for i in range(600)])
            with counted_work(store) as work:
                page = await buffer.find(limit=50)
                await buffer.find(limit=50, after=page[-1], order_by=rdb.col.id)
                await buffer.find(limit=50, order_by=rdb.col.id.desc(), statuses="completed")
        costs.append(work)
    few, many = costs
    assert (few.statements, few.parameters) == (many.statements, many.parameters)
    assert few.steps <= many.steps <= 1.5 * few.steps


async def test_filters_of_find(full: Buffer, store: Store, other: Store) -> None:
    async def uids(**which: Any) -> list[str]:
        return [one.group_uid for one in await full.find(**which)]

    assert await uids(tasks="code", statuses=["completed", "expired"]) == ["b0", "b1", "b2", "b3"]
    assert await uids(statuses=GroupStatus.EXPIRED) == ["b0"]
    assert await uids(tasks=["unseen"]) == await uids(statuses=[]) == await uids(uids=[]) == []
    assert await uids(where=rdb.col.reward_max == 1.5) == ["b3"]
    assert await uids(uids=["c1", "nobody", "a1"], tasks="gsm8k") == ["a1", "c1"]
    assert await uids(uids=["c1", "a1"], statuses="failed", limit=5) == ["c1"]
    assert await uids(limit=0) == []
    theirs = await other.buffer("full")
    await theirs.put(group("new"))
    assert await uids(runs="other") == ["new"]
    assert await uids(runs=["test", "other"], limit=2, order_by=rdb.col.id.desc()) == [
        "new",
        "open",
    ]
    assert await (await store.buffer("empty")).find() == []


@pytest.mark.parametrize("few", [1000, 1], ids=["by their index", "by going through all"])
async def test_groups_of_a_prompt(
    store: Store, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """Also if there are too many of them, or another condition."""
    monkeypatch.setattr(listing, "MAX_LOOKUPS_IN_ORDER", few)
    monkeypatch.setattr(tags, "MAX_LOOKUPS", few)
    uids = "p", "q", None, "p", "p"
    ids = await buffer.put([group(prompt_uid=uid, priority=i) for i, uid in enumerate(uids)])
    await (await store.buffer("other")).put(group(prompt_uid="p"))
    mine = rdb.col.prompt_uid == "p"

    async def found(where: Any) -> list[int]:
        page = await buffer.find(where=where, order_by=rdb.col.id.desc(), limit=3)
        return [one.id for one in page]

    assert await found(mine) == [ids[4], ids[3], ids[0]]
    assert await found((rdb.col.priority < 4) & mine) == [ids[3], ids[0]]
    assert await found(mine | (rdb.col.priority == 1)) == [ids[4], ids[3], ids[1]]
    assert await found(mine & (rdb.col.prompt_uid == "q")) == []
    assert await found(rdb.col.prompt_uid == "nobody") == []
    assert await buffer.count(where=mine) == 3
    assert [one.num_groups for one in await buffer.prompts(where=mine)] == [3]


async def test_episodes_without_their_tokens(store: Store, buffer: Buffer, other: Store) -> None:
    [one, gone] = await buffer.put(
        [
            EpisodeGroup("t", [conversation(), episode(None, 3, advantage=-0.5)]),
            group(status="archived"),
        ]
    )
    first, second = await buffer.episodes(one)
    assert (first.reward, first.num_tokens, first.longest_row) == (0.75, 6, 3)
    assert (first.num_loss_tokens, first.num_turns) == (2, 2)
    assert (first.min_policy_version, first.max_policy_version) == (3, 5)
    assert second == EpisodeInfo(one, 1, None, -0.5, 5, 3, 1, 3, 3, None, 5)
    assert await buffer.episodes(one, position=1) == [second]
    assert await buffer.episodes(one, limit=1) == [first]
    assert len(await buffer.episodes(gone)) == 2
    assert await buffer.texts([gone, one, 999]) == {one: {0: "two turns"}}
    assert await (await other.buffer("another")).texts([one]) == {}
    assert await (await other.buffer("another")).episodes(one) == []


async def test_a_page_continues_after_a_group_as_it_was_read(buffer: Buffer) -> None:
    ids = await buffer.put([group(priority=float(i)) for i in range(6)])
    first = await buffer.find(order_by=rdb.col.priority, limit=2)
    await buffer.update_priorities(ids[1:2], [9.0])
    await buffer.delete(ids[:1])
    rest = await buffer.find(order_by=rdb.col.priority, after=first[-1])
    assert [one.id for one in rest] == [*ids[2:], ids[1]]


async def test_no_payload_is_read(full: Buffer, store: Store) -> None:
    with recorded(store, writes=False) as read:
        await full.find()
        await full.find(uids=["a1"])
    assert read
    assert not [sql for sql in read if "payload" in sql or "transcript." in sql]


async def test_a_damaged_row_is_named(sqlite_url: str) -> None:
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math")
        ids = await buffer.put(groups(3))
        async with transaction(sqlite_url) as connection:
            spoilt: Any = {"tags": literal_column("'{'")}
            here = episode_group.c.id == ids[1]
            await connection.execute(update(episode_group).where(here).values(spoilt))
        with pytest.raises(rdb.CorruptPayloadError, match="tags") as caught:
            await buffer.find()
        assert caught.value.group_ids == (ids[1],)
        sound = await buffer.find(where=rdb.col.id != ids[1])
        assert [one.id for one in sound] == [ids[0], ids[2]]


async def test_pages_begin_at_what_a_column_can_hold(buffer: Buffer) -> None:
    [id_] = await buffer.put(group())
    cases: list[tuple[Any, Any]] = [
        (rdb.col.id, (id_,)),
        (rdb.col.id, [id_, id_]),
        (rdb.col.id, (None, id_)),
        (rdb.col.id, (1.5, id_)),
        (rdb.col.num_tokens, (2**63, id_)),
        (rdb.col.priority, ("high", id_)),
        (rdb.col.priority, (math.nan, id_)),
        (rdb.col.reward_mean, (0.5, "1")),
        (rdb.col.created_at, (1e9, id_)),
        (rdb.col.created_at, (datetime(2026, 1, 1), id_)),
    ]
    for column, wrong in cases:
        with pytest.raises(rdb.InvalidInputError, match="after"):
            await buffer.find(order_by=column, after=wrong)
    assert await buffer.find(order_by=rdb.col.reward_mean, after=(None, id_ - 1)) == []


async def test_ids_and_uids_exclude_each_other(buffer: Buffer) -> None:
    await buffer.put(group("g"))
    [found] = await buffer.find()
    for call in (buffer.find, buffer.get):
        with pytest.raises(rdb.InvalidInputError, match="uids"):
            await call([found.id], uids=["g"])
    with pytest.raises(rdb.InvalidInputError, match="after"):
        await buffer.find([found.id], after=found)
    with pytest.raises(rdb.InvalidInputError, match="ids or uids"):
        await buffer.get()
