"""Retry loop of calls that wait for other processes: for groups, capacity or a rate limit."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Self

from replaydb.database.runtime.signals import Signal
from replaydb.database.runtime.transactions import GRACE_SECONDS
from replaydb.errors import ReplayDBError

logger = logging.getLogger(__name__)

#: Seconds after which a waiting call is logged, once.
LONG_WAIT_SECONDS = 30.0
#: A call that waits checks again after at least this share of the time it has waited, and at least
#: every `CHECK_SECONDS` if there are commits. Otherwise every commit of a fleet would make every
#: call that waits ask the database.
CHECK_SHARE = 0.01
CHECK_SECONDS = 0.25

#: Adds details to an error about missing groups or capacity.
Explain = Callable[[ReplayDBError], Awaitable[None]]


class Waiter:
    """Retry loop of one call, with its deadline.

        async with Waiter(signal, "math", timeout) as waiter:
            while True:
                try:
                    return await self._try(waiter.end)
                except NotEnoughGroupsError as error:
                    await waiter.wait(error)

    Attributes:
        end: Deadline of an attempt; None: the attempt has no deadline of its own.
    """

    def __init__(
        self,
        signal: Signal,
        buffer_name: str,
        timeout: float | None,
        explain: Explain | None = None,
    ) -> None:
        """Start the clock.

        Args:
            signal: Signal of commits by other calls and processes.
            buffer_name: Name of the buffer, for the log.
            timeout: Seconds. None: indefinitely. 0: one attempt. With None and 0, an attempt has
                the default time limit of a transaction.
            explain: Function that adds details to the error, before it is logged or raised.
        """
        self._signal = signal
        self._buffer_name = buffer_name
        self._explain = explain
        self._begin = _now()
        self._deadline = math.inf if timeout is None else self._begin + timeout
        self._is_last = timeout == 0
        self._ticket: asyncio.Event | None = None
        self._checked = self._begin
        self._is_logged = False
        self._listening = AsyncExitStack()
        self.end = self._deadline + GRACE_SECONDS if timeout else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listening.aclose()

    async def wait(
        self,
        error: ReplayDBError,
        worthwhile: Callable[[float | None], Awaitable[bool]] | None = None,
    ) -> None:
        """Wait until another attempt may succeed. After the last attempt, raise its error.

        Args:
            error: Error of the last attempt.
            worthwhile: Cheap check, with the deadline as argument, whether an attempt could
                succeed. The last attempt is made without it.
        """
        while not self._is_last:
            if self._ticket is None:  # a commit before listening began would be missed
                await self._listening.enter_async_context(self._signal.listening())
            else:
                await self._log_if_long(error)
                await self._signal.wait(self._ticket, self._deadline - _now())
                await asyncio.sleep(self._pause())
            self._ticket = self._signal.ticket()
            self._checked = _now()
            self._is_last = self._checked >= self._deadline
            if self._is_last or worthwhile is None or await worthwhile(self.end):
                return
        if self._explain is not None:
            await self._explain(error)
        raise error

    def _pause(self) -> float:
        """Return the seconds until the next check."""
        pause = min(CHECK_SHARE * (_now() - self._begin), CHECK_SECONDS)
        return max(0.0, min(self._checked + pause, self._deadline) - _now())

    async def _log_if_long(self, error: ReplayDBError) -> None:
        """Log a long wait, once."""
        seconds = _now() - self._begin
        if self._is_logged or seconds < LONG_WAIT_SECONDS:
            return
        self._is_logged = True
        if self._explain is not None:
            await self._explain(error)
        logger.warning(
            "buffer %r: a call has waited for %.0f s: %s", self._buffer_name, seconds, error
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
