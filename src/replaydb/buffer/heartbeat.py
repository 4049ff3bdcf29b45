"""Heartbeat: extends a lease or a claim while the event loop runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from replaydb.domain import checks
from replaydb.errors import (
    ClaimExpiredError,
    DatabaseError,
    LeaseExpiredError,
    StoreClosedError,
)

#: How often the heartbeat extends a lease within its ttl, and how often it tries within its ttl
#: while the database fails, so that the lease is extended soon after a short outage.
HEARTBEATS_PER_TTL, RETRIES_PER_TTL = 3, 30


class Heartbeat:
    """Extends something at intervals.

    Attributes:
        ttl: Duration in seconds from the last extension.
        is_started: Whether it was started.
    """

    def __init__(self, ttl: float, extend: Callable[[float], Awaitable[object]]) -> None:
        """Set the duration, and the function that extends to a number of seconds from now."""
        self.ttl = ttl
        self._extend = extend
        self._task: asyncio.Task[None] | None = None
        self._extending = asyncio.Lock()
        self._extended = asyncio.Event()

    @property
    def is_started(self) -> bool:
        """Whether it was started."""
        return self._task is not None

    def start(self) -> None:
        """Extend at intervals from now on."""
        self._task = asyncio.create_task(self._keep_alive())

    async def stop(self) -> None:
        """Do not extend any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def extend(self, ttl: float | None = None) -> None:
        """Extend to `ttl` seconds from now, also at later extensions.

        Raises:
            InvalidInputError: `ttl` is not a positive number.
        """
        wanted = checks.optional(checks.duration, "ttl", ttl)
        async with self._extending:  # a concurrent heartbeat would use the old ttl
            seconds = self.ttl if wanted is None else wanted
            await self._extend(seconds)
            self.ttl = seconds
        self._extended.set()

    async def _keep_alive(self) -> None:
        beats = HEARTBEATS_PER_TTL
        while True:
            self._extended.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.ttl / beats):
                    await self._extended.wait()
            beats = HEARTBEATS_PER_TTL
            if self._extended.is_set():  # extended by the caller, perhaps with a shorter ttl
                continue
            try:
                await self.extend()
            except (LeaseExpiredError, ClaimExpiredError, StoreClosedError):
                return  # the next call of the holder raises it
            except DatabaseError:
                beats = RETRIES_PER_TTL
