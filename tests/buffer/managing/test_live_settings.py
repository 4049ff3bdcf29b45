"""Settings changed on a live buffer: every process obeys them at its next call."""

from __future__ import annotations

import pytest

import replaydb as rdb
from replaydb import Buffer, Capacity, Store
from replaydb.database.tables.schema import draw
from support.clock import Clock
from support.groups import episode, group, groups, long_group
from support.invariants import group_rows, number_of, statuses


@pytest.fixture
async def theirs(buffer: Buffer, other: Store) -> Buffer:
    """The same buffer in another process, which has used it with the old settings."""
    opened = await other.buffer("math")
    await opened.put(groups(4, "warm"))
    await opened.sample(1, rdb.Fifo())
    return opened


async def test_capacity_with_pending_groups(buffer: Buffer, theirs: Buffer, url: str) -> None:
    await theirs.open_group("gsm8k", "g", 2)
    await theirs.add_episode("g", episode())
    await buffer.update_settings(capacity=Capacity(tokens=40))
    await theirs.add_episode("g", long_group("x", 30).episodes[0])
    assert {uid for uid, status in (await statuses(url)).items() if status != "archived"} == {"g"}


async def test_a_new_seed_restarts_the_random_stream(buffer: Buffer, theirs: Buffer) -> None:
    await theirs.put([group(status="aborted") for _ in range(9)])
    drawn = []
    for seed in (42, 43, 42):
        await buffer.update_settings(seed=seed)
        lease = await theirs.lease(4, rdb.Uniform(), statuses=["aborted"], ttl=60)
        drawn.append(lease.batch.ids)
        await lease.nack()
    assert drawn[0] == drawn[2] != drawn[1]


async def test_settings_of_leases_and_draws(
    buffer: Buffer, theirs: Buffer, clock: Clock, url: str
) -> None:
    lease = await theirs.lease(3, ttl=10)
    await buffer.update_settings(
        max_attempts=1, on_ack="return", max_times_sampled=2, record_draws=False
    )
    await lease.nack(lease.batch.ids[:1])
    await lease.ack(lease.batch.ids[1:2])
    assert list((await statuses(url)).values())[:3] == ["failed", "completed", "leased"]
    clock.jump(11)
    before = await number_of(url, draw)
    await theirs.sample(2, rdb.LeastSampled())
    assert await number_of(url, draw) == before
    assert list((await statuses(url)).values()) == ["failed", "archived", "failed", "completed"]


async def test_tolerance_and_exponent(buffer: Buffer, theirs: Buffer, url: str) -> None:
    await theirs.put([group(f"v{v}", version=v, priority=4.0) for v in (0, 1, 2)])
    await buffer.advance_policy(2, take_over=True)
    await theirs.put(group("late", version=0))
    versions = {row["group_uid"]: row["comparable_version"] for row in await group_rows(url)}
    assert versions["late"] is None  # of another lineage now
    await buffer.put([group(f"own-{v}", version=v, priority=4.0) for v in (0, 1, 2)])
    await buffer.update_settings(max_staleness=1, priority_exponent=0.5)
    found = await statuses(url)
    assert (found["own-0"], found["own-1"]) == ("expired", "completed")
    await theirs.put(group("new", priority=9.0))
    weights = {row["group_uid"]: row["weight"] for row in await group_rows(url)}
    assert (weights["own-1"], weights["new"]) == (2.0, 3.0)


async def test_opening_with_settings_changes_them_for_all(
    buffer: Buffer, theirs: Buffer, other: Store, url: str
) -> None:
    again = await other.buffer("math", capacity=Capacity(groups=3), eviction="lowest_priority")
    assert again is theirs
    await buffer.put([group("low", priority=0.1), group("high", priority=9.0)])
    await buffer.put(group("higher", priority=9.5))
    assert "low" not in {
        uid for uid, status in (await statuses(url)).items() if status != "archived"
    }
    assert (await buffer.stats()).settings.eviction == "lowest_priority"
    with pytest.raises(rdb.InvalidSettingsError):
        await other.buffer("math", rate_limit=rdb.MinSize(4))
    assert (await buffer.stats()).settings.rate_limit is None


async def test_a_dict_of_settings_belongs_to_its_caller(buffer: Buffer, theirs: Buffer) -> None:
    await buffer.update_settings(max_staleness={"gsm8k": 2})
    await theirs.refresh()
    limits = theirs.settings.max_staleness
    assert isinstance(limits, dict)
    limits["gsm8k"] = 8
    await buffer.refresh()
    assert buffer.settings.max_staleness == {"gsm8k": 2}
    await theirs.update_settings(max_staleness=limits)
    await buffer.refresh()
    assert buffer.settings.max_staleness == {"gsm8k": 8}
