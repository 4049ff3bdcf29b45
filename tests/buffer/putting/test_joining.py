"""Episodes that were added one by one are joined when their group is complete."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from sqlalchemy import select

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.database.payloads import Payloads
from replaydb.database.tables.schema import payload
from replaydb.errors import DatabaseUnavailableError
from replaydb.operations import rewrite_payloads, verify
from support import child_processes
from support.agents import long_prompt
from support.connections import transaction
from support.groups import group
from support.invariants import check_invariants
from support.workers import Worker, workers

#: It is killed at each of this many statements; nightly at all.
STEP = 5
OTHERS = [pytest.param(first, marks=pytest.mark.nightly) for first in range(1, STEP)]


async def num_parts(url: str, group_id: int) -> int:
    """Number of parts of a payload that have episodes."""
    mine = (payload.c.group_id == group_id) & (payload.c.part >= 0)
    async with transaction(url) as connection:
        return len((await connection.execute(select(payload.c.part).where(mine))).all())


async def complete(buffer: Buffer, uid: str, number: int, length: int) -> int:
    """Add the episodes of a group, half of them turn by turn."""
    group_id = await buffer.open_group("agents", uid, number, prompt="Find it.")
    for i in range(number):
        episode = long_prompt(i, length)
        if i % 2:
            await buffer.add_episode(uid, episode, position=i)
            continue
        first = rdb.Turn(uid=f"{uid}-{i}-0", prompt_ids=episode.prompt_ids, response_ids=[7])
        await buffer.append_turn(uid, i, first)
        second = rdb.Turn(uid=f"{uid}-{i}-1", prompt_ids=[8], response_ids=[9])
        await buffer.append_turn(uid, i, second, parent_uid=first.uid)
        await buffer.finish_episode(uid, i, reward=float(i))
    return group_id


@pytest.mark.parametrize("layout", ["inside", "outside"])
async def test_a_prompt_is_stored_once(store: Store, url: str, layout: str) -> None:
    buffer = await store.buffer("math")
    group_id = await complete(buffer, "g", 4, 4096)
    before = (await buffer.get(uids="g"))[0]
    await buffer.drain()
    [after] = await buffer.get(uids="g")
    assert after == before
    assert await num_parts(url, group_id) == 1
    [whole] = await buffer.put(rdb.EpisodeGroup("agents", after.episodes, prompt="Find it."))
    sizes = [one.num_bytes for one in await buffer.find([group_id, whole])]
    assert sizes[0] < 1.3 * sizes[1]
    await check_invariants(url)
    assert (await verify(store)).problems == ()


async def test_small_prompts_stay_apart(buffer: Buffer, url: str) -> None:
    """So do those of groups that are not complete."""
    for number, length, uid in ((4, 100, "short"), (2, 4000, "few")):
        group_id = await complete(buffer, uid, number, length)
        await buffer.drain()
        assert await num_parts(url, group_id) == number
    group_id = await buffer.open_group("agents", "open", 3)
    for i in range(2):
        await buffer.add_episode("open", long_prompt(i))
    await buffer.drain()
    assert await num_parts(url, group_id) == 2
    assert (await buffer.get(uids="open"))[0].num_episodes == 2


async def test_a_group_that_is_replaced_meanwhile(
    buffer: Buffer, other: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new content stays."""
    elsewhere = await other.buffer("math")
    read, put = Payloads.read, elsewhere.put

    async def replaced(self: Payloads, *arguments: Any) -> Any:
        found = await read(self, *arguments)
        monkeypatch.setattr(Payloads, "read", read)
        await put(group("g"), on_duplicate="replace")
        return found

    await buffer.open_group("agents", "g", 2)
    await buffer.add_episode("g", long_prompt(0, 8192))
    monkeypatch.setattr(Payloads, "read", replaced)
    await buffer.add_episode("g", long_prompt(1, 8192))
    await buffer.drain()
    assert Payloads.read is read
    assert (await buffer.get(uids="g"))[0].episodes == group("g").episodes
    await check_invariants(url)


async def test_a_group_that_is_annotated_meanwhile(
    buffer: Buffer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is joined all the same, with the new value."""
    read = Payloads.read

    async def annotated(self: Payloads, *arguments: Any) -> Any:
        found = await read(self, *arguments)
        monkeypatch.setattr(Payloads, "read", read)
        await buffer.annotate(rdb.Annotation("g", 0, reward=9.0))
        return found

    group_id = await buffer.open_group("agents", "g", 2)
    await buffer.add_episode("g", long_prompt(0, 8192))
    monkeypatch.setattr(Payloads, "read", annotated)
    await buffer.add_episode("g", long_prompt(1, 8192))
    await buffer.drain()
    assert await num_parts(url, group_id) == 1
    assert (await buffer.get(uids="g"))[0].rewards.tolist() == [9.0, 1.0]
    await check_invariants(url)


async def test_a_failure_is_logged(
    buffer: Buffer,
    store: Store,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The group is there, and `rewrite_payloads` joins it."""

    async def fails(*_: Any) -> Any:
        raise DatabaseUnavailableError("no answer")

    monkeypatch.setattr("replaydb.buffer.joining.rewrite", fails)
    with caplog.at_level(logging.WARNING, "replaydb"):
        group_id = await complete(buffer, "g", 4, 4096)
        await buffer.drain()
    assert "groups were not joined: " in caplog.text
    assert len(await buffer.sample(1)) == 1
    assert (await rewrite_payloads(store)).num_groups == 1
    assert await num_parts(url, group_id) == 1


@pytest.mark.parametrize("first", [*OTHERS, STEP])
async def test_a_process_that_is_killed(url: str, first: int) -> None:
    """At any statement of the last episode and of the join."""
    async with Store.open(url) as store:
        buffer = await store.buffer("math")
        was_killed, at = True, first
        while was_killed:
            uid = f"g{at}"
            group_id = await buffer.open_group("agents", uid, 3)
            for i in range(2):
                await buffer.add_episode(uid, long_prompt(i), position=i)
            with workers(Worker(child_processes.die_joining, url, uid, at)) as (worker,):
                was_killed = await worker.ended() != 0
            [stored] = await buffer.get(uids=uid)
            if stored.num_episodes == 2:
                await buffer.add_episode(uid, long_prompt(2))
                await buffer.drain()
            elif await num_parts(url, group_id) == 3:
                assert (await rewrite_payloads(store)).num_groups == 1
            assert await num_parts(url, group_id) == 1
            [stored] = await buffer.get(uids=uid)
            assert [len(one.prompt_ids) for one in stored.episodes] == [4096] * 3
            at += STEP
        assert at > 3 * STEP  # it was killed at several statements
        await check_invariants(url)
        assert (await verify(store)).problems == ()
