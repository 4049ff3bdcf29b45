"""Many concurrent callers: no deadlock, no lost update, and consistent counters."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError

import replaydb as rdb
from replaydb import Buffer, Capacity, SamplingPolicy, Store
from replaydb.database.postgresql.errors import PostgresqlErrors
from replaydb.database.repository.puts import OnDuplicate
from support.groups import episode, group
from support.invariants import check_invariants

TASKS = ["a", "b", "c"]
#: Errors that a caller may get with this many concurrent callers.
EXPECTED = (
    rdb.NotEnoughGroupsError,
    rdb.RateLimitedError,
    rdb.BufferFullError,
    rdb.LeaseExpiredError,
    rdb.GroupClosedError,
    rdb.UnknownGroupError,
    rdb.DuplicateEpisodeError,
    rdb.DuplicateGroupError,
)


@pytest.fixture(params=[0.8, pytest.param(3.0, marks=pytest.mark.nightly)])
def seconds(request: pytest.FixtureRequest) -> float:
    """How long the callers run."""
    number: float = request.param
    return number


@pytest.fixture
def conflicts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the SQLSTATE of every transaction that lost a race, even if it was repeated."""
    seen: list[str] = []
    is_conflict = PostgresqlErrors.is_conflict

    def noted(errors: PostgresqlErrors, error: BaseException) -> bool:
        found = is_conflict(errors, error)
        if found and isinstance(error, DBAPIError):
            seen.append(str(getattr(error.orig, "sqlstate", None)))
        return found

    monkeypatch.setattr(PostgresqlErrors, "is_conflict", noted)
    return seen


async def act(buffer: Buffer, chance: random.Random, name: str) -> None:
    """Make one random call."""
    side: Side = chance.choice([put, put, draw, draw, hold, hold, keep])
    await side(buffer, chance, name)


Side = Callable[[Buffer, random.Random, str], Awaitable[object]]


async def put(buffer: Buffer, chance: random.Random, name: str) -> None:
    tasks = [*TASKS, *TASKS, f"rare-{chance.randrange(40)}"]
    cursors = {cursor: name for cursor in chance.sample(["x", "y", "z"], 2)}
    version = buffer.policy_version
    match chance.randrange(4):
        case 0 | 1:
            several = [group(task=chance.choice(tasks), version=version) for _ in range(4)]
            await buffer.put(several, timeout=0, cursor=chance.choice([None, cursors]))
        case 2:
            uids = {f"shared-{chance.randrange(10)}" for _ in range(2)}
            several = [group(uid, chance.choice(TASKS)) for uid in uids]
            how: OnDuplicate = "replace" if chance.random() < 0.5 else "ignore"
            await buffer.put(several, timeout=0, on_duplicate=how)
        case 3:
            uid = f"{name}-{time.monotonic_ns()}"
            await buffer.open_group(chance.choice(TASKS), uid, 3, deadline=0.2, timeout=0)
            adding = (buffer.add_episode(uid, episode(version=version)) for _ in range(3))
            await asyncio.gather(*adding)


async def draw(buffer: Buffer, chance: random.Random, name: str) -> None:
    policies: list[SamplingPolicy] = [rdb.Uniform(), rdb.Prioritized(), rdb.Fifo()]
    policies.append(rdb.Mix({"b": 1, "a": 1}))
    if chance.random() < 0.7:
        await buffer.sample(4, chance.choice(policies))
    else:
        await buffer.sample({"c": 1, "a": 2}, rdb.Lifo())


async def hold(buffer: Buffer, chance: random.Random, name: str) -> None:
    match chance.randrange(3):
        case 0:
            async with buffer.lease({"b": 2, "a": 1}, ttl=0.2) as lease:
                await asyncio.sleep(chance.uniform(0, 0.02))
                cursors = {cursor: name for cursor in chance.sample(["x", "y", "z"], 2)}
                await lease.ack(lease.batch.ids[:1], cursor=cursors)
        case 1:
            await buffer.lease(2, rdb.Uniform(), ttl=0.01)  # never acked or released
        case 2:
            lease = await buffer.lease(2, rdb.Lifo(), ttl=0.05)
            await asyncio.sleep(chance.uniform(0, 0.1))
            if chance.random() < 0.3:
                await lease.extend()
            await (lease.ack() if chance.random() < 0.5 else lease.nack())


async def keep(buffer: Buffer, chance: random.Random, name: str) -> None:
    match chance.randrange(3):
        case 0:
            version = buffer.policy_version + 1
            await buffer.advance_policy(version, take_over=chance.random() < 0.5)
        case 1:
            ids = (await buffer.sample(3)).ids
            await buffer.update_priorities(ids, [chance.uniform(0, 2) for _ in ids])
            await buffer.delete(ids[:1])
        case 2:
            await buffer.count(tasks="a")


@pytest.mark.parametrize(
    "settings",
    [
        {"max_staleness": 20, "max_attempts": 3},
        {"capacity": Capacity(groups=60), "max_times_sampled": 3, "on_evict": "delete"},
        {"task_capacity": Capacity(groups=25), "on_ack": "return", "archived_payload": "drop"},
        {"rate_limit": rdb.SamplesPerInsert(1.0, 4, 40.0), "time_to_live": 0.5},
    ],
    ids=["open", "capacity", "task_capacity", "rate_limit"],
)
async def test_anything_at_once(
    store: Store,
    other: Store,
    url: str,
    conflicts: list[str],
    seconds: float,
    settings: dict[str, Any],
) -> None:
    buffers = [await store.buffer("math", **settings), await other.buffer("math")]
    until = time.monotonic() + seconds
    done = 0

    async def caller(number: int) -> None:
        nonlocal done
        chance = random.Random(number)
        while time.monotonic() < until:
            try:
                await act(buffers[number % 2], chance, f"c{number}")
            except EXPECTED:
                pass
            except rdb.InvalidInputError as error:
                if error.field not in {"version", "run"}:  # another caller advanced further
                    raise
            done += 1

    async with asyncio.timeout(seconds + 60), asyncio.TaskGroup() as callers:
        for number in range(12):
            callers.create_task(caller(number))
    await check_invariants(url)
    assert "40P01" not in conflicts, "deadlock"


async def test_settings_change_while_all_are_at_work(
    store: Store, other: Store, url: str, conflicts: list[str], seconds: float
) -> None:
    buffers = [await store.buffer("math"), await other.buffer("math")]
    until = time.monotonic() + seconds

    async def caller(number: int) -> None:
        chance = random.Random(100 + number)
        while time.monotonic() < until:
            try:
                await act(buffers[number % 2], chance, f"c{number}")
            except EXPECTED:
                pass
            except rdb.InvalidInputError as error:
                if error.field not in {"version", "run", "groups", "n"}:
                    raise

    async def changer() -> None:
        chance = random.Random(7)
        while time.monotonic() < until:
            await asyncio.sleep(0.02)
            await chance.choice(buffers).update_settings(
                capacity=chance.choice([None, Capacity(groups=40)]),
                task_capacity=chance.choice(
                    [None, Capacity(groups=20), {"a": Capacity(tokens=90)}]
                ),
                rate_limit=chance.choice([None, rdb.MinSize(3), rdb.Queue(30)]),
                max_staleness=chance.choice([None, 3]),
                priority_exponent=chance.choice([0.5, 1.0]),
                seed=chance.choice([None, 1]),
                record_draws=chance.choice([False, True]),
            )

    async with asyncio.timeout(seconds + 60), asyncio.TaskGroup() as callers:
        callers.create_task(changer())
        for number in range(8):
            callers.create_task(caller(number))
    await check_invariants(url)
    assert "40P01" not in conflicts, "deadlock"


async def test_cancelled_at_random(store: Store, other: Store, url: str, seconds: float) -> None:
    settings: dict[str, Any] = {"capacity": Capacity(groups=50), "max_staleness": 20}
    buffers = [await store.buffer("math", **settings), await other.buffer("math")]
    chance = random.Random(3)

    async def one(number: int) -> None:
        try:
            await act(buffers[number % 2], random.Random(number), f"c{number}")
        except (*EXPECTED, rdb.InvalidInputError):
            pass

    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        calls = [asyncio.ensure_future(one(number + i)) for i in range(6)]
        number += len(calls)
        await asyncio.sleep(chance.uniform(0, 0.03))
        for call in calls:
            call.cancel()
        await asyncio.wait(calls, timeout=60)
        assert all(call.done() for call in calls)
        failed = [call.exception() for call in calls if not call.cancelled()]
        assert not any(failed), failed
    await check_invariants(url)
