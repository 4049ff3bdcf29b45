"""Groups that another process deletes or replaces while they are leased."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence
from itertools import permutations

import pytest

import replaydb as rdb
from replaydb import AckReport, Buffer, Store
from support.groups import group, groups
from support.invariants import check_invariants, statuses


@pytest.fixture
async def elsewhere(other: Store, buffer: Buffer) -> Buffer:
    """The same buffer in another process."""
    return await other.buffer("math", create=False)


async def lose(elsewhere: Buffer) -> None:
    """Replace the second of four groups, and delete the third."""
    await elsewhere.put(group("gsm8k-1", "code", rewards=[9.0]), on_duplicate="replace")
    await elsewhere.delete([3])


@pytest.mark.parametrize("records", [True, False])
async def test_an_ack_names_what_was_lost(
    store: Store, other: Store, url: str, records: bool
) -> None:
    buffer = await store.buffer("math", record_draws=records)
    await buffer.put(groups(4))
    lease = await buffer.lease(4, ttl=60)
    await lose(await other.buffer("math"))
    with pytest.raises(rdb.LeaseExpiredError) as caught:
        await lease.ack([1, 2, 3])
    assert caught.value.group_ids == (2, 3)
    report = await lease.ack(cursor={"step": 1}, advance_policy=1)
    assert report == AckReport(settled=(1, 4), gone=(2, 3))
    assert (await buffer.cursor("step"), buffer.policy_version) == (1, 1)
    assert await statuses(url) == {
        "gsm8k-0": "archived", "gsm8k-1": "completed", "gsm8k-3": "archived",
    }  # fmt: skip
    await check_invariants(url)


async def test_an_ack_by_id_names_what_was_lost(buffer: Buffer, elsewhere: Buffer) -> None:
    await buffer.put(groups(4))
    lease = await buffer.lease(4, ttl=60, load=False)
    await lose(elsewhere)
    assert await elsewhere.ack(lease.id) == AckReport(settled=(1, 4), gone=(2, 3))
    assert await buffer.ack(0) == AckReport()


async def test_the_end_of_a_block_logs_what_was_lost(
    buffer: Buffer, elsewhere: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    await buffer.put(groups(4))
    with caplog.at_level(logging.WARNING, "replaydb"):
        async with buffer.lease(4, ttl=60) as lease:
            await lose(elsewhere)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"buffer 'math': groups 2, 3 of lease {lease.id} were deleted, replaced or closed by "
        "another process or a deadline while they were leased; the other 2 groups were acknowledged"
    )


async def test_what_the_holder_settles_or_replaces_is_not_lost(
    buffer: Buffer, elsewhere: Buffer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await buffer.put(groups(7))
    with caplog.at_level(logging.WARNING, "replaydb"):
        async with buffer.lease(7, ttl=60) as lease:
            assert await lease.ack([1]) == AckReport(settled=(1,))
            await lease.nack([2])
            await lease.reject([3], reason="no use")
            await buffer.put(group("gsm8k-3"), on_duplicate="replace")
            await buffer.delete([5])
            assert await elsewhere.put(group("gsm8k-0"), on_duplicate="ignore") == [1]
            await elsewhere.put([group("gsm8k-1"), group("gsm8k-2")], on_duplicate="replace")
    assert not caplog.records
    assert (await statuses(url))["gsm8k-5"] == (await statuses(url))["gsm8k-6"] == "archived"
    (record,) = [one for one in await buffer.draws()]
    assert record.outcomes[3:] == ("lost", "lost", "acked", "acked")


async def test_an_ack_of_all_that_is_left(
    buffer: Buffer, elsewhere: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    await buffer.put(groups(4))
    with caplog.at_level(logging.WARNING, "replaydb"):
        async with buffer.lease(4, ttl=60) as lease:
            await lose(elsewhere)
            assert await lease.ack([1]) == AckReport(settled=(1,), gone=(2, 3))
            assert await lease.ack([4]) == AckReport(settled=(4,), gone=(2, 3))
    assert not caplog.records  # the acks have reported it


async def test_groups_that_several_processes_settle(
    buffer: Buffer, elsewhere: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    await buffer.put(groups(4))
    with caplog.at_level(logging.WARNING, "replaydb"):
        async with buffer.lease(4, ttl=60) as mine:
            theirs = await elsewhere.open_lease(mine.id, ttl=60)
            assert await theirs.ack([1]) == AckReport(settled=(1,))
            await elsewhere.put(group("gsm8k-1"), on_duplicate="replace")  # a holder, too
            await theirs.nack([3])
            assert await mine.ack() == AckReport(settled=(4,))
    assert not caplog.records


async def test_a_process_that_forgot_its_lease_is_no_holder(
    buffer: Buffer, elsewhere: Buffer
) -> None:
    await buffer.put(groups(2))
    lease_id = (await buffer.lease(2, ttl=60)).id
    gc.collect()
    await buffer.put(group("gsm8k-0"), on_duplicate="replace")
    assert await elsewhere.ack(lease_id) == AckReport(settled=(2,), gone=(1,))


async def test_a_lease_that_lost_all_its_groups(
    buffer: Buffer, elsewhere: Buffer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await buffer.put(groups(2))
    with caplog.at_level(logging.WARNING, "replaydb"):
        async with buffer.lease(2, ttl=60):
            await elsewhere.put(groups(2), on_duplicate="replace")
    assert "groups 1, 2 of lease 1" in caplog.text
    await check_invariants(url)


@pytest.mark.parametrize("order", list(permutations(["delete", "renew", "replace"])))
async def test_the_order_in_which_groups_are_lost(
    buffer: Buffer, elsewhere: Buffer, order: Sequence[str]
) -> None:
    """No loss ends a lease."""
    await buffer.put([group(uid) for uid in ("delete", "renew", "replace")])
    lease = await buffer.lease(3, ttl=60, step=7)
    for change in order:
        if change == "delete":
            await elsewhere.delete(uids="delete")
        else:
            await elsewhere.put(group(change), on_duplicate=change)  # type: ignore[arg-type]
    (info,) = await elsewhere.leases()
    assert (info.id, info.group_ids, info.draw_id, info.step) == (lease.id, (), None, None)
    await lease.extend()
    report = await lease.ack(cursor={"step": 1})
    assert report == AckReport(gone=(1, 2, 3))
    assert await buffer.cursor("step") == 1
    assert await buffer.leases() == []


@pytest.mark.parametrize("settle", ["nack", "reject"])
async def test_groups_lost_before_the_others_were_released(
    buffer: Buffer, elsewhere: Buffer, settle: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only an ack can report them, so the lease is kept for it."""
    await buffer.put(groups(2))
    with caplog.at_level(logging.WARNING, "replaydb"):
        async with buffer.lease(2, ttl=60) as lease:
            await elsewhere.delete([1])
            await getattr(lease, settle)([2], reason="bad")
    assert f"groups 1 of lease {lease.id} were deleted" in caplog.text
    assert await buffer.leases() == []


async def test_a_lease_without_groups_is_revoked(buffer: Buffer, elsewhere: Buffer) -> None:
    await buffer.put(group())
    lease = await buffer.lease(1, ttl=60)
    await elsewhere.delete(uids=lease.batch[0].group_uid)
    assert await elsewhere.revoke(lease.id) == []
    assert await buffer.leases() == []
    with pytest.raises(rdb.LeaseExpiredError):
        await lease.ack()


async def test_losses_at_the_same_time(buffer: Buffer, other: Store, url: str) -> None:
    """Groups of several leases and tasks are lost to several processes at once."""
    names = ("a", "b", "c")
    theirs = [await other.buffer("math"), await other.buffer("math")]
    await buffer.put([one for name in names for one in groups(8, name)])
    leases = [await buffer.lease(dict.fromkeys(names, 4), ttl=600) for _ in range(2)]
    held = {group_id: lease for lease in leases for group_id in lease.ids}
    uids = {one.id: one.group_uid for lease in leases for one in lease.batch}
    names_of = {one.id: one.task_name for lease in leases for one in lease.batch}
    lost = sorted(held)[::2]

    async def take(i: int, group_id: int) -> None:
        if i % 2:
            await theirs[0].delete([group_id])
        else:
            copy = group(uids[group_id], names_of[group_id])
            await theirs[1].put(copy, on_duplicate="replace")

    reports = await asyncio.gather(
        leases[0].ack([sorted(leases[0].ids)[1]]), *(take(i, one) for i, one in enumerate(lost))
    )
    assert isinstance(reports[0], AckReport)
    for lease in leases:
        report = await lease.ack()
        assert sorted(report.gone) == [one for one in lost if held[one] is lease]
        settled = {*report.settled, *(reports[0].settled if lease is leases[0] else ())}
        assert settled == set(lease.ids).difference(lost)
    await check_invariants(url)


@pytest.mark.parametrize("settle", ["ack", "nack", "reject"])
@pytest.mark.parametrize("change", ["replace", "delete"])
async def test_a_block_ends_after_its_last_groups_were_settled_by_id(
    buffer: Buffer, elsewhere: Buffer, settle: str, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other group has left the lease, by this process or another."""
    reason = {} if settle == "ack" else {"reason": "bad"}
    for changing in (buffer, elsewhere):
        ids = await buffer.put([group("a", status="aborted"), group("b", status="aborted")])
        async with buffer.lease(2, ttl=600, statuses="aborted") as lease:
            assert lease.ids == ids
            if change == "replace":
                await changing.put(group("a"), on_duplicate="replace")
            else:
                await changing.delete(uids="a")
            await getattr(lease, settle)(ids[1:], **reason)
        assert await buffer.leases() == []
        await buffer.delete(uids=["a", "b"])
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
