"""Waits for connections, which the closing of a store can end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from replaydb.errors import DatabaseUnavailableError, StoreClosedError


class Waits:
    """The waits for connections of one database."""

    def __init__(self, shown: str) -> None:
        """Set the URL for messages."""
        self._shown = shown
        self._timeouts: set[asyncio.Timeout] = set()
        self._is_cut_off = False

    @asynccontextmanager
    async def until(self, end: float) -> AsyncIterator[None]:
        """Run the block, which waits, until `end` or `cut_off`.

        Raises:
            DatabaseUnavailableError: It was ended.
        """
        self.check()
        try:
            async with asyncio.timeout_at(end) as timeout:
                self._timeouts.add(timeout)
                try:
                    yield
                finally:
                    self._timeouts.discard(timeout)
        except TimeoutError as error:
            if not timeout.expired():  # a host did not answer within `connect_timeout`
                raise
            reason = "no answer in time: no connection was free, or could be opened"
            raise DatabaseUnavailableError(f"{self._shown}: {reason}") from error

    def check(self) -> None:
        """Raise if waits were ended: the call must not run again."""
        if self._is_cut_off:
            raise StoreClosedError

    @asynccontextmanager
    async def slot(self, slots: asyncio.Semaphore, end: float) -> AsyncIterator[None]:
        """Hold a slot. Slots are granted in order of request; a pool does not keep that order."""
        if slots.locked():
            async with self.until(end):
                await slots.acquire()
        else:
            await slots.acquire()  # at once
        try:
            yield
        finally:
            slots.release()

    def cut_off(self) -> None:
        """End all waits, and begin no more."""
        self._is_cut_off = True
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(0.0)
