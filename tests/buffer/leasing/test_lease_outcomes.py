"""Status of groups after a lease: by settings, by status, by what happened meanwhile."""

from __future__ import annotations

import pytest
from sqlalchemy import update

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.database.tables import schema
from replaydb.domain.settings import ArchivedPayload
from support.clock import Clock
from support.connections import transaction
from support.engines import postgresql_nightly
from support.groups import group, groups, long_group
from support.invariants import group_row, number_of, statuses


async def test_attempts_lead_to_failed(store: Store, clock: Clock, url: str) -> None:
    buffer = await store.buffer("math", max_attempts=3)
    (group_id,) = await buffer.put(groups(1))
    lease = await buffer.lease(1, ttl=10)
    await lease.nack(reason="out of memory")
    row = await group_row(url, group_id)
    assert (row["group_status"], row["attempts"]) == ("completed", 1)
    assert row["status_reason"] == "out of memory"
    await buffer.lease(1, ttl=10)
    clock.jump(11)
    lease = await buffer.lease(1, ttl=10)  # the second attempt expired
    assert (await group_row(url, group_id))["attempts"] == 2
    await lease.nack()
    row = await group_row(url, group_id)
    assert (row["group_status"], row["attempts"]) == ("failed", 3)
    assert row["status_reason"] == "nacked (attempt 3 of 3)"
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.lease(1, ttl=10)


async def test_a_lower_limit_fails_no_group_without_an_attempt(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    ids = await buffer.put(groups(2))
    for _ in range(2):
        await (await buffer.lease(2, ttl=10)).nack()
    lease = await buffer.lease(2, ttl=10)
    await buffer.update_settings(max_attempts=2)
    await lease.fail(ids[:1], reason="unreadable")
    assert await statuses(url) == {"gsm8k-0": "failed", "gsm8k-1": "completed"}
    assert (await group_row(url, ids[1]))["attempts"] == 2


@postgresql_nightly
@pytest.mark.parametrize(("limit", "failures"), [(None, 3), (2, 2)])
async def test_a_failure_counts_for_the_group_that_failed(
    store: Store, url: str, limit: int | None, failures: int
) -> None:
    """The group behind it is drawn eventually, without an attempt."""
    buffer = await store.buffer("math", max_attempts=limit)
    bad, good = await buffer.put(groups(2))
    for attempt in range(1, failures + 1):
        assert (await group_row(url, bad))["group_status"] == "completed"
        lease = await buffer.lease(2, ttl=10)
        assert lease.batch.ids == [bad, good]
        await lease.fail([bad], reason="unreadable")
        assert await buffer.leases() == []
        assert (await group_row(url, bad))["attempts"] == attempt
    row = await group_row(url, bad)
    assert row["group_status"] == "failed"
    assert row["status_reason"] == f"unreadable (attempt {failures} of {failures})"
    assert (await group_row(url, good))["attempts"] == 0
    async with buffer.lease(1, ttl=10) as lease:
        assert lease.batch.ids == [good]
        with pytest.raises(rdb.LeaseExpiredError):
            await lease.fail([bad], reason="unreadable")


async def test_an_expired_lease_counts_as_an_attempt(store: Store, clock: Clock, url: str) -> None:
    buffer = await store.buffer("math", max_attempts=1)
    (group_id, _) = await buffer.put(groups(2))
    await buffer.lease(1, ttl=10)
    clock.jump(11)
    await buffer.sample(1)
    row = await group_row(url, group_id)
    assert (row["group_status"], row["attempts"]) == ("failed", 1)
    assert row["status_reason"] == "lease expired (attempt 1 of 1)"


@pytest.mark.parametrize("kept", ["keep", "drop"])
async def test_ack_archives_with_or_without_payload(
    store: Store, url: str, kept: ArchivedPayload
) -> None:
    buffer = await store.buffer("math", archived_payload=kept)
    (group_id,) = await buffer.put(long_group("long", 50))
    async with buffer.lease(1, ttl=10):
        pass
    row = await group_row(url, group_id)
    assert (row["group_status"], row["archived_at"] is None) == ("archived", False)
    assert (row["num_episodes"], row["num_tokens"]) == (1, 50)
    if kept == "keep":
        (stored,) = await buffer.get([group_id])
        assert stored.episodes[0].text == "x" * 50
        return
    assert (row["num_bytes"], row["has_transcript"]) == (0, False)
    assert await number_of(url, schema.payload) == await number_of(url, schema.transcript) == 0
    with pytest.raises(rdb.PayloadGoneError) as caught:
        await buffer.get([group_id])
    assert caught.value.group_ids == (group_id,)


async def test_ack_returns_groups_until_max_times_sampled(store: Store, url: str) -> None:
    buffer = await store.buffer("math", on_ack="return", max_times_sampled=3)
    (group_id,) = await buffer.put(groups(1))
    lease = await buffer.lease(1, ttl=10)
    await lease.nack()  # counts as an attempt, not as a draw
    for times in (1, 2):
        async with buffer.lease(1, ttl=10):
            pass
        row = await group_row(url, group_id)
        assert (row["group_status"], row["times_sampled"]) == ("completed", times)
        assert row["attempts"] == 0
    async with buffer.lease(1, ttl=10):
        pass
    row = await group_row(url, group_id)
    assert (row["group_status"], row["times_sampled"]) == ("archived", 3)


async def test_replays_and_leases_count_together(store: Store, url: str) -> None:
    buffer = await store.buffer("math", on_ack="return", max_times_sampled=2)
    await buffer.put(groups(1))
    await buffer.sample(1)
    async with buffer.lease(1, ttl=10):
        pass
    assert await statuses(url) == {"gsm8k-0": "archived"}


async def test_a_queue_leases_a_group_once(store: Store, url: str) -> None:
    buffer = await store.buffer("math", on_ack="return", rate_limit=rdb.Queue(4))
    await buffer.put(groups(2))
    async with buffer.lease(1, ttl=10):
        pass
    await buffer.sample(1)
    assert set((await statuses(url)).values()) == {"archived"}


@postgresql_nightly
@pytest.mark.parametrize("status", ["aborted", "failed", "filtered"])
async def test_other_statuses_are_leased_and_released(
    buffer: Buffer, url: str, status: str
) -> None:
    (group_id, _) = await buffer.put([group("odd", status=status), group("good")])
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.lease(2, ttl=10)
    lease = await buffer.lease(1, ttl=10, statuses=status)
    assert lease.batch.ids == [group_id]
    assert await statuses(url) == {"odd": "leased", "good": "completed"}
    await lease.nack()
    assert await statuses(url) == {"odd": status, "good": "completed"}
    async with buffer.lease(2, rdb.Uniform(), ttl=10, statuses=[status, "completed"]):
        assert set((await statuses(url)).values()) == {"leased"}
    assert set((await statuses(url)).values()) == {"archived"}


async def test_other_statuses_are_leased_in_the_order_of_any_policy(buffer: Buffer) -> None:
    facts: list[tuple[str, float, int | None]] = [
        ("a", 1.0, 3),
        ("b", 9.0, None),
        ("c", 2.0, 1),
        ("d", 3.0, 3),
    ]
    for uid, priority, version in facts:
        await buffer.put(group(priority=99.0, version=0))
        await buffer.put(group(task="code", priority=99.0, version=0, status="aborted"))
        await buffer.put(group(uid, priority=priority, version=version, status="aborted"))
    orders: dict[rdb.SamplingPolicy, str] = {
        rdb.Fifo(): "abcd",
        rdb.Lifo(): "dcba",
        rdb.TopPriority(): "bdca",
        rdb.StalestFirst(): "cadb",
        rdb.FreshestFirst(): "dacb",
    }
    for policy, expected in orders.items():
        lease = await buffer.lease(4, policy, ttl=10, tasks="gsm8k", statuses="aborted")
        assert "".join(one.group_uid for one in lease.batch) == expected, policy
        await lease.nack()


async def test_other_statuses_are_restored_when_the_lease_expires(
    buffer: Buffer, clock: Clock, url: str
) -> None:
    await buffer.put([group("half", status="aborted"), group("good")])
    await buffer.lease(1, ttl=10, statuses="aborted")
    clock.jump(11)
    await buffer.sample(1)
    assert await statuses(url) == {"half": "aborted", "good": "completed"}


async def test_expired_groups_are_leased_to_be_generated_again(store: Store, url: str) -> None:
    buffer = await store.buffer("math", max_staleness=1)
    (group_id,) = await buffer.put(group("old", version=0))
    await buffer.advance_policy(5)
    assert await statuses(url) == {"old": "expired"}
    lease = await buffer.lease(1, ttl=10, statuses="expired")
    await buffer.advance_policy(6)
    assert (await group_row(url, group_id))["staleness"] == 6
    await lease.nack()
    assert await statuses(url) == {"old": "expired"}
    lease = await buffer.lease(1, ttl=10, statuses="expired")
    assert await buffer.put(group("old", version=6), on_duplicate="replace") == [group_id]
    assert await statuses(url) == {"old": "completed"}
    await lease.ack()  # nothing is left to ack
    assert await statuses(url) == {"old": "completed"}
    assert await number_of(url, schema.lease) == 0


async def test_too_stale_while_leased(store: Store, clock: Clock, url: str) -> None:
    buffer = await store.buffer("math", max_staleness=1)
    await buffer.put([group(f"{end}-{i}", version=0) for end in ("nack", "time") for i in (0, 1)])
    nacked = await buffer.lease(2, ttl=10)
    await buffer.lease(2, ttl=10)
    assert await buffer.advance_policy(2) == 0  # leased groups do not expire
    assert set((await statuses(url)).values()) == {"leased"}
    await nacked.ack(nacked.batch.ids[:1])
    await nacked.nack()
    clock.jump(11)
    await buffer.put(group("fresh", version=2))
    assert await statuses(url) == {
        "nack-0": "archived",
        "nack-1": "expired",
        "time-0": "expired",
        "time-1": "expired",
        "fresh": "completed",
    }


async def test_replaced_and_deleted_while_leased(buffer: Buffer, url: str) -> None:
    ids = await buffer.put(groups(3))
    async with buffer.lease(3, ttl=10) as lease:
        await buffer.put(group("gsm8k-0", rewards=[7.0]), on_duplicate="replace")
        await buffer.delete(ids[1:2])
        with pytest.raises(rdb.LeaseExpiredError) as caught:
            await lease.ack(ids[:2])
        assert caught.value.group_ids == tuple(ids[:2])
    assert await statuses(url) == {"gsm8k-0": "completed", "gsm8k-2": "archived"}
    assert (await buffer.get(ids[:1]))[0].rewards.tolist() == [7.0]


async def test_a_lease_without_groups_expires(buffer: Buffer, clock: Clock, url: str) -> None:
    ids = await buffer.put(groups(3))
    gone = await buffer.lease(1, ttl=10)
    await buffer.delete(ids[:1])
    await gone.extend()
    assert await gone.ack(cursor={"trained": 1}) == rdb.AckReport()
    assert await buffer.cursor(name="trained") == 1
    await buffer.put(group("claimed", status="aborted"))
    await buffer.lease(1, ttl=10, statuses="aborted")
    await buffer.put(group("claimed", status="aborted"), on_duplicate="replace")
    clock.jump(11)
    lease = await buffer.lease(1, ttl=10)
    await buffer.sample(1)
    await lease.ack()
    assert await number_of(url, schema.lease) == 0


async def test_priorities_changed_while_leased(buffer: Buffer) -> None:
    ids = await buffer.put(groups(2))
    lease = await buffer.lease(2, ttl=10)
    assert await buffer.update_priorities(ids, [0.0, 5.0]) == 2
    await lease.nack()
    batch = await buffer.sample(1, rdb.Prioritized())
    assert batch.ids == ids[1:]
    assert batch.probabilities.tolist() == [1.0]


async def test_a_damaged_group_in_a_lease(store: Store, url: str) -> None:
    buffer = await store.buffer("math", max_attempts=1)
    ids = await buffer.put(groups(3))
    async with transaction(url) as connection:
        await connection.execute(
            update(schema.payload).where(schema.payload.c.group_id == ids[1]).values(checksum=1)
        )
    with pytest.raises(rdb.CorruptPayloadError) as caught:
        await buffer.lease(3, ttl=10)
    assert caught.value.group_ids == (ids[1],)
    assert caught.value.batch is not None
    assert caught.value.batch.ids == [ids[0], ids[2]]
    # The other groups were not used and are not damaged.
    assert await statuses(url) == {
        "gsm8k-0": "completed",
        "gsm8k-1": "failed",
        "gsm8k-2": "completed",
    }
    assert (await group_row(url, ids[0]))["attempts"] == 0
    assert await number_of(url, schema.lease) == 0
    async with buffer.lease(2, ttl=10) as lease:
        assert lease.batch.ids == [ids[0], ids[2]]


async def test_a_lease_of_expired_groups_has_their_current_staleness(buffer: Buffer) -> None:
    """They keep the staleness with which they expired until they are leased."""
    await buffer.update_settings(max_staleness=1)
    await buffer.put(group("old", version=0))
    for version in (2, 5):
        await buffer.advance_policy(version)
    [found] = await buffer.find(statuses="expired")
    assert found.staleness == 2
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.lease(1, ttl=60, statuses="expired", max_staleness=4)
    lease = await buffer.lease(1, ttl=60, statuses="expired", max_staleness=5)
    (draw,) = await buffer.draws()
    assert (lease.batch.staleness, draw.staleness) == ([5], (5,))
