"""The error if there are not enough groups."""

from __future__ import annotations

import pytest

import replaydb as rdb
from replaydb import Buffer, NotEnoughGroupsError, Store
from support.clock import Clock
from support.groups import group, groups
from support.invariants import statuses
from support.watching import recorded


async def refused(buffer: Buffer, *args: object, **options: object) -> NotEnoughGroupsError:
    with pytest.raises(NotEnoughGroupsError) as caught:
        await buffer.sample(*args, **options)  # type: ignore[arg-type]
    return caught.value


async def test_other_groups_are_counted(store: Store, url: str) -> None:
    buffer = await store.buffer("math", max_times_sampled=1)
    async with Store.open(url, run="stranger") as other:
        await (await other.buffer("math")).put(groups(2, "theirs", tags={"level": "hard"}))
    await buffer.advance_policy(5)
    await buffer.put([*groups(9, version=5, tags={"level": "hard"}), *groups(3, "old", version=1)])
    await buffer.put([group("bad", status="failed"), group("easy", version=5)])
    await buffer.open_group("gsm8k", "slow", 2)
    await buffer.sample(2, rdb.Fifo(), tasks="gsm8k")
    first = await buffer.lease(3, ttl=60, owner="trainer-1", tasks="gsm8k")
    second = await buffer.lease(1, ttl=60, owner="trainer-2", tasks="gsm8k")

    error = await refused(
        buffer, 8, runs="test", max_staleness=1, where=rdb.col.tags["level"] == "hard"
    )
    assert (error.wanted, error.available, error.task_name) == (8, 3, None)
    assert error.by_status == {
        "completed": 9, "leased": 4, "pending": 1, "archived": 2, "failed": 1,
    }  # fmt: skip
    assert error.leased_by == {"trainer-1": 3, "trainer-2": 1}
    assert (error.of_other_runs, error.too_stale, error.filtered_out) == (2, 3, 1)
    assert str(error) == (
        "wanted 8 groups, 3 eligible; "
        "there are 1 pending, 9 completed, 4 leased, 1 failed, 2 archived; "
        "excluded 3 too stale, 2 of other runs, 1 not matching `where`; "
        "leased by trainer-1 (3), trainer-2 (1)"
    )
    error = await refused(buffer, {"theirs": 1, "old": 4}, rdb.Fifo())
    assert (error.task_name, error.by_status, error.leased_by) == ("old", {"completed": 3}, {})
    assert str(error) == "wanted 4 groups of task 'old', 3 eligible; there are 3 completed"
    mix = rdb.Mix([rdb.Share(1, rdb.Fifo()), rdb.Share(1, rdb.Fifo(), where=rdb.col.id < 0)])
    error = await refused(buffer, 2, mix)
    assert error.filtered_out == error.by_status["completed"] == 9
    await first.nack()
    await second.nack()


@pytest.mark.parametrize("call", ["sample", "lease"])
async def test_due_maintenance_is_counted(
    store: Store, clock: Clock, url: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The draw that fails rolls it back, so it is done again, once."""
    buffer = await store.buffer("math", time_to_live=100, max_attempts=2)
    await buffer.put(groups(3, version=0))
    clock.jump(50)
    await buffer.put(groups(4, "code", version=0))
    await buffer.lease(2, ttl=30, owner="crashed", tasks="code")
    await buffer.open_group("gsm8k", "late", 2, deadline=30)
    clock.jump(51)
    for _ in range(2):
        with pytest.raises(NotEnoughGroupsError) as caught:
            await (buffer.sample(9) if call == "sample" else buffer.lease(9, ttl=60))
        error = caught.value
        assert (error.wanted, error.available, error.leased_by) == (9, 4, {})
        assert error.by_status == {"completed": 4, "failed": 1, "archived": 3}
    expired = [one for one in caplog.messages if "expired, 2 groups released" in one]
    assert len(expired) == 1
    assert list((await statuses(url)).values()) == ["archived"] * 3 + ["completed"] * 4 + ["failed"]


async def test_an_empty_buffer(buffer: Buffer) -> None:
    assert str(await refused(buffer, 1)) == "wanted 1 groups, 0 eligible; there are no groups"
    with pytest.raises(NotEnoughGroupsError, match="there are no groups"):
        await buffer.peek(1)


async def test_counting_is_bounded(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replaydb.database.repository.shortage._MOST", 3)
    monkeypatch.setattr(NotEnoughGroupsError, "COUNTED_TO", 3)
    await buffer.put(groups(5))
    error = await refused(buffer, 9, where=rdb.col.id < 0)
    assert "there are 3+ completed; excluded 3+ not matching" in str(error)


async def test_only_failed_calls_count(store: Store, buffer: Buffer) -> None:
    """Neither a draw that succeeds nor a retry of a waiting draw."""

    def counts(statements: list[str]) -> int:
        counting = (sql for sql in statements if "count(*)" in sql.lower())
        return sum("commit_proof" not in sql for sql in counting)

    with recorded(store) as statements:
        await buffer.put(groups(2))
        await buffer.sample(2)
        assert not counts(statements)
        await refused(buffer, 3)
        once = counts(statements)
        assert once
        await refused(buffer, 3, timeout=0.05)
        assert counts(statements) == 2 * once
