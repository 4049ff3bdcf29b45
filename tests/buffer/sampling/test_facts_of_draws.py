"""Metadata of drawn groups is as the draw stores it, although it is read before that."""

from __future__ import annotations

from typing import Any

import pytest

import replaydb as rdb
from replaydb import Batch, Buffer, GroupInfo, Share, Store, StoredGroup
from support.clock import Clock
from support.groups import group, groups

FACTS = (
    *("id", "run_id", "group_uid", "prompt_uid", "task_name", "status", "leased_from"),
    *("staleness", "priority", "times_sampled", "attempts", "times_replaced", "status_reason"),
    *("created_at", "completed_at", "first_sampled_at", "last_sampled_at", "archived_at"),
    *("tags", "expected_episodes", "num_episodes"),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "with replacement": {},
    "archived at once": {"max_times_sampled": 1},
    "archived later, without payload": {"max_times_sampled": 2, "archived_payload": "drop"},
}
MIX = rdb.Mix([Share(2, policy=rdb.Fifo()), Share(2, tasks="code"), Share(1, policy=rdb.Uniform())])


def facts(group: StoredGroup | GroupInfo) -> dict[str, Any]:
    return {name: getattr(group, name) for name in FACTS}


async def assert_as_stored(buffer: Buffer, batch: Batch) -> None:
    found = {info.id: info for info in await buffer.find(ids=batch.ids)}
    for one in batch.groups:
        mine, theirs = facts(one), facts(found[one.id])
        assert mine == theirs
    kept = [one for one in batch.groups if found[one.id].num_bytes]
    read = await buffer.get([one.id for one in kept])
    assert [one.episodes for one in kept] == [one.episodes for one in read]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("policy", [rdb.Uniform(), rdb.Fifo(), rdb.LeastSampled(), MIX])
async def test_sampled_groups(
    store: Store, settings: dict[str, Any], policy: rdb.SamplingPolicy
) -> None:
    buffer = await store.buffer("math", **settings)
    await buffer.put([*groups(6, version=1), *groups(6, "code", version=3)])
    await buffer.advance_policy(5)
    for _ in range(2):
        await assert_as_stored(buffer, await buffer.sample(5, policy, at_least=0))


async def test_groups_of_the_first_of_two_quotas(buffer: Buffer) -> None:
    """The second finds none, so nothing is read between the marks and the rows."""
    await buffer.put([*groups(4), group(task="code", status="failed")])
    batch = await buffer.sample({"gsm8k": 3, "code": 2}, rdb.Fifo(), at_least=1)
    assert len(batch) == 3
    await assert_as_stored(buffer, batch)


@pytest.mark.parametrize("policy", [rdb.Uniform(), rdb.Prioritized(), rdb.Fifo()])
async def test_groups_that_meet_a_filter(buffer: Buffer, policy: rdb.SamplingPolicy) -> None:
    """Others are passed over and get new keys, so the rows of groups are written twice."""
    several = [group(f"{i}", tags={"even": i % 2 == 0}, version=i) for i in range(40)]
    await buffer.put(several)
    await buffer.put(several[:8], on_duplicate="replace")
    even = rdb.col.tags["even"].as_boolean()
    for _ in range(3):
        batch = await buffer.sample(10, policy, where=even)
        assert len(batch) == 10
        await assert_as_stored(buffer, batch)
        [draw] = await buffer.draws(limit=1)
        found = {one.id: one.times_replaced for one in batch.groups}
        assert dict(zip(draw.group_ids, draw.times_replaced, strict=True)) == found


@pytest.mark.parametrize("settings", [{}, {"keep_draws": rdb.Keep(count=1)}], ids=["", "trimmed"])
async def test_groups_of_an_expired_lease(
    store: Store, clock: Clock, settings: dict[str, Any]
) -> None:
    """The same transaction releases them, before it draws them."""
    buffer = await store.buffer("math", **settings)
    await buffer.put([group(f"{i}", rewards=[1.0, 0.0]) for i in range(8)])
    for _ in range(3):
        await buffer.lease(5, ttl=50)
        clock.jump(60)
        batch = await buffer.sample(8)
        await assert_as_stored(buffer, batch)
        assert sum(one.attempts for one in batch.groups) > 0


@pytest.mark.parametrize("status", ["completed", "aborted", "expired", "failed"])
async def test_leased_groups(store: Store, status: str) -> None:
    buffer = await store.buffer("math", max_staleness=2)
    ids = await buffer.put(groups(3, version=1))
    await buffer.advance_policy(9 if status == "expired" else 2)
    if status != "expired":
        await buffer.update(ids, status=status)
    await buffer.advance_policy(11 if status == "expired" else 3)
    lease = await buffer.lease(3, ttl=60, statuses=[status], at_least=1)
    await assert_as_stored(buffer, lease.batch)
    await lease.nack(reason="again")
