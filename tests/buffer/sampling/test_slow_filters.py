"""Filters that need a scan of a large task: a draw evaluates them before it locks the tasks.

`test_proportions.py` tests the frequencies of such draws.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import ColumnElement, Select
from sqlalchemy.sql import visitors

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.buffer import drawing
from replaydb.buffer.requests import draw_request
from replaydb.database.repository import draws, preview
from replaydb.database.repository.draw_request import DrawRequest
from replaydb.database.repository.draws import select_eligible
from replaydb.database.repository.preview import select_candidates
from support.clock import Clock
from support.groups import episode, group

RARE = rdb.col.tags["kind"] == "rare"
REQUEST = draw_request(1, rdb.Uniform(), None, RARE, None, None, None)


@pytest.fixture(autouse=True)
def every_task_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every filter would need a scan of a large task."""
    monkeypatch.setattr(draws, "MOST_SCANNED", 0)
    monkeypatch.setattr(draws, "KEYS_READ_AT_LEAST", 0)
    monkeypatch.setattr(draws, "KEYS_READ_PER_GROUP", 1)


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Awaitable[object]]]:
    """Calls to make after each evaluation, before the tasks are locked."""
    calls: list[Callable[[], Awaitable[object]]] = []
    evaluate = drawing.Drawing._evaluated

    async def then_call(
        self: drawing.Drawing, request: DrawRequest, end: float | None
    ) -> DrawRequest:
        evaluated = await evaluate(self, request, end)
        for call in calls:
            await call()
        return evaluated

    monkeypatch.setattr(drawing.Drawing, "_evaluated", then_call)
    return calls


async def put_rare(buffer: Buffer, rare: int, common: int = 30) -> None:
    await buffer.put([group(f"common-{number}") for number in range(common)])
    await buffer.put([group(f"rare-{number}", tags={"kind": "rare"}) for number in range(rare)])


async def until_put(buffer: Buffer) -> None:
    """Put groups, and give calls that wait for some the time to notice."""
    await buffer.put([group(), group()])
    await asyncio.sleep(0.05)


def uids(batch: rdb.Batch) -> list[str]:
    return [one.group_uid for one in batch.groups]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (rdb.Fifo(), ["rare-0", "rare-1", "rare-2"]),
        (rdb.Lifo(), ["rare-9", "rare-8", "rare-7"]),
        (rdb.TopPriority(), ["rare-7", "rare-0", "rare-1"]),
        (rdb.Uniform(), None),
        (rdb.Prioritized(), None),
    ],
)
async def test_the_groups_drawn(
    buffer: Buffer, policy: rdb.SamplingPolicy, expected: list[str] | None
) -> None:
    await put_rare(buffer, 10)
    await buffer.update_priorities([38], [5.0])
    for _ in range(2):  # the first draw does not know yet that the task is large
        batch = await buffer.sample(3, policy, where=RARE)
        drawn = uids(batch)
        assert len(set(drawn)) == 3
        assert all(uid.startswith("rare") for uid in drawn)
        assert expected is None or drawn == expected
        assert batch.staleness == [None] * 3
    everything = await buffer.sample(12, policy, where=RARE, at_least=1)
    assert len(set(uids(everything))) == 10
    mixed = await buffer.sample({"gsm8k": 3, "code": 2}, policy, where=RARE, at_least=1)
    assert len(mixed) == 3


async def test_a_group_that_no_longer_meets_the_filter_is_not_drawn(
    buffer: Buffer, between: list[Callable[[], Awaitable[object]]]
) -> None:
    # With another seed, the first keys may be those of two rare groups: nothing is evaluated then.
    await buffer.update_settings(seed=1)
    await put_rare(buffer, 5)
    between.append(lambda: buffer.update(uids=["rare-1"], tags={"kind": "common"}))
    between.append(lambda: buffer.delete(uids=["rare-2"]))
    between.append(lambda: buffer.update(uids=["rare-3"], status="failed"))
    for policy in (rdb.Uniform(), rdb.Fifo()):
        for n in (2, 5):  # five are too few, so the filter is evaluated again
            batch = await buffer.sample(n, policy, where=RARE, at_least=1)
            assert sorted(uids(batch)) == ["rare-0", "rare-4"]


async def test_groups_put_meanwhile_are_drawn_if_they_are_needed(
    buffer: Buffer, between: list[Callable[[], Awaitable[object]]]
) -> None:
    await put_rare(buffer, 3)
    between.append(lambda: buffer.put(group(tags={"kind": "rare"})))
    assert len(await buffer.sample(4, where=RARE)) == 4
    assert len(await buffer.sample(9, where=RARE, at_least=1)) == 5
    async with await buffer.lease(6, rdb.Uniform(), ttl=60, where=RARE) as lease:
        assert len(lease.batch) == 6


async def test_leases_of_one_moment_share_no_group(buffer: Buffer) -> None:
    """They find the same candidates, of which each then leases others."""
    await put_rare(buffer, 24)
    leases = await asyncio.gather(*(buffer.lease(2, ttl=60, where=RARE) for _ in range(12)))
    assert len({group_id for lease in leases for group_id in lease.batch.ids}) == 24
    with pytest.raises(rdb.NotEnoughGroupsError) as caught:
        await buffer.lease(2, ttl=60, where=RARE)
    assert caught.value.available == 0


async def test_a_waiting_draw(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes locks only if enough groups meet the filter."""
    await put_rare(buffer, 3)
    attempts = 0
    draw_now = drawing.Drawing._draw_now

    async def counted(self: drawing.Drawing, *args: object) -> drawing.Result:
        nonlocal attempts
        attempts += 1
        return await draw_now(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(drawing.Drawing, "_draw_now", counted)
    waiting = asyncio.create_task(buffer.sample(5, where=RARE, timeout=30))
    await until_put(buffer)
    for _ in range(5):
        await until_put(buffer)
    assert attempts <= 2  # one before it listened for commits
    await buffer.put([group(tags={"kind": "rare"}) for _ in range(2)])
    assert len(await waiting) == 5
    assert attempts <= 4


async def test_many_candidates_are_found_under_the_locks(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "MOST_CANDIDATES", 9)
    await put_rare(buffer, 9)
    [quota] = (await buffer._evaluated(REQUEST, None)).quotas
    assert quota.candidates is not None
    assert [len(ids) for ids in quota.candidates.values()] == [9]
    await buffer.put(group(tags={"kind": "rare"}))
    [quota] = (await buffer._evaluated(REQUEST, None)).quotas
    assert quota.candidates is None
    assert len(await buffer.sample(10, where=RARE)) == 10


@pytest.mark.parametrize("policy", [rdb.Uniform(), rdb.Prioritized(), rdb.StalestFirst()])
async def test_the_size_of_a_task_has_no_effect_on_what_is_drawn(
    url: str, policy: rdb.SamplingPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Store.open(url, run="test") as store:
        drawn = []
        for name, most in (("large", 0), ("small", 20_000)):
            monkeypatch.setattr(draws, "MOST_SCANNED", most)
            buffer = await store.buffer(name, seed=1)
            await put_rare(buffer, 9)
            several = [await buffer.sample(n, policy, where=RARE) for n in (3, 1, 2)]
            several.append(await buffer.sample(20, policy))
            drawn.append([uids(batch) for batch in several])
        assert drawn[0] == drawn[1]


async def test_a_large_task_is_not_scanned_under_its_locks(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless too few of the groups found before meet the filter under the locks."""
    scans = 0

    def counted(*args: Any) -> Any:
        nonlocal scans
        scans += 1
        return select_eligible(*args)

    monkeypatch.setattr(draws, "select_eligible", counted)
    await put_rare(buffer, 9)
    for policy in (rdb.Uniform(), rdb.Fifo()):
        await buffer.sample(3, policy, where=RARE)
        await buffer.sample({"gsm8k": 2, "code": 2}, policy, where=RARE, at_least=2)
    assert scans == 0
    await buffer.sample(12, where=RARE, at_least=1)
    assert scans == 1


@pytest.mark.parametrize("reason", ["an expired lease", "a passed deadline"])
async def test_a_waiting_draw_gets_groups_that_maintenance_returns(
    buffer: Buffer, clock: Clock, reason: str
) -> None:
    """Before that, none of them is a candidate, and nothing else takes the locks."""
    await put_rare(buffer, 3)
    if reason == "an expired lease":
        await buffer.lease(3, rdb.Fifo(), ttl=60, where=RARE)
    else:
        await buffer.delete(tasks="gsm8k")
        for number in range(3):
            await buffer.open_group(
                "gsm8k", f"open-{number}", 2, tags={"kind": "rare"}, deadline=60, min_episodes=1
            )
            await buffer.add_episode(f"open-{number}", episode())
    waiting = asyncio.create_task(buffer.sample(3, where=RARE, timeout=None))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    clock.jump(61)
    async with asyncio.timeout(60):
        assert len(await waiting) == 3


async def test_the_evaluation_uses_the_tag_index(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it reads all groups of the buffer."""
    read: list[object] = []

    def recorded(condition: ColumnElement[bool], most: int) -> Select[Any]:
        read.extend(getattr(part, "value", None) for part in visitors.iterate(condition))
        return select_candidates(condition, most)

    monkeypatch.setattr(preview, "select_candidates", recorded)
    async with Store.open(url, run="test") as store:
        buffer = await store.buffer("math", indexed_tags=["kind"])
        await put_rare(buffer, 3, common=30)
        assert (await buffer._evaluated(REQUEST, None)).is_evaluated
    assert [31, 32, 33] in read
