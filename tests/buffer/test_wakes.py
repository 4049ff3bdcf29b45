"""Waiting calls are woken by every change that can end the wait, not by polling."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import replaydb as rdb
from replaydb import Buffer, Capacity, Lease, Queue, Store
from replaydb.buffer import waiting
from replaydb.database.runtime.signals import Signal
from support.groups import episode, group
from support.other_process import other_process
from support.wait_counter import WaitCounter


class Wait(NamedTuple):
    """A waiting call, and what ends the wait.

    Attributes:
        settings: Settings of the buffer, which has one group.
        is_leased: Whether the group is leased.
        begin: Starts the waiting call.
        end: Ends the wait.
    """

    settings: dict[str, Any]
    is_leased: bool
    begin: Callable[[Buffer], Coroutine[Any, Any, Any]]
    end: Callable[[Buffer, Lease | None], Awaitable[Any]]


def sample(buffer: Buffer) -> Coroutine[Any, Any, Any]:
    return buffer.sample(1, timeout=600)


def put(buffer: Buffer) -> Coroutine[Any, Any, Any]:
    return buffer.put(group("next"), timeout=600)


def sample_important(buffer: Buffer) -> Coroutine[Any, Any, Any]:
    return buffer.sample(1, where=rdb.col.priority > 5.0, timeout=600)


async def sample_arriving(buffer: Buffer) -> Any:
    await buffer.open_group("gsm8k", "open", 1)
    return await sample(buffer)


async def sample_fresh(buffer: Buffer) -> Any:
    await buffer.put(group("old", version=0))
    await buffer.advance_policy(1)
    return await buffer.sample(1, max_staleness=0, timeout=600)


def sample_hard(buffer: Buffer) -> Coroutine[Any, Any, Any]:
    return buffer.sample(1, where=rdb.col.tags["level"].as_string() == "hard", timeout=600)


async def acked_by_id(buffer: Buffer, lease: Lease | None) -> None:
    assert lease is not None
    await buffer.ack(lease.id)


async def revoked(buffer: Buffer, lease: Lease | None) -> None:
    assert lease is not None
    await buffer.revoke(lease.id)


def ack(_buffer: Buffer, lease: Lease | None) -> Awaitable[rdb.AckReport]:
    assert lease is not None
    return lease.ack()


def nack(_buffer: Buffer, lease: Lease | None) -> Awaitable[None]:
    assert lease is not None
    return lease.nack()


WAITS = {
    "a nack gives a group back": Wait({}, True, sample, nack),
    "an ack gives a group back": Wait({"on_ack": "return"}, True, sample, ack),
    "an ack makes room": Wait({"capacity": Capacity(groups=1)}, True, put, ack),
    "a nack makes room": Wait({"capacity": Capacity(groups=1)}, True, put, nack),
    "a priority meets a filter": Wait(
        {}, False, sample_important, lambda b, _: b.update_priorities([1], [9.0])
    ),
    "a deletion makes room": Wait({"rate_limit": Queue(1)}, False, put, lambda b, _: b.delete([1])),
    "other settings make room": Wait(
        {"rate_limit": Queue(1)}, False, put, lambda b, _: b.update_settings(rate_limit=None)
    ),
    "a group is put": Wait({}, True, sample, lambda b, _: b.put(group("next"))),
    "the last episode arrives": Wait(
        {}, True, sample_arriving, lambda b, _: b.add_episode("open", episode())
    ),
    "an ack by id gives a group back": Wait({"on_ack": "return"}, True, sample, acked_by_id),
    "a revocation gives a group back": Wait({}, True, sample, revoked),
    "tags meet a filter": Wait(
        {}, False, sample_hard, lambda b, _: b.update([1], tags={"level": "hard"})
    ),
    "an earlier policy makes a group fresh": Wait(
        {}, True, sample_fresh, lambda b, _: b.advance_policy(0, rewind=True)
    ),
    "a draw makes room": Wait({"rate_limit": Queue(1)}, False, put, lambda b, _: b.sample(1)),
}


@pytest.fixture
def wait_counter(monkeypatch: pytest.MonkeyPatch) -> WaitCounter:
    return WaitCounter(monkeypatch)


@pytest.mark.parametrize("name", WAITS)
async def test_a_change_of_this_process_wakes(
    store: Store, wait_counter: WaitCounter, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without polling the SQLite file for changes by other processes."""
    monkeypatch.setattr("replaydb.database.sqlite.backend.WATCH_SECONDS", (600.0, 600.0))
    case = WAITS[name]
    buffer = await store.buffer("math", **case.settings)
    await buffer.put(group("first"))
    lease = await buffer.lease(1, ttl=600) if case.is_leased else None
    waiter = asyncio.create_task(case.begin(buffer))
    await wait_counter.until_asleep()
    assert not waiter.done()
    await case.end(buffer, lease)
    assert len(await asyncio.wait_for(waiter, 60)) == 1


@pytest.mark.parametrize("end", ["ack", "nack"])
async def test_a_change_of_another_process_wakes(
    store: Store, url: str, wait_counter: WaitCounter, end: str
) -> None:
    buffer = await store.buffer("math", on_ack="return")
    [group_id] = await buffer.put(group("first"))
    async with other_process(end, url, "math") as other:  # it has leased the group
        waiter = asyncio.create_task(buffer.sample(1, rdb.Fifo(), timeout=600))
        await wait_counter.until_asleep()
        assert not waiter.done()
        await other.act()
        assert (await asyncio.wait_for(waiter, 60)).ids == [group_id]


def watchers() -> int:
    """Return the tasks that watch for commits of other processes."""
    return sum("._watch" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def test_commits_of_others_are_watched_only_while_a_call_waits(
    store: Store, wait_counter: WaitCounter
) -> None:
    buffer = await store.buffer("math")
    waiter = asyncio.create_task(buffer.sample(1, timeout=600))
    await wait_counter.until_asleep()
    assert watchers() == 1
    await buffer.put(group("next"))
    await asyncio.wait_for(waiter, 60)
    assert watchers() == 0


async def test_a_long_wait_checks_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many commits there are: after a second it has checked once per 0.1 s at most."""
    monkeypatch.setattr(waiting, "CHECK_SHARE", 0.2)
    monkeypatch.setattr(waiting, "CHECK_SECONDS", 0.1)
    signal, error, checks = Busy(), rdb.NotEnoughGroupsError(1, 0), [0.0]
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 0.001

    async def never(end: float | None) -> bool:
        checks.append(now)
        return False

    monkeypatch.setattr(waiting, "_now", lambda: now)
    monkeypatch.setattr(waiting, "asyncio", SimpleNamespace(sleep=sleep))
    async with waiting.Waiter(signal, "math", 1.5) as waiter:
        await waiter.wait(error, never)  # until the last attempt
        with pytest.raises(rdb.NotEnoughGroupsError):
            await waiter.wait(error, never)
    pauses = [(one, after - one) for one, after in pairwise(checks[2:-1])]
    assert all(pause >= min(0.2 * one, 0.1) for one, pause in pauses), pauses
    assert signal.num_waits > 5


async def test_a_heartbeat_wakes_no_call(buffer: Buffer) -> None:
    """Nor does another process that takes over a lease: no group has changed."""
    await buffer.put(group())
    lease = await buffer.lease(1, ttl=60)
    ticket = buffer._database.signal.ticket()
    await lease.extend()
    await buffer.open_lease(lease.id, ttl=60)
    assert not ticket.is_set()
    await lease.ack()
    assert ticket.is_set()


class Busy(Signal):
    """Another process commits all the time."""

    num_waits = 0

    async def wait(self, ticket: asyncio.Event, timeout: float) -> None:
        self.num_waits += 1
        await asyncio.sleep(0)

    async def _watch(self) -> None:
        raise NotImplementedError

    def _publish(self) -> None:
        raise NotImplementedError
