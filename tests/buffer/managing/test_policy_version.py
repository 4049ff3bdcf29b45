"""Advancing the policy: staleness of live groups, and which groups expire."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import replaydb as rdb
from replaydb import Buffer, Store
from support.engines import postgresql_nightly
from support.groups import group, groups


async def statuses(buffer: Buffer, ids: list[int]) -> list[str]:
    return [one.status.value for one in await buffer.get(ids)]


async def stalenesses(buffer: Buffer, ids: list[int]) -> list[int | None]:
    return [one.staleness for one in await buffer.get(ids)]


async def test_staleness_of_every_live_group(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    given = [group(version=v, task=task) for v in (0, 2, None) for task in ("gsm8k", "code")]
    ids = await buffer.put([*given, group(version=1, status="aborted")])
    assert await stalenesses(buffer, ids) == [0, 0, -2, -2, None, None, -1]
    assert await buffer.advance_policy(3) == 0
    assert await stalenesses(buffer, ids) == [3, 3, 1, 1, None, None, 2]
    [late] = await buffer.put(group(version=3))
    assert await stalenesses(buffer, [late]) == [0]
    assert buffer.policy_version == 3
    async with Store.open(url) as second:
        there = await second.buffer("math")
        assert there.policy_version == 3
        await there.advance_policy(4)
    assert await stalenesses(buffer, [*ids, late]) == [4, 4, 2, 2, None, None, 3, 1]
    assert (await buffer.stats()).policy_version == 4


async def test_versions_of_a_mixed_group(buffer: Buffer) -> None:
    mixed = rdb.EpisodeGroup(
        "gsm8k",
        [
            rdb.Episode(prompt_ids=[1], response_ids=[2, 3], policy_version=[4, 6]),
            rdb.Episode(prompt_ids=[1], response_ids=[2], policy_version=5),
        ],
    )
    partly = rdb.EpisodeGroup(
        "gsm8k",
        [
            rdb.Episode(prompt_ids=[1], response_ids=[2], policy_version=5),
            rdb.Episode(prompt_ids=[1], response_ids=[2]),
        ],
    )
    ids = await buffer.put([mixed, partly])
    await buffer.advance_policy(7)
    assert await stalenesses(buffer, ids) == [3, None]


async def test_groups_that_are_not_live_keep_their_staleness(buffer: Buffer) -> None:
    ids = await buffer.put([group(version=0, status=s) for s in ("failed", "filtered", "aborted")])
    await buffer.advance_policy(4)
    assert await stalenesses(buffer, ids) == [0, 0, 4]


async def test_a_run_that_takes_over_leaves_that_staleness(buffer: Buffer, other: Store) -> None:
    dead = await buffer.put([group(version=0, status=s) for s in ("failed", "filtered", "expired")])
    live = await buffer.put([group(version=0, status=s) for s in ("completed", "aborted")])
    dead += await buffer.put(group(version=0))
    await buffer.advance_policy(4)
    await buffer.update(dead[-1:], status="archived")
    theirs = await other.buffer("math")
    for taker, unknown_or_new in ((theirs, [None, None]), (buffer, [1, 1])):
        await taker.advance_policy(1, take_over=True)
        assert await stalenesses(buffer, dead) == [0, 0, 0, 4]
        assert await stalenesses(buffer, live) == unknown_or_new


@postgresql_nightly
@pytest.mark.parametrize(
    ("limit", "gone"),
    [
        (0, {"gsm8k": [0, 1, 2], "code": [0, 1, 2]}),
        (None, {"gsm8k": [], "code": []}),
        ({"gsm8k": 2}, {"gsm8k": [0], "code": []}),
        ({"gsm8k": 0, "code": 2, "unseen": 0}, {"gsm8k": [0, 1, 2], "code": [0]}),
    ],
    ids=str,
)
async def test_expiry_follows_the_limit_of_each_task(
    store: Store, limit: Any, gone: dict[str, list[int]]
) -> None:
    buffer = await store.buffer("math", max_staleness=limit)
    ids = {
        task: await buffer.put([group(task=task, version=v) for v in (0, 1, 2, 3, None)])
        for task in gone
    }
    assert await buffer.advance_policy(3) == sum(map(len, gone.values()))
    for task, several in ids.items():
        expected = ["expired" if i in gone[task] else "completed" for i in range(5)]
        assert await statuses(buffer, several) == expected
        assert await stalenesses(buffer, several) == [3, 2, 1, 0, None]
    left = 10 - sum(map(len, gone.values()))
    assert len(await buffer.sample(left)) == left
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(left + 1)


async def test_aborted_groups_expire_and_failed_ones_do_not(store: Store) -> None:
    buffer = await store.buffer("math", max_staleness=1)
    ids = await buffer.put(
        [group(version=0, status=s) for s in ("completed", "aborted", "failed", "filtered")]
    )
    assert await buffer.advance_policy(2) == 2
    assert await statuses(buffer, ids) == ["expired", "expired", "failed", "filtered"]
    assert [bool(one.status_reason) for one in await buffer.get(ids)] == [True, True, False, False]
    assert await buffer.advance_policy(3) == 0
    assert await stalenesses(buffer, ids) == [2, 2, 0, 0]


async def test_the_same_version_again_changes_nothing(store: Store) -> None:
    buffer = await store.buffer("math", max_staleness=1)
    ids = await buffer.put([group(version=4), group(version=5)])
    assert await buffer.advance_policy(6) == 1
    before = await buffer.stats()
    assert await buffer.advance_policy(6) == 0
    assert await buffer.stats() == before
    assert await stalenesses(buffer, ids) == [2, 1]


async def test_a_lower_version_needs_rewind(store: Store) -> None:
    buffer = await store.buffer("math", max_staleness=2)
    ids = await buffer.put([group(version=v) for v in (1, 3, 5)])
    assert await buffer.advance_policy(5) == 1
    with pytest.raises(rdb.InvalidInputError, match="rewind") as caught:
        await buffer.advance_policy(4)
    assert caught.value.field == "version"
    assert buffer.policy_version == (await buffer.stats()).policy_version == 5
    assert await buffer.advance_policy(3, rewind=True) == 0
    assert buffer.policy_version == 3
    assert await statuses(buffer, ids) == ["expired", "completed", "completed"]
    assert await stalenesses(buffer, ids) == [4, 0, -2]
    assert len(await buffer.sample(2, max_staleness=0)) == 2
    assert await buffer.advance_policy(6) == 1


async def test_large_versions(store: Store) -> None:
    """Versions have 32 bits; staleness, a difference of two, can have more."""
    buffer = await store.buffer("math", max_staleness=2**31)
    most, least = 2**31 - 1, -(2**31)
    ids = await buffer.put([group(version=version) for version in (most, 0, least, None)])
    assert await buffer.advance_policy(most) == 1
    assert await statuses(buffer, ids) == ["completed", "completed", "expired", "completed"]
    assert await stalenesses(buffer, ids) == [0, most, most - least, None]


async def test_the_policy_advances_while_groups_are_put(store: Store, url: str) -> None:
    """In either order, staleness is right and no group that is too stale is left (see `store`)."""
    buffer = await store.buffer("math", max_staleness={"gsm8k": 2, "new-3": 1})
    async with Store.open(url) as second:
        there = await second.buffer("math")

        async def advance() -> None:
            for version in range(1, 15):
                await there.advance_policy(version)

        puts = []
        for i in range(14):
            several = [*groups(1, f"new-{i}", version=i), group(version=i), group(version=i + 3)]
            puts.append(buffer.put(several))
        await asyncio.gather(advance(), *puts)
    assert await buffer.count() == 42


async def test_the_version_of_a_buffer_object_is_cached(buffer: Buffer, url: str) -> None:
    async with Store.open(url) as store:
        other = await store.buffer("math")
        await buffer.advance_policy(3)
        assert other.policy_version == 0
        assert (await other.stats(totals=False)).policy_version == 3
        await other.put(group())
        assert other.policy_version == 3
