"""Manual updates of groups. After every test the counters are compared with the groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sqlalchemy import literal_column, update

import replaydb as rdb
from replaydb import Buffer, Capacity, GroupStatus, Store
from replaydb.database.tables.schema import episode_group
from support.clock import Clock
from support.connections import transaction
from support.engines import postgresql_nightly
from support.groups import episode, group, groups
from support.invariants import check_invariants, group_row, statuses

STATUSES = ["completed", "aborted", "expired", "failed", "filtered", "archived"]


@postgresql_nightly
@pytest.mark.parametrize("before", STATUSES)
async def test_any_status_becomes_any_other(buffer: Buffer, url: str, before: str) -> None:
    ids = await buffer.put([group(after) for after in STATUSES])
    assert await buffer.update(ids, status=before, reason="before") == 6
    assert set((await statuses(url)).values()) == {before}
    for group_id, after in zip(ids, STATUSES, strict=True):
        assert await buffer.update([group_id], status=after) == 1
    assert await statuses(url) == {after: after for after in STATUSES}
    await check_invariants(url)
    reasons = {one.group_uid: one.status_reason for one in await buffer.find()}
    assert reasons == dict.fromkeys(STATUSES) | {before: "before"}  # this one was not changed
    assert (await buffer.sample(1)).groups[0].group_uid == "completed"
    assert await buffer.count(where=rdb.col.completed_at.is_(None), statuses="completed") == 0


async def test_everything_at_once(buffer: Buffer) -> None:
    ids = await buffer.put([group("a", tags={"x": 1, "y": 1}), *groups(2)])
    changed = await buffer.update(
        [*ids, ids[0]],
        priority=np.array([1.0, 2.0, 3.0, 4.0]),
        tags={"y": [2], "z": None},
        status=GroupStatus.FILTERED,
        reason="too easy",
    )
    assert changed == 3
    found = await buffer.find()
    assert [one.priority for one in found] == [4.0, 2.0, 3.0]
    assert [dict(one.tags) for one in found] == [
        {"x": 1, "y": [2], "z": None},
        *[{"y": [2], "z": None}] * 2,
    ]
    assert {(one.status.value, one.status_reason) for one in found} == {("filtered", "too easy")}
    assert await buffer.update(uids="a", reason="on second thought") == 1
    assert (await buffer.find(uids="a"))[0].status_reason == "on second thought"
    assert await buffer.update([*ids, 999], priority=0.5, status="completed") == 3
    batch = await buffer.sample(3, rdb.Prioritized())
    assert batch.probabilities.tolist() == pytest.approx([1 / 3] * 3)
    assert await buffer.update(uids=["nobody"], status="archived") == 0
    assert await buffer.update([], priority=1.0) == 0


async def test_leased_groups_keep_their_status(buffer: Buffer, clock: Clock, url: str) -> None:
    ids = await buffer.put(groups(3))
    await buffer.lease(2, ttl=60)
    with pytest.raises(rdb.GroupLeasedError) as caught:
        await buffer.update(ids, status="archived", tags={"seen": True})
    assert caught.value.group_ids == tuple(ids[:2])
    assert (await buffer.find(ids))[2].tags == {}
    assert await buffer.update(ids, priority=2.0, tags={"seen": True}) == 3
    clock.jump(61)  # a group of an expired lease is not leased
    assert await buffer.update(ids, status="filtered") == 3
    assert set((await statuses(url)).values()) == {"filtered"}


async def test_only_groups_of_some_statuses(buffer: Buffer, clock: Clock, url: str) -> None:
    """A group that was leased after it was found stays leased."""
    ids = await buffer.put([group(str(number)) for number in range(4)])
    await buffer.update(ids[:1], status="archived")
    await buffer.lease(1, rdb.Fifo(), ttl=60)
    changes: dict[str, Any] = {"tags": {"seen": True}, "status": "filtered", "reason": "late"}
    priorities = [2.0, 3.0, 4.0, 5.0]
    assert await buffer.update(ids, statuses="completed", priority=priorities, **changes) == 2
    found = await buffer.find(ids)
    assert [(one.status.value, one.priority, dict(one.tags)) for one in found] == [
        ("archived", 1.0, {}),
        ("leased", 1.0, {}),
        ("filtered", 4.0, {"seen": True}),
        ("filtered", 5.0, {"seen": True}),
    ]
    assert [one.status_reason for one in found[:2]] == [None, None]
    clock.jump(61)  # a group of an expired lease is completed again
    named = ["0", "1", "2"]
    assert await buffer.update(uids=named, statuses=["completed", "failed"], status="aborted") == 1
    assert list((await statuses(url)).values()) == ["archived", "aborted", "filtered", "filtered"]
    assert await buffer.update(ids, statuses=[], status="completed") == 0
    await check_invariants(url)


async def test_completed_groups_have_no_attempts(store: Store) -> None:
    buffer = await store.buffer("math", max_attempts=1)
    ids = await buffer.put(groups(1))
    lease = await buffer.lease(1, ttl=60)
    await lease.nack()
    for status, attempts in (("aborted", 1), ("completed", 0)):
        await buffer.update(ids, status=status)
        (found,) = await buffer.find(ids)
        assert (found.status, found.attempts) == (status, attempts)


async def test_a_pending_group_is_closed(buffer: Buffer, url: str) -> None:
    for uid in ("empty", "begun", "given up"):
        await buffer.open_group("gsm8k", uid, 3, deadline=600)
    claims = await buffer.claim(2, ttl=60, whole_groups=True)
    await claims[1].add_episode(episode(), position=0)
    with pytest.raises(rdb.InvalidInputError, match="without episodes"):
        await buffer.update(uids=["begun", "empty"], status="completed")
    assert set((await statuses(url)).values()) == {"pending"}
    await buffer.update(uids=["begun"], status="completed")
    await buffer.update(uids=["empty"], status="archived")
    await buffer.update(uids=["given up"], status="failed", reason="no answer")
    await check_invariants(url, idle_leases=True)
    for uid in ("begun", "empty", "given up"):
        with pytest.raises(rdb.GroupClosedError):
            await buffer.add_episode(uid, episode())
    for claim in claims:
        with pytest.raises(rdb.GroupClosedError):
            await claim.add_episode(episode(), position=1)
        with pytest.raises(rdb.ClaimExpiredError):
            await claim.release()
    assert [one.num_episodes for one in (await buffer.sample(1)).groups] == [1]


async def test_groups_without_payload_stay_archived(store: Store) -> None:
    buffer = await store.buffer("math", archived_payload="drop")
    ids = await buffer.put(groups(3))
    assert await buffer.update(ids[:2], status="archived") == 2
    for status in ("completed", "failed"):
        with pytest.raises(rdb.PayloadGoneError) as caught:
            await buffer.update(ids, status=status)
        assert caught.value.group_ids == tuple(ids[:2])
    assert await buffer.update(ids, status="archived", priority=3.0) == 3


async def test_unarchived_groups_need_capacity(store: Store, url: str) -> None:
    """Other groups are evicted as for a put, but not those that the call names."""
    buffer = await store.buffer("math", capacity=Capacity(groups=3), eviction="most_sampled")
    ids = await buffer.put(groups(2))
    await buffer.update(ids, status="archived")
    more = await buffer.put(groups(3, "code"))
    for _ in range(2):
        await buffer.sample(1, rdb.Fifo())
    assert await buffer.update([ids[0], more[0]], status="completed") == 2
    assert list((await statuses(url)).values()) == [
        "completed", "archived", "completed", "archived", "completed",
    ]  # fmt: skip
    await buffer.lease(2, ttl=60)
    with pytest.raises(rdb.BufferFullError):
        await buffer.update([ids[1], more[2]], status="completed")
    assert await buffer.update([ids[1]], status="failed") == 1  # for which nothing is evicted
    assert (await buffer.find([ids[1]]))[0].status == "archived"
    assert await buffer.update([ids[1]], status="archived") == 1


async def test_unarchived_groups_that_are_too_stale_expire(store: Store, url: str) -> None:
    buffer = await store.buffer("math", max_staleness=2)
    ids = await buffer.put([group(version=version) for version in (0, 3, None)])
    await buffer.update(ids, status="archived", reason="enough")
    await buffer.advance_policy(4)
    assert await buffer.update(ids, status="completed") == 3
    rows = [await group_row(url, one) for one in ids]
    assert [(row["group_status"], row["staleness"]) for row in rows] == [
        ("expired", 4), ("completed", 1), ("completed", None),
    ]  # fmt: skip
    assert rows[0]["status_reason"] == "staler than max_staleness"


async def test_damaged_tags_are_not_written_over(sqlite_url: str) -> None:
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math")
        ids = await buffer.put(groups(2))
        async with transaction(sqlite_url) as connection:
            spoilt: Any = {"tags": literal_column("'{'")}
            here = episode_group.c.id == ids[1]
            await connection.execute(update(episode_group).where(here).values(spoilt))
        with pytest.raises(rdb.CorruptPayloadError) as caught:
            await buffer.update(ids, tags={"seen": True})
        assert caught.value.group_ids == (ids[1],)
        assert await buffer.update(ids, status="archived") == 2


async def test_changes_that_are_refused(buffer: Buffer) -> None:
    ids = await buffer.put(groups(2))
    before = await buffer.find()
    for call in (
        buffer.update(ids, status="pending"),
        buffer.update(ids, status="leased"),
        buffer.update(ids),
        buffer.update(status="archived"),
    ):
        with pytest.raises(rdb.InvalidInputError):
            await call
    assert await buffer.find() == before


async def test_expired_groups_can_be_put(buffer: Buffer) -> None:
    """Groups whose prompts are to be generated again, with or without episodes."""
    bare = rdb.EpisodeGroup("gsm8k", [], status="expired", prompt_uid="p")
    ids = await buffer.put([group(status="expired", version=0), bare])
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(1)
    lease = await buffer.lease(2, statuses="expired", ttl=60)
    assert lease.batch.ids == ids
    assert [one.num_episodes for one in lease.batch.groups] == [2, 0]
    await lease.nack()
    assert await buffer.count(statuses="expired") == 2
