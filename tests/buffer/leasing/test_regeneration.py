"""Expired groups are generated again, keeping the episodes that are fresh enough."""

from __future__ import annotations

import numpy as np
import pytest

import replaydb as rdb
from replaydb import GroupStatus, Store
from replaydb.domain.episodes.arrays import same
from support.invariants import check_invariants


def _episode(version: int | None, token: int) -> rdb.Episode:
    return rdb.Episode(prompt_ids=[1], response_ids=[token], reward=1.0, policy_version=version)


async def test_only_stale_episodes_are_removed(store: Store, url: str) -> None:
    buffer = await store.buffer("math", max_staleness=4)
    old = [_episode(2, 10), _episode(6, 11), _episode(5, 12)]
    [group_id] = await buffer.put(rdb.EpisodeGroup("gsm8k", old, group_uid="rolled"))
    assert await buffer.advance_policy(9) == 1

    async with buffer.lease(1, rdb.Fifo(), ttl=60, statuses=[GroupStatus.EXPIRED]) as lease:
        left = lease.batch.groups[0].without_stale_episodes(4)
        assert (left.status, left.group_uid) == (GroupStatus.ABORTED, "rolled")
        assert (left.expected_episodes, list(left.episodes)) == (3, old[1:])
        whole = [*left.episodes, _episode(9, 13)]
        again = rdb.EpisodeGroup("gsm8k", whole, group_uid=left.group_uid)
        assert await buffer.put(again, on_duplicate="replace") == [group_id]

    [stored] = await buffer.get([group_id])
    assert (stored.status, stored.staleness) == (GroupStatus.COMPLETED, 4)
    assert list(stored.episodes) == whole
    await check_invariants(url)


async def test_an_unknown_version_counts_as_stale(store: Store) -> None:
    buffer = await store.buffer("math")
    [group_id] = await buffer.put(rdb.EpisodeGroup("gsm8k", [_episode(3, 10), _episode(None, 11)]))
    [stored] = await buffer.get([group_id])
    assert stored.without_stale_episodes(100).episodes == ()


async def test_a_group_without_episodes_is_generated_from_its_prompt(
    store: Store, url: str
) -> None:
    buffer = await store.buffer("math", max_staleness=4)
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    old = rdb.EpisodeGroup("gsm8k", [_episode(0, 10)] * 2, prompt="1 + 1", extras={"image": image})
    [group_id] = await buffer.put(old)
    assert await buffer.advance_policy(9) == 1

    async with buffer.lease(1, ttl=60, statuses=[GroupStatus.EXPIRED]) as lease:
        await buffer.put(lease.batch[0].without_stale_episodes(4), on_duplicate="replace")
    await check_invariants(url)
    async with buffer.lease(1, ttl=60, statuses=[GroupStatus.ABORTED]) as lease:
        (left,) = lease.batch
        assert (left.id, left.num_episodes, left.expected_episodes) == (group_id, 0, 2)
        assert left.prompt_ids is not None
        assert (left.prompt, left.prompt_ids.tolist()) == ("1 + 1", [1])
        assert same(left.extras, {"image": image})
        again = rdb.EpisodeGroup(
            "gsm8k",
            [_episode(9, 13), _episode(9, 14)],
            group_uid=left.group_uid,
            prompt=left.prompt,
            extras=left.extras,
        )
        await buffer.put(again, on_duplicate="replace")
    assert list(await buffer.sample(1)) == [again]
    await check_invariants(url)


async def test_a_dropped_prompt_raises_instead_of_being_none(store: Store) -> None:
    buffer = await store.buffer("math", archived_payload="drop")
    left = rdb.EpisodeGroup("gsm8k", [], status="aborted", prompt="1 + 1", expected_episodes=2)
    [group_id] = await buffer.put(left)
    async with buffer.lease(1, ttl=60, statuses=["aborted"]) as lease:
        assert lease.batch[0].prompt == "1 + 1"
    draw_id = lease.batch.draw_id
    assert draw_id is not None
    for call in (
        buffer.get([group_id]),
        buffer.redraw(draw_id),
        buffer.update([group_id], status="aborted"),
    ):
        with pytest.raises(rdb.PayloadGoneError) as caught:
            await call
        assert caught.value.group_ids == (group_id,)
