"""Pacing: waiting until there are more or fewer groups."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.database.repository import aging, policy
from support.clock import Clock
from support.groups import episode, group, groups
from support.invariants import statuses


async def test_a_single_check(buffer: Buffer) -> None:
    assert await buffer.wait_until(at_least=0, timeout=0)
    ids = await buffer.put([*groups(3), *groups(2, "code"), group("f", status="failed")])
    await buffer.update(ids[:1], status="archived")

    async def there_are(number: int, **which: Any) -> bool:
        """Check for exactly this number, by both conditions, from either side."""
        return (
            await buffer.wait_until(fewer_than=number + 1, timeout=0, **which)
            and not await buffer.wait_until(at_least=number + 1, timeout=0, **which)
            and (not number or await buffer.wait_until(at_least=number, timeout=0, **which))
            and not (number and await buffer.wait_until(fewer_than=number, timeout=0, **which))
        )

    assert await there_are(6)
    assert await there_are(4, statuses="completed")
    assert await there_are(3, statuses=["failed", "completed"], tasks="gsm8k")
    assert await there_are(0, statuses=[])
    assert await there_are(0, tasks=["unseen"])
    assert await there_are(2, where=rdb.col.group_uid.like("code-%"))
    assert await there_are(0, runs="nobody")
    assert await there_are(6, runs=["test"])


async def test_it_waits_for_others(buffer: Buffer, other: Store) -> None:
    theirs = await other.buffer("math")
    more = asyncio.ensure_future(buffer.wait_until(at_least=3, statuses="completed"))
    await theirs.put(groups(2))
    await buffer.put(group())
    assert await more
    fewer = asyncio.ensure_future(
        buffer.wait_until(fewer_than=3, statuses=["completed", "leased"], timeout=60)
    )
    lease = await theirs.lease(1, ttl=60)
    await asyncio.sleep(0.02)
    assert not fewer.done()
    await lease.ack()
    assert await fewer
    assert not await buffer.wait_until(fewer_than=1, timeout=0.02)


async def test_a_waiting_call_runs_due_maintenance(store: Store, clock: Clock, url: str) -> None:
    """There is no other call that would do it."""
    buffer = await store.buffer("math", time_to_live=1000)
    await buffer.put(group("leased"))
    await buffer.lease(1, ttl=60)
    await buffer.open_group("gsm8k", "slow", 2, deadline=60)
    busy = ["leased", "pending"]
    assert not await buffer.wait_until(fewer_than=1, statuses=busy, timeout=0)
    assert await buffer.admission(1, max_staleness=1, timeout=0) == 0
    clock.jump(61)
    assert await buffer.wait_until(fewer_than=1, statuses=busy, timeout=0)
    assert await statuses(url) == {"leased": "completed", "slow": "failed"}
    await buffer.lease(1, ttl=60)
    clock.jump(1000)
    assert await buffer.wait_until(fewer_than=1, statuses=["completed", "leased"], timeout=0)
    assert set((await statuses(url)).values()) == {"archived"}
    for status in ("completed", "filtered"):
        await buffer.put(group(status=status))
        clock.jump(1001)  # and nothing else is due
        assert await buffer.wait_until(fewer_than=1, statuses=status, timeout=0)


async def test_only_what_a_draw_could_take_counts(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the condition already holds without maintenance."""
    buffer = await store.buffer("math", time_to_live=100, max_staleness=1)
    await buffer.put([group("old"), group("filtered", status="filtered")])
    await buffer.lease(1, ttl=60)
    completed: dict[str, Any] = {"statuses": "completed", "timeout": 0}
    assert await buffer.wait_until(fewer_than=1, **completed)
    clock.jump(61)  # the lease has expired
    assert not await buffer.wait_until(fewer_than=1, **completed)
    clock.jump(40)  # both have outlived time_to_live
    assert not await buffer.wait_until(at_least=1, **completed)
    assert not await buffer.wait_until(at_least=1, statuses="filtered", timeout=0)

    await buffer.put(group("stale", version=0))
    monkeypatch.setattr(policy, "AT_ONCE", 0)
    monkeypatch.setattr(aging, "GROUPS_PER_CALL", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "_follow_policy", _nothing)
        await buffer.advance_policy(2)  # the process ends before the groups are updated
    assert not await buffer.wait_until(at_least=1, **completed)

    await buffer.open_group("gsm8k", "slow", 1, deadline=60)
    assert await buffer.admission(1, max_staleness=1, timeout=0) == 1
    clock.jump(61)
    assert await buffer.admission(1, max_staleness=1, timeout=0) == 2


async def _nothing(*_: object) -> None:
    pass


async def test_admission_runs_due_maintenance(buffer: Buffer, clock: Clock) -> None:
    await buffer.open_group("gsm8k", "slow", 2, deadline=60)
    await buffer.add_episode("slow", episode())
    assert await buffer.admission(1, max_staleness=0, timeout=0) == 0
    clock.jump(61)
    assert await buffer.admission(1, max_staleness=0, timeout=0) == 1


async def test_a_read_only_store_can_wait(store: Store, clock: Clock, url: str) -> None:
    buffer = await store.buffer("math")
    await buffer.put(group())
    await buffer.lease(1, ttl=60)
    clock.jump(61)
    async with Store.open(url, read_only=True) as reader:
        watched = await reader.buffer("math", create=False)
        assert not await watched.wait_until(fewer_than=1, statuses="leased", timeout=0)
        assert await watched.wait_until(at_least=1, timeout=0)


async def test_one_bound_is_given_and_not_both(buffer: Buffer) -> None:
    both: dict[str, Any] = {"fewer_than": 1, "at_least": 1}
    for wrong in ({}, both):
        with pytest.raises(rdb.InvalidInputError):
            await buffer.wait_until(**wrong)
