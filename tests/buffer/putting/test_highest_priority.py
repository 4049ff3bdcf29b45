"""`put(priority="max")`: new groups get the highest priority of the stored groups of their task."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import replaydb as rdb
from replaydb import Buffer, Capacity, Store
from support.engines import in_turn
from support.groups import group


async def priorities(buffer: Buffer) -> dict[str, float]:
    return {one.group_uid: one.priority for one in await buffer.find()}


async def test_it_is_that_of_completed_and_leased_groups_of_the_task(buffer: Buffer) -> None:
    await buffer.put(group("first"), priority="max")
    assert await priorities(buffer) == {"first": 1.0}
    await buffer.update_priorities([1], [0.25])
    await buffer.put([group("a"), group("b", "code", priority=9.0)])
    await buffer.update_priorities([2], [0.5])
    for status in ("aborted", "failed", "filtered", "archived"):
        await buffer.put(group(status, status=status, priority=8.0))
    await buffer.open_group("gsm8k", "open", 2, priority=8.0)
    await buffer.put([group("c"), group("d", "code"), group("e", "new")], priority="max")
    found = await priorities(buffer)
    assert (found["c"], found["d"], found["e"]) == (0.5, 9.0, 1.0)
    await buffer.put(group("top", priority=4.0))
    lease = await buffer.lease(1, rdb.TopPriority(), ttl=600, tasks="gsm8k")
    await buffer.put(group("f"), priority="max")
    await lease.ack()
    await buffer.update_priorities([1, 2], [0.0, 0.0])
    await buffer.put(group("g"), priority=lambda one: "max")
    assert (await priorities(buffer))["g"] == (await priorities(buffer))["f"] == 4.0
    await buffer.update(uids=["f", "g", "c"], status="archived")
    await buffer.put(group("h"), priority="max")
    assert (await priorities(buffer))["h"] == 0.0


def of_d(one: rdb.EpisodeGroup) -> Any:
    return "max" if one.group_uid == "d" else 0.5


@pytest.mark.parametrize(
    ("engine_name", "capacity"), in_turn([None, Capacity(groups=99), Capacity(groups=3)])
)
async def test_puts_that_share_a_transaction(store: Store, capacity: Capacity | None) -> None:
    """Each sees the groups of the puts before it, but not overwritten or evicted ones."""
    buffer = await store.buffer("math", capacity=capacity)
    await buffer.put(group("a", priority=5.0))
    calls: list[Any] = [
        buffer.put(group("b"), priority="max"),
        buffer.put(group("c", priority=7.0)),
        buffer.put([group("d"), group("d-low")], priority=of_d),
        buffer.put([group("c"), group("d")], priority=0.125, on_duplicate="replace"),
        buffer.put(group("e"), priority="max"),
        buffer.put(group("a"), priority="max", on_duplicate="renew"),
    ]
    for one in calls[:3]:
        await one
    expected = {"b": 5.0, "c": 7.0, "d": 7.0, "d-low": 0.5}
    found = await priorities(buffer)
    assert {uid: found[uid] for uid in expected} == expected
    await asyncio.gather(*calls[3:])
    found = await priorities(buffer)
    assert (found["c"], found["d"]) == (0.125, 0.125)
    # With a capacity of three, only `d-low`, `c` and `d` were left.
    highest = 0.5 if capacity is not None and capacity.groups == 3 else 5.0
    assert found["e"] == found["a"] == highest
    await asyncio.gather(
        buffer.put(group("x", priority=50.0)), buffer.put(group("y"), priority="max")
    )
    assert (await priorities(buffer))["y"] == 50.0
