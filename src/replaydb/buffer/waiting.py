"""Waits that go on are logged, with what they wait for."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from replaydb.errors import ReplayDBError

logger = logging.getLogger(__name__)

#: A wait that has taken so long is logged, once.
LONG_WAIT_SECONDS = 30.0

#: Completes an error that was raised for want of something.
Explain = Callable[[ReplayDBError], Awaitable[None]]


class LongWait:
    """A wait under way.

    Attributes:
        reason: What the last attempt failed of.
    """

    def __init__(self, buffer_name: str, explain: Explain | None) -> None:
        self._buffer_name = buffer_name
        self._explain = explain
        self._begin = time.monotonic()
        self._told = False
        self.reason: ReplayDBError | None = None

    async def tell(self) -> None:
        """Log it, if it has become long and has not been logged."""
        seconds = time.monotonic() - self._begin
        if self._told or self.reason is None or seconds < LONG_WAIT_SECONDS:
            return
        self._told = True
        if self._explain is not None:
            await self._explain(self.reason)
        logger.warning(
            "buffer %r: a call has waited for %.0f s: %s", self._buffer_name, seconds, self.reason
        )
