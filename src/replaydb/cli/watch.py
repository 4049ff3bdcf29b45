"""`replaydb watch`: live statistics of a buffer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import BufferName, Url, console, finite, with_buffer
from replaydb.cli.dashboard import frame
from replaydb.errors import DatabaseUnavailableError
from replaydb.operations.monitoring import RATE_SECONDS, BufferSnapshot, Rates, followed

if TYPE_CHECKING:
    from replaydb import Buffer


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
