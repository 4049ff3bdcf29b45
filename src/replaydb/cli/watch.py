"""`replaydb watch`: a buffer as it changes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import BufferName, Url, console, with_buffer
from replaydb.cli.looks import frame
from replaydb.errors import DatabaseUnavailableError
from replaydb.looks import RATE_SECONDS, Look, Rates, followed

if TYPE_CHECKING:
    from replaydb import Buffer


def watch(
    url: Url,
    buffer: BufferName,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, for the rates, and print that.")
    ] = False,
) -> None:
    """Show how a buffer changes, until Ctrl-C: sizes, rates, staleness, leases, who must wait."""
    from rich.live import Live

    where = console()
    with suppress(KeyboardInterrupt):
        if once or not where.is_terminal:
            num_looks = 2 if once else None
            with_buffer(
                url, buffer, lambda buffer: look_on(buffer, interval, num_looks, where.print)
            )
            return
        with Live(console=where, auto_refresh=False) as live:
            with_buffer(
                url,
                buffer,
                lambda buffer: look_on(
                    buffer, interval, None, lambda shown: live.update(shown, refresh=True)
                ),
            )


async def look_on(
    buffer: Buffer, interval: float, num_looks: int | None, show: Callable[..., object]
) -> None:
    """Look again and again, and show each look, or of a certain number only the last."""
    looks: deque[Look] = deque()
    fast: dict[str, Rates] = {}
    for number in count(1):
        if looks:
            await asyncio.sleep(interval)
        problem = None
        try:
            stats, leases = await buffer.stats(), await buffer.leases(expired=True)
            last = Look(stats, leases, time.monotonic())
            fast = followed(looks, last, max(RATE_SECONDS, 2 * interval))
        except DatabaseUnavailableError as error:
            if not looks or num_looks is not None:
                raise
            problem = str(error)
        if num_looks is None or number == num_looks:
            show(frame(looks[-1], fast, problem))
        if number == num_looks:
            return
