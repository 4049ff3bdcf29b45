"""What a buffer looks like at one moment, how fast it changes, and who has to wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import assert_never

from replaydb.display import human_seconds, printable
from replaydb.results import BufferStats, LeaseInfo
from replaydb.settings import MinSize, Queue, SamplesPerInsert

#: Seconds over which rates are taken.
RATE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Look:
    """A buffer at one moment.

    Attributes:
        stats: What is in it.
        leases: Who holds what, expired or not.
        at: When that was, by the monotonic clock.
    """

    stats: BufferStats
    leases: Sequence[LeaseInfo]
    at: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Groups a second of a task, since an earlier look; None where there was none."""

    puts: float | None
    draws: float | None


def followed(looks: deque[Look], last: Look, seconds: float = RATE_SECONDS) -> dict[str, Rates]:
    """Rates of every task, since the first look that is so many seconds old at most.

    Args:
        looks: Those before, which are kept as long as they are of use; `last` is added.
        last: The newest.
        seconds: What happened before them says nothing about now.
    """
    while looks and looks[0].at < last.at - seconds:
        looks.popleft()
    looks.append(last)
    return rates(looks[0], last)


def rates(first: Look, last: Look) -> dict[str, Rates]:
    """Of every task."""
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
    """Leases that have expired, and whose groups nobody has got back yet."""
    return [lease for lease in leases if lease.expires_at <= now]


def waits(stats: BufferStats, expired: Sequence[LeaseInfo] = ()) -> Iterator[str]:
    """Who is held back now, and by what; draws and puts of one group.

    Args:
        stats: Of the buffer.
        expired: Leases as of `overdue`. Whoever comes gets their groups back first, and whoever
            waits does so every second: as long as there are any, nobody is held back.
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
    """When a lease ends, or since when it is over."""
    seconds = (lease.expires_at - now).total_seconds()
    if seconds > 0:
        return f"in {human_seconds(seconds)}"
    is_known = lease.expires_at > lease.acquired_at
    return f"expired {human_seconds(-seconds)} ago" if is_known else "expired"


def empty(stats: BufferStats) -> list[str]:
    """Tasks of which there is nothing to draw, and nothing that is held might come back.

    Whether one is starved or done only those know who put and draw.
    """
    return [task.task_name for task in stats.tasks if not task.num_available + task.num_leased]


def _full(stats: BufferStats) -> Iterator[str]:
    """Capacities that are used up by what cannot be evicted: other groups make room."""
    limits = [("the buffer", stats.settings.capacity, stats.tasks)]
    for task in stats.tasks:
        name = f"task {printable(task.task_name)}"
        limits.append((name, stats.settings.capacity_of(task.task_name), (task,)))
    for name, capacity, tasks in limits:
        held = sum(task.num_leased + task.num_pending for task in tasks)
        if capacity is None or held < sum(task.num_groups for task in tasks):
            continue
        for what in ("groups", "tokens", "bytes"):
            most = getattr(capacity, what)
            used = sum(getattr(task, f"num_{what}") for task in tasks)
            if most is not None and used >= most:
                yield (
                    f"puts wait: {name} is full, {used} of {most} {what}, "
                    "and all of it leased or arriving"
                )
