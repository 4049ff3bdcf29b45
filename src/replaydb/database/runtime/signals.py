"""Signals that wake waiting coroutines after a commit of this process or another one.

A signal is a hint: it may come late, twice or never, so a wait ends after `RECHECK_SECONDS`. The
state is always read from the tables.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from replaydb.util.cancellation import run_to_completion

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 1.0


class Signal(ABC):
    """Wakes all waiting coroutines. It watches other processes only while one waits."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._listeners = 0
        self._source: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Keep a watch for commits of other processes running until the block ends."""
        self._listeners += 1
        try:
            yield
        finally:
            self._listeners -= 1
            if self._listeners == 0:
                await self._stop_watching()

    def ticket(self) -> asyncio.Event:
        """Return an event that the next commit sets. Get it before a read, and wait on it after."""
        return self._next

    async def wait(self, ticket: asyncio.Event, timeout: float) -> None:
        """Wait until the ticket is set, but at most `timeout` or `RECHECK_SECONDS` seconds."""
        if self._source is None or self._source.done():
            self._source = asyncio.create_task(self._watch())
            self._source.add_done_callback(_note_end)
        # Not `wait_for`: in Python 3.11 it loses a cancellation that arrives with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(min(timeout, RECHECK_SECONDS)):
                await ticket.wait()

    def announce(self) -> None:
        """Signal a commit of this process. Never blocks and never fails."""
        self._wake()
        self._publish()

    async def aclose(self) -> None:
        """Wake all waiting coroutines, stop watching, and send signals that are still due."""
        self._wake()
        await self._stop_watching()

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def _stop_watching(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.cancel()
            await run_to_completion(asyncio.wait([source]))

    @abstractmethod
    async def _watch(self) -> None:
        """Call `_wake` on every commit of another process, until cancelled."""

    def _publish(self) -> None:  # noqa: B027 - a commit may be signal enough
        """Signal a commit to other processes."""


def _note_end(source: asyncio.Task[None]) -> None:
    """Log the failure of a watch. Waits end after `RECHECK_SECONDS`, and then restart it."""
    if not source.cancelled() and (error := source.exception()) is not None:
        logger.info("signals of commits of other processes were interrupted: %s", error)
