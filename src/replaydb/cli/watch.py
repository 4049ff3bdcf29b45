"""`replaydb watch`: live statistics of a buffer: headline, tasks and leases."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import BufferName, Url, console, finite, table_of, with_buffer
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.monitoring import (
    RATE_SECONDS,
    BufferSnapshot,
    Rates,
    empty,
    end,
    followed,
    overdue,
    waits,
)
from replaydb.errors import DatabaseUnavailableError
from replaydb.util.display import human_seconds, human_size, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from replaydb import Buffer, BufferStats, GroupTotals, LeaseInfo, TaskCounters

#: Maximum number of leases shown, oldest first.
SHOWN_LEASES = 10


def watch(
    url: Url,
    buffer: BufferName,
    interval: Annotated[
        float, typer.Option(min=0.1, callback=finite, help="Refresh interval in seconds.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Measure rates for one interval, print once and exit.")
    ] = False,
) -> None:
    """Show live sizes, rates, staleness, leases and blocked calls of a buffer until Ctrl-C."""
    from rich.live import Live

    where = console()
    with suppress(KeyboardInterrupt):
        if once or not where.is_terminal:
            num_polls = 2 if once else None
            with_buffer(url, buffer, lambda buffer: poll(buffer, interval, num_polls, where.print))
            return
        with Live(console=where, auto_refresh=False) as live:
            with_buffer(
                url,
                buffer,
                lambda buffer: poll(
                    buffer, interval, None, lambda shown: live.update(shown, refresh=True)
                ),
            )


async def poll(
    buffer: Buffer, interval: float, num_polls: int | None, show: Callable[..., object]
) -> None:
    """Read statistics of a buffer repeatedly and show them.

    Args:
        buffer: The buffer.
        interval: Seconds between reads.
        num_polls: Number of reads, of which only the last is shown; None reads until cancelled
            and shows each.
        show: Called with each screen.

    Raises:
        DatabaseUnavailableError: The first read failed, or any read if `num_polls` is given.
    """
    snapshots: deque[BufferSnapshot] = deque()
    fast: dict[str, Rates] = {}
    for number in count(1):
        if snapshots:
            await asyncio.sleep(interval)
        problem = None
        try:
            stats, leases = await buffer.stats(), await buffer.leases(expired=True)
            last = BufferSnapshot(stats, leases, time.monotonic())
            fast = followed(snapshots, last, max(RATE_SECONDS, 2 * interval))
        except DatabaseUnavailableError as error:
            if not snapshots or num_polls is not None:
                raise
            problem = str(error)
        if num_polls is None or number == num_polls:
            show(frame(snapshots[-1], fast, problem))
        if number == num_polls:
            return


def frame(
    last: BufferSnapshot, fast: dict[str, Rates], problem: str | None = None
) -> RenderableType:
    """Return one screen of `replaydb watch`.

    Args:
        last: The last snapshot.
        fast: Rates of each task.
        problem: The error of a later attempt to read the buffer, if it failed.
    """
    from rich.console import Group
    from rich.text import Text

    lines = [_headline(last.stats, fast.values())]
    now = datetime.now(UTC)
    lines += list(waits(last.stats, overdue(last.leases, now)))
    if names := empty(last.stats):
        lines.append(f"no groups to draw: {', '.join(map(printable, names))}")
    if problem is not None:
        lines.append(f"showing the last snapshot: {printable(problem)}")
    parts: list[RenderableType] = [Text(line) for line in lines]
    parts.append(_tasks(last.stats, fast))
    if last.leases:
        parts.append(_leases(last.leases, now))
    return Group(*parts)


def _headline(stats: BufferStats, fast: Collection[Rates]) -> str:
    parts = [
        printable(stats.name),
        f"policy version {stats.policy_version}",
        f"{sum(task.num_groups for task in stats.tasks)} groups",
        f"{sum(task.num_tokens for task in stats.tasks)} tokens",
        human_size(sum(task.num_bytes for task in stats.tasks)),
        f"{_sum(rate.puts for rate in fast)} put/s",
        f"{_sum(rate.draws for rate in fast)} drawn/s",
        f"{datetime.now(UTC):%H:%M:%S} UTC",
    ]
    return " · ".join(parts)


def _sum(rates: Iterable[float | None]) -> str:
    known = [rate for rate in rates if rate is not None]
    return f"{sum(known):.3g}" if known else "-"


def _tasks(stats: BufferStats, fast: dict[str, Rates]) -> RenderableType:
    headings = (
        *("task", "put/s", "drawn/s", "completed", "pending", "leased", "other", "reward"),
        *("min staleness", "mean staleness", "max staleness", "staleness limit"),
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
    completed = [total for total in totals if total.status == GroupStatus.COMPLETED]
    return (
        task.num_available,
        task.num_pending,
        task.num_leased,
        sum(total.num_groups for total in totals) - listed,
        completed[0].reward_mean if completed else None,
    )


def _spread(task: TaskCounters, totals: Sequence[GroupTotals]) -> tuple[object, ...]:
    """Return the staleness of completed groups (min, mean, max) and the limit of the task."""
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
            end(info, now),
        )
        for info in leases[:SHOWN_LEASES]
    ]
    more = len(leases) - len(rows)
    return table_of(
        ("lease", "owner", "step", "groups", "age", "expires"),
        rows,
        caption=f"and {more} more leases" if more else None,
    )
