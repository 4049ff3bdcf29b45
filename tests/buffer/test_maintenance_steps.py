"""Maintenance of many groups is done in short transactions, before the call that finds it due."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from itertools import chain, repeat
from typing import Any

import pytest

import replaydb as rdb
from replaydb import Buffer, Capacity, Store
from replaydb.database.repository import locked, maintenance
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.runtime import transactions
from support.clock import Clock
from support.groups import episode, group, groups

SIZE = 10
MANY = 35


class Stopped(Exception):
    """Simulated end of the process between two transactions."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "MAINTAINED_AT_ONCE", SIZE)


async def statuses(buffer: Buffer) -> Counter[str]:
    return Counter(one.status.value for one in await buffer.find())


async def expired_lease(buffer: Buffer, clock: Clock) -> None:
    await buffer.put(groups(MANY))
    await buffer.lease(MANY, ttl=50, owner="worker-3")
    clock.jump(60)


async def deadlines(buffer: Buffer, clock: Clock) -> None:
    for number in range(MANY):
        least = 1 if number % 2 else None
        await buffer.open_group("gsm8k", f"g{number}", 2, deadline=50, min_episodes=least)
        await buffer.add_episode(f"g{number}", episode())
    clock.jump(60)


async def old_groups(buffer: Buffer, clock: Clock) -> None:
    await buffer.put(groups(MANY))
    clock.jump(2000)
    await buffer.put(group("young", task="code"))


async def lower_capacity(buffer: Buffer, clock: Clock) -> None:
    await buffer.put(groups(MANY))
    await buffer.update_settings(task_capacity=Capacity(groups=4))


Due = Callable[[Buffer, Clock], Awaitable[None]]
#: What makes it due, the call that does it, and the statuses after one step and at the end.
CASES: dict[str, tuple[Due, Any, dict[str, int], dict[str, int]]] = {
    "leases, draw": (
        expired_lease,
        lambda it: it.sample(1),
        {"completed": 10, "leased": 25},
        {"completed": MANY},
    ),
    "leases, lease": (
        expired_lease,
        lambda it: it.lease(MANY, ttl=60),
        {"completed": 10, "leased": 25},
        {"leased": MANY},
    ),
    "leases, put": (
        expired_lease,
        lambda it: it.put(group("new")),
        {"completed": 10, "leased": 25},
        {"completed": MANY + 1},
    ),
    "leases, update": (
        expired_lease,
        lambda it: it.update(range(1, MANY + 1), status="failed"),
        {"completed": 10, "leased": 25},
        {"failed": MANY},
    ),
    "leases, wait": (
        expired_lease,
        lambda it: it.wait_until(at_least=MANY, statuses="completed", timeout=0),
        {"completed": 10, "leased": 25},
        {"completed": MANY},
    ),
    "deadlines, draw": (
        deadlines,
        lambda it: it.sample(17),
        {"completed": 5, "failed": 5, "pending": 25},
        {"completed": 17, "failed": 18},
    ),
    "old groups, draw": (
        old_groups,
        lambda it: it.sample(1),
        {"archived": 16, "completed": 20},  # a page of 16
        {"archived": MANY, "completed": 1},
    ),
    "lower capacity, put": (
        lower_capacity,
        lambda it: it.put(group("new")),
        {"archived": 10, "completed": 25},
        {"archived": 32, "completed": 4},
    ),
    "lower capacity, episode": (
        lower_capacity,
        lambda it: it.open_group("gsm8k", "new", 1),
        {"archived": 10, "completed": 25},
        {"archived": 32, "completed": 3, "pending": 1},
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_steps(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A call that is stopped after one step has done that; the next one does the rest."""
    make_due, call, after_one, at_end = CASES[case]
    buffer = await store.buffer("math", time_to_live=1000)
    await make_due(buffer, clock)
    step = maintenance.step
    left = 1

    def limited(buffer: LockedBuffer, *, evicts: bool) -> bool:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stopped
        return step(buffer, evicts=evicts)

    with monkeypatch.context() as patch:
        patch.setattr(maintenance, "step", limited)
        with pytest.raises(Stopped):
            await call(buffer)
    assert await statuses(buffer) == after_one
    await call(buffer)
    assert await statuses(buffer) == at_end


async def test_a_draw_that_finds_too_few_keeps_what_was_done(buffer: Buffer, clock: Clock) -> None:
    await expired_lease(buffer, clock)
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(MANY + 1)
    assert await statuses(buffer) == {"completed": MANY}


async def test_the_log_names_a_lease_once_per_step(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "replaydb")
    buffer = await store.buffer("math")
    await expired_lease(buffer, clock)
    await buffer.sample(1)
    assert [one.getMessage() for one in caplog.records] == [
        f"buffer 'math': lease 1 of 'worker-3' expired, {number} groups released"
        for number in (10, 10, 10, 5)
    ]


async def test_leased_groups_do_not_make_a_lower_capacity_repeat(buffer: Buffer) -> None:
    """They cannot be evicted, so the put is refused."""
    await buffer.put(groups(MANY))
    await buffer.lease(MANY - 12, ttl=600)
    await buffer.update_settings(task_capacity=Capacity(groups=4))
    with pytest.raises(rdb.BufferFullError):
        await buffer.put(group("new"), timeout=0)
    assert await statuses(buffer) == {"leased": MANY - 12, "archived": 12}


async def test_a_large_put_into_a_full_buffer_is_one_transaction(store: Store) -> None:
    buffer = await store.buffer("math", capacity=Capacity(groups=30))
    await buffer.put(groups(30))
    ids = await buffer.put([group(f"new-{number}") for number in range(30)])
    assert await statuses(buffer) == {"completed": 30, "archived": 30}
    assert [one.status.value for one in await buffer.find(ids)] == ["completed"] * 30


async def test_a_draw_does_not_evict(buffer: Buffer, clock: Clock) -> None:
    """A lowered capacity takes effect at the next put, however many groups a draw releases."""
    await expired_lease(buffer, clock)
    await buffer.update_settings(capacity=Capacity(groups=4))
    assert len(await buffer.sample(MANY)) == MANY
    assert await statuses(buffer) == {"completed": MANY}
    await buffer.put(group("new"))
    assert await statuses(buffer) == {"archived": MANY - 3, "completed": 4}


async def test_maintenance_that_takes_too_long(
    buffer: Buffer,
    clock: Clock,
    pass_time: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error says so. Each call does a part, until one succeeds."""
    await expired_lease(buffer, clock)
    step = maintenance.step
    durations: Iterator[float] = chain([0.0], repeat(2 * transactions.PATIENCE_SECONDS))

    def slow(buffer: LockedBuffer, *, evicts: bool) -> bool:
        pass_time(next(durations))
        return step(buffer, evicts=evicts)

    monkeypatch.setattr(maintenance, "step", slow)
    with pytest.raises(rdb.DatabaseUnavailableError, match="repeat the call until it succeeds"):
        await buffer.sample(1)
    released = (await statuses(buffer))["completed"]
    assert 0 < released < MANY
    durations = repeat(0.0)
    assert len(await buffer.sample(MANY)) == MANY
