"""What a buffer looks like at one moment, and how fast it changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, assert_never

from replaydb.cli.console import table_of
from replaydb.display import human_seconds, human_size, printable
from replaydb.episodes import GroupStatus
from replaydb.settings import MinSize, Queue, SamplesPerInsert

if TYPE_CHECKING:
    from rich.console import RenderableType

    from replaydb import BufferStats, GroupTotals, LeaseInfo, TaskCounters

#: Leases that are shown, the oldest.
SHOWN_LEASES = 10


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
    limits = [("the buffer", stats.settings.capacity, stats.totals)]
    for task in stats.tasks:
        own = [total for total in stats.totals if total.task_name == task.task_name]
        name = f"task {printable(task.task_name)}"
        limits.append((name, stats.settings.capacity_of(task.task_name), tuple(own)))
    for name, capacity, totals in limits:
        if capacity is None:
            continue
        kept = _kept(totals)
        for what in ("groups", "tokens", "bytes"):
            most = getattr(capacity, what)
            used = sum(getattr(total, f"num_{what}") for total in kept)
            if most is not None and used >= most:
                yield f"{name} is full: {used} of {most} {what}, so puts evict or wait"


def frame(first: Look, last: Look, problem: str | None = None) -> RenderableType:
    """What `replaydb watch` shows."""
    from rich.console import Group
    from rich.text import Text

    fast = rates(first, last)
    lines = [_headline(last.stats, fast.values())]
    lines += list(waits(last.stats))
    if problem is not None:
        lines.append(f"as it was before: {printable(problem)}")
    parts: list[RenderableType] = [Text(line) for line in lines]
    parts.append(_tasks(last.stats, fast))
    if last.leases:
        parts.append(_leases(last.leases, datetime.now(UTC)))
    return Group(*parts)


def _headline(stats: BufferStats, fast: Collection[Rates]) -> str:
    kept = _kept(stats.totals)
    parts = [
        printable(stats.name),
        f"policy version {stats.policy_version}",
        f"{sum(total.num_groups for total in kept)} groups",
        f"{sum(total.num_tokens for total in kept)} tokens",
        human_size(sum(total.num_bytes for total in kept)),
        f"{sum(rate.puts or 0 for rate in fast):.3g} put/s",
        f"{sum(rate.draws or 0 for rate in fast):.3g} drawn/s",
        f"{datetime.now(UTC):%H:%M:%S} UTC",
    ]
    return " · ".join(parts)


def _tasks(stats: BufferStats, fast: dict[str, Rates]) -> RenderableType:
    headings = (
        *("task", "put/s", "drawn/s", "ready", "arriving", "leased", "other", "reward"),
        *("staleness: min", "mean", "max", "limit"),
    )
    rows = []
    for task in stats.tasks:
        own = [total for total in stats.totals if total.task_name == task.task_name]
        rate = fast[task.task_name]
        rows.append(
            (task.task_name, rate.puts, rate.draws, *_counts(task, own), *_spread(task, own))
        )
    return table_of(headings, rows)


def _counts(task: TaskCounters, totals: Sequence[GroupTotals]) -> tuple[object, ...]:
    listed = task.num_available + task.num_pending + task.num_leased
    ready = [total for total in totals if total.status == GroupStatus.COMPLETED]
    return (
        task.num_available,
        task.num_pending,
        task.num_leased,
        sum(total.num_groups for total in totals) - listed,
        ready[0].reward_mean if ready else None,
    )


def _spread(task: TaskCounters, totals: Sequence[GroupTotals]) -> tuple[object, ...]:
    """Staleness of what can be drawn."""
    for total in totals:
        if total.status == GroupStatus.COMPLETED:
            found = (total.min_staleness, total.mean_staleness, total.max_staleness)
            return (*found, task.max_staleness)
    return None, None, None, task.max_staleness


def _leases(leases: Sequence[LeaseInfo], now: datetime) -> RenderableType:
    rows = [
        (
            info.id,
            info.owner,
            info.step,
            info.num_groups,
            human_seconds((now - info.acquired_at).total_seconds()),
            human_seconds((info.expires_at - now).total_seconds()),
        )
        for info in leases[:SHOWN_LEASES]
    ]
    more = len(leases) - len(rows)
    return table_of(
        ("lease", "owner", "step", "groups", "held for", "ends in"),
        rows,
        caption=f"and {more} more leases" if more else None,
    )


def _kept(totals: Iterable[GroupTotals]) -> list[GroupTotals]:
    """What counts against capacities."""
    return [total for total in totals if total.status != GroupStatus.ARCHIVED]
