"""The outcome of every drawn group is recorded."""

from __future__ import annotations

import pytest

import replaydb as rdb
from replaydb import Buffer, DrawInfo, DrawOutcome
from support.clock import Clock
from support.groups import group, groups


def outcomes(record: DrawInfo) -> dict[int, tuple[DrawOutcome | None, str | None]]:
    """Return the outcome of each group of a draw, and its reason."""
    facts = zip(record.group_ids, record.outcomes, record.outcome_reasons, strict=True)
    return {one: (outcome, reason) for one, outcome, reason in facts}


async def test_every_outcome(buffer: Buffer, clock: Clock) -> None:
    await buffer.put(groups(7))
    start = clock.now()
    lease = await buffer.lease(6, ttl=60, step=1)
    (leased,) = await buffer.draws()
    assert outcomes(leased) == dict.fromkeys(range(1, 7), (DrawOutcome.LEASED, None))
    assert leased.outcome_times == (None,) * 6

    clock.jump(1)
    await lease.ack([1])
    clock.jump(1)
    await lease.nack([2], reason="out of memory")
    await lease.nack([3])
    await buffer.delete([4])
    await buffer.put(group("gsm8k-4"), on_duplicate="replace")
    clock.jump(100)
    sampled = await buffer.sample(5, rdb.Fifo(), step=2)
    assert sampled.ids == [2, 3, 5, 6, 7]

    again, first = await buffer.draws()
    assert outcomes(first) == {
        1: (DrawOutcome.ACKED, None),
        2: (DrawOutcome.NACKED, "out of memory"),
        3: (DrawOutcome.NACKED, None),
        4: (DrawOutcome.LOST, "deleted"),
        5: (DrawOutcome.LOST, "replaced"),
        6: (DrawOutcome.EXPIRED, None),
    }
    acked, nacked, *_, expired = (
        (time - start).total_seconds() for time in first.outcome_times if time is not None
    )
    assert 1 <= acked < acked + 1 <= nacked < nacked + 100 <= expired
    assert outcomes(again) == dict.fromkeys(sampled.ids, (DrawOutcome.SAMPLED, None))
    assert again.outcome_times == (again.created_at,) * 5


async def test_every_lease_of_a_group_has_an_outcome_of_its_own(
    store: rdb.Store, clock: Clock
) -> None:
    buffer = await store.buffer("math", on_ack="return")
    await buffer.put(group())
    await (await buffer.lease(1, ttl=60)).nack()
    async with buffer.lease(1, ttl=60):
        pass
    await buffer.lease(1, ttl=60)
    clock.jump(61)
    with pytest.raises(ZeroDivisionError):
        async with buffer.lease(1, ttl=60):
            raise ZeroDivisionError("no loss")
    lease = await buffer.lease(1, ttl=60)
    found = [outcomes(record)[1] for record in await buffer.draws()]
    assert found[::-1] == [
        (DrawOutcome.NACKED, None),
        (DrawOutcome.ACKED, None),
        (DrawOutcome.EXPIRED, None),
        (DrawOutcome.NACKED, "ZeroDivisionError: no loss"),
        (DrawOutcome.LEASED, None),
    ]
    await lease.ack()


async def test_deleting_groups_that_are_not_leased_changes_no_outcome(buffer: Buffer) -> None:
    await buffer.put(groups(2))
    await buffer.sample(2)
    async with buffer.lease(1, ttl=60):
        pass
    await buffer.delete([1, 2])
    leased, sampled = await buffer.draws()
    assert leased.outcomes == (DrawOutcome.ACKED,)
    assert sampled.outcomes == (DrawOutcome.SAMPLED,) * 2


async def test_rejected_groups_are_filtered(buffer: Buffer, url: str) -> None:
    await buffer.put(groups(3))
    lease = await buffer.lease(3, ttl=60)
    await lease.reject([1, 2], reason="the answer is in the prompt")
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.reject([1], reason="again")
    await lease.ack()
    (record,) = await buffer.draws()
    rejected = (DrawOutcome.REJECTED, "the answer is in the prompt")
    assert outcomes(record) == {1: rejected, 2: rejected, 3: (DrawOutcome.ACKED, None)}
    assert await buffer.count(statuses="filtered") == 2
    assert {one.status_reason for one in await buffer.get([1, 2])} == {rejected[1]}
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(1)
    assert await buffer.leases() == []
