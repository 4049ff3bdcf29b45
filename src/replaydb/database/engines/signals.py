"""How a waiting coroutine learns that something was committed, here or in another process.

A signal is a hint: it may come late or twice, and waiting is bounded by `RECHECK_SECONDS` even
if it never comes. What is true is only ever read from the tables.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from replaydb.cancellation import to_the_end

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 1.0


class Signal(ABC):
    """Wakes everybody who waits; nothing runs while nobody does."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._listeners = 0
        self._source: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Watch for commits of other processes until the block ends."""
        self._listeners += 1
        try:
            yield
        finally:
            self._listeners -= 1
            if self._listeners == 0:
                await self._stop_watching()

    def ticket(self) -> asyncio.Event:
        """Set by the first change from now on: take it before looking, wait on it after."""
        return self._next

    async def wait(self, ticket: asyncio.Event, timeout: float) -> None:
        """Until the ticket's change, `timeout` seconds or the time to look again anyway."""
        if self._source is None or self._source.done():
            self._source = asyncio.create_task(self._watch())
            self._source.add_done_callback(_note_end)
        # Not `wait_for`: in Python 3.11 it loses a cancellation that comes with the change.
        with suppress(TimeoutError):
            async with asyncio.timeout(min(timeout, RECHECK_SECONDS)):
                await ticket.wait()

    def announce(self) -> None:
        """Something was committed by this process. Never blocks, never fails."""
        self._wake()
        self._publish()

    async def aclose(self) -> None:
        """Stop watching; tell others what has not been told yet, and those who wait to look."""
        self._wake()
        await self._stop_watching()

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def _stop_watching(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.cancel()
            await to_the_end(asyncio.wait([source]))

    @abstractmethod
    async def _watch(self) -> None:
        """Call `_wake` on every commit of another process, until cancelled."""

    @abstractmethod
    def _publish(self) -> None:
        """Let other processes know."""


def _note_end(source: asyncio.Task[None]) -> None:
    """Whoever waits looks now and then anyway, and watches anew after that."""
    if not source.cancelled() and (error := source.exception()) is not None:
        logger.info("nobody tells of commits of other processes for a while: %s", error)
