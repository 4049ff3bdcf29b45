"""`expire_by="newest_token"`: a group with one fresh token does not expire, in any call."""

from __future__ import annotations

import pytest

import replaydb as rdb
from replaydb import Buffer, Store
from support.groups import episode
from support.invariants import check_invariants, statuses


def spanning(uid: str, *versions: int, status: str = "completed") -> rdb.EpisodeGroup:
    """A group whose episodes have these versions."""
    several = [episode(1.0, version) for version in versions]
    return rdb.EpisodeGroup("gsm8k", several, group_uid=uid, status=status)


@pytest.fixture
async def buffer(store: Store) -> Buffer:
    made = await store.buffer("math", max_staleness=1, expire_by="newest_token")
    await made.advance_policy(5)
    return made


async def test_expiry_at_the_put_and_when_the_policy_advances(buffer: Buffer, url: str) -> None:
    await buffer.put([spanning("a", 0, 4), spanning("b", 3, 3), spanning("c", 3, 5)])
    await buffer.put(spanning("half", 1, 5, status="aborted"))
    assert await statuses(url) == {
        "a": "completed",
        "b": "expired",
        "c": "completed",
        "half": "aborted",
    }
    batch = await buffer.sample(2, rdb.Fifo())
    assert batch.staleness == [5, 2]  # always that of the oldest token
    assert await buffer.advance_policy(6) == 1
    assert (await statuses(url))["a"] == "expired"
    assert await buffer.advance_policy(7) == 2
    await check_invariants(url)


async def test_groups_that_are_completed_or_released(buffer: Buffer, url: str) -> None:
    for uid, newest in (("fresh", 5), ("stale", 3)):
        await buffer.open_group("gsm8k", uid, 2)
        await buffer.add_episode(uid, episode(1.0, 1))
        await buffer.add_episode(uid, episode(1.0, newest))
    assert await statuses(url) == {"fresh": "completed", "stale": "expired"}
    lease = await buffer.lease(1, ttl=60)
    await buffer.advance_policy(6)
    await lease.nack()
    assert (await statuses(url))["fresh"] == "completed"
    lease = await buffer.lease(1, ttl=60)
    await buffer.advance_policy(7)
    await lease.nack()
    assert (await statuses(url))["fresh"] == "expired"
    await check_invariants(url)


async def test_changing_the_setting_and_updating_expired_groups(buffer: Buffer, url: str) -> None:
    await buffer.put([spanning("a", 0, 5), spanning("b", 5, 5)])
    await buffer.update_settings(expire_by="oldest_token")
    assert await statuses(url) == {"a": "expired", "b": "completed"}
    await buffer.update(uids=["a"], status="completed")
    assert (await statuses(url))["a"] == "expired"
    await buffer.update_settings(expire_by="newest_token")
    assert (await statuses(url))["a"] == "expired"
    await buffer.update(uids=["a"], status="completed")
    assert await statuses(url) == {"a": "completed", "b": "completed"}
    with pytest.raises(rdb.InvalidSettingsError, match="expire_by"):
        await buffer.update_settings(expire_by="any")  # type: ignore[arg-type]
    await check_invariants(url)
