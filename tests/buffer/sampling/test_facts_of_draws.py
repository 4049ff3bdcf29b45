"""Metadata of drawn groups is as the draw stores it, although it is read before that."""

from __future__ import annotations

from typing import Any

import pytest

import replaydb as rdb
from replaydb import Batch, Buffer, GroupInfo, Share, Store, StoredGroup
from support.groups import groups

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
    for group in batch.groups:
        mine, theirs = facts(group), facts(found[group.id])
        assert mine == theirs


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


@pytest.mark.parametrize("status", ["completed", "aborted", "expired", "failed", "pending"])
async def test_leased_groups(store: Store, status: str) -> None:
    buffer = await store.buffer("math", max_staleness=2)
    if status == "pending":
        await buffer.open_group("gsm8k", "open", 2, tags={"a": 1})
    else:
        ids = await buffer.put(groups(3, version=1))
        await buffer.advance_policy(9 if status == "expired" else 2)
        if status != "expired":
            await buffer.update(ids, status=status)
        await buffer.advance_policy(11 if status == "expired" else 3)
    lease = await buffer.lease(3, ttl=60, statuses=[status], at_least=1)
    await assert_as_stored(buffer, lease.batch)
    await lease.nack(reason="again")
