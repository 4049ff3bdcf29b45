"""What a buffer looks like at one moment, how fast it changes, and who has to wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from replaydb.display import printable
from replaydb.results import BufferStats, LeaseInfo
from replaydb.settings import MinSize, Queue, SamplesPerInsert


@dataclass(frozen=True, slots=True)
class Look:
    """A buffer at one moment.

    Attributes:
        stats: What is in it.
        leases: Who holds what.
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


def waits(stats: BufferStats) -> Iterator[str]:
    """Who has to wait now, and for what; draws and puts of one group."""
    if starved := [task.task_name for task in stats.tasks if not task.num_available]:
        yield f"nothing to draw: {', '.join(map(printable, starved))}"
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


def _full(stats: BufferStats) -> Iterator[str]:
    """Capacities that are used up."""
    limits = [("the buffer", stats.settings.capacity, stats.tasks)]
    for task in stats.tasks:
        name = f"task {printable(task.task_name)}"
        limits.append((name, stats.settings.capacity_of(task.task_name), (task,)))
    for name, capacity, tasks in limits:
        if capacity is None:
            continue
        for what in ("groups", "tokens", "bytes"):
            most = getattr(capacity, what)
            used = sum(getattr(task, f"num_{what}") for task in tasks)
            if most is not None and used >= most:
                yield f"{name} is full: {used} of {most} {what}, so puts evict or wait"
