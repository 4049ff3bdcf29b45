"""Incremental groups, and rollouts that resume after an interruption."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

import replaydb as rdb
from replaydb import Buffer, Capacity, DuplicateEpisodeError, InvalidInputError, Store, col
from replaydb.database.tables.records import to_episode_record
from replaydb.database.tables.schema import episode_group, payload
from support.agents import turn
from support.clock import Clock
from support.connections import transaction
from support.engines import in_turn, postgresql_nightly
from support.groups import conversation, episode, group, groups, long_group
from support.invariants import check_invariants, group_row, statuses


async def test_the_last_episode_completes_the_group(buffer: Buffer, url: str) -> None:
    tags = {"level": "hard"}
    group_id = await buffer.open_group("gsm8k", "g", 3, prompt_uid="p/1", priority=2.0, tags=tags)
    row = await group_row(url, group_id)
    assert (row["group_status"], row["num_episodes"], row["num_bytes"]) == ("pending", 0, 0)
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(1)
    episodes = [episode(0.5, 3, text="one"), episode(None), conversation()]
    assert await buffer.add_episode("g", episodes[2], position=2) == "pending"
    assert await buffer.add_episode("g", episodes[0], position=0) == "pending"
    await check_invariants(url)
    assert await buffer.add_episode("g", episodes[1]) == "completed"
    (stored,) = (await buffer.sample(1)).groups
    assert stored.id == group_id
    assert list(stored.episodes) == episodes  # the stored episodes, in the order of positions
    assert [one.text for one in stored.episodes] == ["one", None, "two turns"]
    assert stored == rdb.EpisodeGroup(
        "gsm8k",
        episodes,
        prompt_uid="p/1",
        group_uid="g",
        priority=2.0,
        tags=tags,
        expected_episodes=3,
    )


async def test_scalars_equal_those_of_a_group_from_one_put(buffer: Buffer, url: str) -> None:
    await buffer.advance_policy(7)
    episodes = [episode(0.5, 3), episode(2.0, 5), episode(None, 6)]
    incremental = await buffer.open_group("gsm8k", "episodes", 3)
    for one in episodes:
        await buffer.add_episode("episodes", one)
    (whole,) = await buffer.put(
        rdb.EpisodeGroup("gsm8k", episodes, group_uid="whole", expected_episodes=3)
    )
    # One part per episode takes more bytes, and the keys are random.
    own = {"id", "group_uid", "num_bytes", "uniform_key", "priority_key"}
    own |= {"created_at", "completed_at"}
    ours, theirs = await group_row(url, incremental), await group_row(url, whole)
    assert {name for name in ours if ours[name] != theirs[name]} <= own
    assert ours["completed_at"] >= ours["created_at"]


async def test_episodes_that_were_added_one_by_one_are_copied_together(store: Store) -> None:
    first, second = await store.buffer("first"), await store.buffer("second")
    episodes = [episode(0.5), conversation()]
    await first.open_group("gsm8k", "g", 2)
    for one in episodes:
        await first.add_episode("g", one)
    (stored,) = (await first.sample(1)).groups
    await second.put(stored)
    (copied,) = (await second.sample(1)).groups
    assert list(copied.episodes) == episodes
    assert copied == stored


async def test_episodes_that_cannot_be_added(buffer: Buffer, url: str) -> None:
    await buffer.open_group("gsm8k", "g", 2)
    with pytest.raises(rdb.DuplicateGroupError, match="add_episode adds") as duplicate:
        await buffer.open_group("gsm8k", "g", 2)
    assert "on_duplicate" not in str(duplicate.value)
    with pytest.raises(rdb.UnknownGroupError):
        await buffer.add_episode("nobody", episode())
    with pytest.raises(rdb.InvalidInputError):
        await buffer.add_episode("g", episode(), position=2)
    with pytest.raises(rdb.InvalidInputError):
        await buffer.add_episode("g", group())  # type: ignore[arg-type]
    await buffer.add_episode("g", episode(1.0), position=1)
    with pytest.raises(rdb.DuplicateEpisodeError) as caught:
        await buffer.add_episode("g", episode(9.0), position=1)
    assert (caught.value.group_uid, caught.value.position) == ("g", 1)
    await buffer.add_episode("g", episode(0.0))
    with pytest.raises(rdb.GroupClosedError, match="it is completed") as closed:
        await buffer.add_episode("g", episode())
    assert closed.value.group_uid == "g"
    await buffer.open_group("gsm8k", "claimed", 1)
    [claim] = await buffer.claim(ttl=60)
    with pytest.raises(rdb.GroupClosedError, match="is claimed, or is unusable") as closed:
        await buffer.add_episode("claimed", episode())
    assert closed.value.status == "pending"
    await claim.release()
    with pytest.raises(rdb.DuplicateEpisodeError):  # a repeated call, after later episodes
        await buffer.add_episode("g", episode(9.0), position=1)
    assert (await buffer.get([1]))[0].rewards.tolist() == [0.0, 1.0]
    await buffer.put(group("whole"))
    with pytest.raises(rdb.GroupClosedError):
        await buffer.add_episode("whole", episode())
    for wrong in ({"min_episodes": 3}, {"min_episodes": 0}, {"deadline": -1}, {"priority": -1}):
        with pytest.raises(rdb.InvalidInputError):
            await buffer.open_group("gsm8k", "h", 2, **wrong)  # type: ignore[arg-type]
    with pytest.raises(rdb.InvalidInputError):
        await buffer.open_group("gsm8k", "h", 0)
    assert "h" not in await statuses(url)


async def test_one_invalid_addition_does_not_affect_the_others(buffer: Buffer) -> None:
    await buffer.open_group("gsm8k", "g", 8)
    calls = [buffer.add_episode("g", episode(float(i)), position=i) for i in (0, 0, 1, 2, 9)]
    calls.append(buffer.add_episode("nobody", episode()))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    kinds = [type(one) for one in outcomes]
    assert kinds.count(rdb.DuplicateEpisodeError) == kinds.count(rdb.UnknownGroupError) == 1
    assert kinds.count(rdb.InvalidInputError) == 1
    assert outcomes.count(rdb.GroupStatus.PENDING) == 3


async def test_adders_of_several_stores(
    store: Store, other: Store, buffer: Buffer, url: str
) -> None:
    buffers = [buffer, await other.buffer("math")]
    uids = [f"g{i}" for i in range(6)]
    await asyncio.gather(*(buffer.open_group("gsm8k", uid, 8) for uid in uids))
    calls = [buffers[i % 2].add_episode(uid, episode(float(i))) for i in range(8) for uid in uids]
    outcomes = list(await asyncio.gather(*calls))
    assert set((await statuses(url)).values()) == {"completed"}
    assert outcomes.count(rdb.GroupStatus.COMPLETED) >= 6
    for stored in await buffer.get(range(1, 7)):
        assert sorted(stored.rewards.tolist()) == [float(i) for i in range(8)]


@pytest.mark.parametrize(
    ("arrived", "least", "expected"),
    [
        (2, 2, "completed"),
        (3, 2, "completed"),
        (1, 2, "failed"),
        (3, None, "failed"),
        (0, 1, "failed"),
    ],
)
async def test_deadline(
    buffer: Buffer, clock: Clock, url: str, arrived: int, least: int | None, expected: str
) -> None:
    await buffer.open_group("gsm8k", "g", 4, deadline=10, min_episodes=least)
    for i in range(arrived):
        await buffer.add_episode("g", episode(float(i)), position=2 * i % 4 if i < 2 else 3)
    clock.jump(9)
    await buffer.put(group("before"))
    assert (await statuses(url))["g"] == "pending"
    clock.jump(2)
    await buffer.put(group("after"))
    row = await group_row(url, 1)
    assert row["group_status"] == expected
    assert row["status_reason"] == f"{4 - arrived} of 4 episodes missing at the deadline"
    assert (row["num_episodes"], row["expected_episodes"]) == (arrived, 4)
    if expected == "completed":
        (stored,) = await buffer.get([1])
        assert stored.rewards.tolist() == [0.0, 1.0, 2.0][:arrived]
        assert (await buffer.sample(3)).ids


async def test_an_episode_that_is_too_late(buffer: Buffer, clock: Clock, url: str) -> None:
    await buffer.open_group("gsm8k", "short", 2, deadline=10)
    await buffer.open_group("gsm8k", "enough", 2, deadline=10, min_episodes=1)
    await buffer.add_episode("enough", episode(1.0))
    clock.jump(11)
    for uid in ("short", "enough"):
        with pytest.raises(rdb.GroupClosedError):
            await buffer.add_episode(uid, episode())
        await check_invariants(url)
    assert await statuses(url) == {"short": "failed", "enough": "completed"}
    assert (await buffer.sample(1)).groups[0].rewards.tolist() == [1.0]


async def test_too_stale_when_it_is_complete(store: Store, url: str) -> None:
    buffer = await store.buffer("math", max_staleness=1)
    await buffer.open_group("gsm8k", "g", 2)
    await buffer.add_episode("g", episode(1.0, 0))
    assert await buffer.advance_policy(5) == 0
    assert (await group_row(url, 1))["staleness"] == 5
    assert await buffer.add_episode("g", episode(1.0, 5)) == "expired"
    row = await group_row(url, 1)
    assert (row["min_policy_version"], row["max_policy_version"]) == (0, 5)
    assert row["status_reason"] == "staler than max_staleness"


@postgresql_nightly
@pytest.mark.parametrize("kind", ["tokens", "bytes"])
async def test_capacity_counts_pending_groups(store: Store, url: str, kind: str) -> None:
    """With one more token or byte of capacity, nothing would be evicted."""
    buffer = await store.buffer("math")
    await buffer.put([long_group(f"g{i}", 30) for i in range(3)])
    await buffer.open_group("gsm8k", "open", 3)
    long = long_group("x", 40).episodes[0]
    stored = sum(getattr(one, f"num_{kind}") for one in await buffer.find())
    new = getattr(to_episode_record(long, None), f"num_{kind}")
    await buffer.update_settings(capacity=Capacity(**{kind: stored + new - 1}))
    await buffer.add_episode("open", long)
    kept = {uid for uid, status in (await statuses(url)).items() if status != "archived"}
    assert kept == {"g1", "g2", "open"}
    lease = await buffer.lease(2, ttl=60)
    with pytest.raises(rdb.BufferFullError):
        await buffer.add_episode("open", long, timeout=0)
    waiting = asyncio.ensure_future(buffer.add_episode("open", long, timeout=60))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await lease.ack()
    assert await waiting == "pending"
    assert (await group_row(url, 4))["num_tokens"] == 80


@pytest.mark.parametrize(
    ("engine_name", "kind", "where"),
    in_turn(
        (kind, where)
        for where in ("capacity", "task_capacity")
        for kind in ("groups", "tokens", "bytes")
    ),
)
async def test_open_groups_that_exceed_a_lowered_capacity(
    store: Store, url: str, kind: str, where: Any
) -> None:
    """They can be completed. The next put evicts them."""
    buffer = await store.buffer("math")
    for uid in "ab":
        await buffer.open_group("gsm8k", uid, 2)
        await buffer.add_episode(uid, long_group(uid, 18).episodes[0])
    open_groups = await buffer.find()
    used = 2 if kind == "groups" else sum(getattr(one, f"num_{kind}") for one in open_groups)
    lowered: Any = {where: Capacity(**{kind: used - 1})}
    await buffer.update_settings(**lowered)
    for uid in "ab":
        last = long_group(uid, 18).episodes[0]
        assert await buffer.add_episode(uid, last, timeout=0) == "completed"
    await buffer.put(group("new"), timeout=0)
    found = await statuses(url)
    assert {uid for uid in found if found[uid] != "archived"} == {"new"}
    await check_invariants(url)


async def test_episodes_add_no_groups(store: Store) -> None:
    """So they do not wait for leased groups if only the number of groups is limited."""
    buffer = await store.buffer("math")
    await buffer.put(groups(2))
    await buffer.open_group("gsm8k", "open", 1)
    lease = await buffer.lease(2, ttl=60)
    await buffer.update_settings(capacity=Capacity(groups=1))
    assert await buffer.add_episode("open", episode(), timeout=0) == "completed"
    await lease.ack()


async def test_deleting_pending_groups(buffer: Buffer) -> None:
    await buffer.open_group("gsm8k", "g", 2)
    await buffer.add_episode("g", episode())
    await buffer.delete([1])
    with pytest.raises(rdb.UnknownGroupError):
        await buffer.add_episode("g", episode())
    await buffer.open_group("code", "g", 1)
    assert await buffer.add_episode("g", episode()) == "completed"


async def test_an_interrupted_rollout_resumes(buffer: Buffer, url: str) -> None:
    await buffer.advance_policy(4)
    half = rdb.Episode(
        prompt_ids=[1], response_ids=[2, 3], policy_version=[3, 4], finish_reason="abort"
    )
    (group_id,) = await buffer.put(
        rdb.EpisodeGroup("gsm8k", [half], group_uid="g", status="aborted", expected_episodes=2)
    )
    await buffer.put(groups(1))
    async with buffer.lease(1, ttl=60, statuses=["aborted"]) as lease:
        (taken,) = lease.batch.groups
        assert list(taken.episodes) == [half]
        longer = rdb.Episode(
            prompt_ids=[1], response_ids=[2, 3, 4], policy_version=[3, 4, 5], reward=1.0
        )
        await buffer.advance_policy(5)
        await buffer.put(
            rdb.EpisodeGroup("gsm8k", [longer, episode(0.0, 5)], group_uid="g"),
            on_duplicate="replace",
        )
    row = await group_row(url, group_id)
    assert (row["group_status"], row["staleness"], row["times_sampled"]) == ("completed", 2, 0)
    (stored,) = (await buffer.sample(1, rdb.StalestFirst())).groups
    assert stored.id == group_id
    assert stored.episodes[0] == longer  # with one version per token


async def test_a_group_has_its_prompt_before_its_episodes(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    prompt = [{"role": "user", "content": "1 + 1 = "}]
    given: dict[str, Any] = {"prompt": prompt, "prompt_ids": [1, 2], "extras": {"a": np.ones(3)}}
    group_id = await buffer.open_group("gsm8k", "g", 3, **given)
    [empty] = await buffer.get([group_id])
    await check_invariants(url)
    for position in (2, 0, 1):
        await buffer.add_episode("g", episode(text=str(position)), position=position)
    (whole,) = await buffer.sample(1)
    expected = rdb.EpisodeGroup(
        "gsm8k", whole.episodes, group_uid="g", expected_episodes=3, **given
    )
    assert whole == expected
    assert (empty.num_episodes, empty.context, whole.texts) == (0, whole.context, ["0", "1", "2"])
    assert rdb.Batch([whole, empty]).padded(0).token_ids.shape == (3, 5)
    # Stored as one part in another buffer, it is equal.
    other = await store.buffer("other")
    assert await buffer.copy_to(other) == 1
    assert list(await other.sample(1)) == [expected]
    async with transaction(url) as connection:
        mine = select(episode_group.c.id).where(episode_group.c.buffer_id == 2)
        parts = await connection.scalars(select(payload.c.part).where(payload.c.group_id.in_(mine)))
    assert list(parts) == [0]
    await check_invariants(url)


async def test_an_episode_brings_tags_of_its_group(store: Store, url: str) -> None:
    buffer = await store.buffer("tagged", indexed_tags=["level"])
    await buffer.open_group("agents", "g", 3, tags={"kind": "new", "level": 0})
    with pytest.raises(InvalidInputError, match="tags"):
        await buffer.add_episode("g", episode(), position=0, tags={1: 2})  # type: ignore[dict-item]
    await buffer.add_episode("g", episode(), position=0, tags={"level": 1})
    await buffer.append_turn("g", 1, turn("call-1"))
    await buffer.finish_episode("g", 1, tags={"kind": "hard", "level": 2})
    with pytest.raises(DuplicateEpisodeError):
        await buffer.add_episode("g", episode(), position=0, tags={"level": 3})
    [claim] = await buffer.claim(ttl=60)
    await claim.add_episode(episode(), tags={"judge": None})
    [info] = await buffer.find(where=col.tags["level"] == 2)
    assert info.tags == {"kind": "hard", "level": 2, "judge": None}
    await check_invariants(url)
