"""Snapshots of a buffer, its rates, and which calls are blocked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import assert_never

from replaydb.domain.results import BufferStats, LeaseInfo, has_expired
from replaydb.domain.settings import MinSize, Queue, SamplesPerInsert
from replaydb.util.display import human_seconds, printable

#: Time window of rates, in seconds.
RATE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class BufferSnapshot:
    """A buffer at one point in time.

    Attributes:
        stats: Counters and totals.
        leases: Leases, active and expired.
        at: Time of the snapshot, by the monotonic clock.
    """

    stats: BufferStats
    leases: Sequence[LeaseInfo]
    at: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Groups per second of a task since an earlier snapshot; None without one."""

    puts: float | None
    draws: float | None


def followed(
    snapshots: deque[BufferSnapshot], last: BufferSnapshot, window: float = RATE_SECONDS
) -> dict[str, Rates]:
    """Add a snapshot and return the rates of every task over the last `window` seconds.

    Args:
        snapshots: Earlier snapshots, oldest first. Those older than `window` are removed, and
            `last` is added.
        last: The newest snapshot.
        window: Time window of the rates, in seconds.
    """
    while snapshots and snapshots[0].at < last.at - window:
        snapshots.popleft()
    snapshots.append(last)
    first = snapshots[0]
    seconds = last.at - first.at
    if seconds <= 0:
        return {task.task_name: Rates(None, None) for task in last.stats.tasks}
    before = {task.task_name: (task.num_inserted, task.num_sampled) for task in first.stats.tasks}
    found = {}
    for task in last.stats.tasks:
        inserted, sampled = before.get(task.task_name, (0, 0))
        puts, draws = task.num_inserted - inserted, task.num_sampled - sampled
        found[task.task_name] = Rates(puts / seconds, draws / seconds)
    return found


def overdue(leases: Iterable[LeaseInfo], now: datetime) -> list[LeaseInfo]:
    """Return the leases that have expired but whose groups are not released yet."""
    return [lease for lease in leases if has_expired(lease, now)]


def waits(stats: BufferStats, expired: Sequence[LeaseInfo] = ()) -> Iterator[str]:
    """Yield which calls are blocked now, and by what: draws and puts of one group.

    Args:
        stats: Statistics of the buffer.
        expired: Leases as returned by `overdue`. While there are any, nothing is reported: the next
            call releases their groups, and waiting calls check every second.
    """
    if expired:
        return
    available = sum(task.num_available for task in stats.tasks)
    limit = stats.settings.rate_limit
    match limit:
        case None:
            pass
        case MinSize(size=size):
            if available < size:
                yield f"draws wait: {available} groups can be drawn ({limit})"
        case Queue(size=size):
            waiting = available + sum(task.num_pending for task in stats.tasks)
            if waiting >= size:
                yield f"puts wait: {waiting} groups wait to be drawn ({limit})"
        case SamplesPerInsert():
            inserts, samples = stats.limited_inserts, stats.limited_samples
            ahead = inserts * limit.ratio - samples
            middle = limit.min_size * limit.ratio
            since = f"{inserts} put, {samples} drawn ({limit})"
            if inserts < limit.min_size or ahead - 1 < middle - limit.error_buffer:
                yield f"draws wait: {since}"
            if inserts >= limit.min_size and ahead + limit.ratio > middle + limit.error_buffer:
                yield f"puts wait: {since}"
        case _:
            assert_never(limit)
    yield from _full(stats)


def end(lease: LeaseInfo, now: datetime) -> str:
    """Format when a lease expires, or how long ago it expired."""
    seconds = (lease.expires_at - now).total_seconds()
    if seconds > 0:
        return f"in {human_seconds(seconds)}"
    is_known = lease.expires_at > lease.acquired_at
    return f"expired {human_seconds(-seconds)} ago" if is_known else "expired"


def empty(stats: BufferStats) -> list[str]:
    """Return the tasks without available and leased groups.

    Only producers and consumers know whether such a task is starved or finished.
    """
    return [task.task_name for task in stats.tasks if not task.num_available + task.num_leased]


def _full(stats: BufferStats) -> Iterator[str]:
    """Yield the capacities that are full of groups that cannot be evicted."""
    limits = [("the buffer", stats.settings.capacity, stats.tasks)]
    for task in stats.tasks:
        name = f"task {printable(task.task_name)}"
        limits.append((name, stats.settings.capacity_of(task.task_name), (task,)))
    for name, capacity, tasks in limits:
        unevictable = sum(task.num_leased + task.num_pending for task in tasks)
        if capacity is None or unevictable < sum(task.num_groups for task in tasks):
            continue
        for what in ("groups", "tokens", "bytes"):
            most = getattr(capacity, what)
            used = sum(getattr(task, f"num_{what}") for task in tasks)
            if most is not None and used >= most:
                yield (
                    f"puts wait: {name} is full, {used} of {most} {what}, "
                    "and all of it leased or pending"
                )
