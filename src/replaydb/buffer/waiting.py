"""Calls that wait for what others commit: groups, room, a rate limit that lets them through."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Self

from replaydb.database.engines.signals import Signal
from replaydb.database.transactions import GRACE_SECONDS
from replaydb.errors import ReplayDBError

logger = logging.getLogger(__name__)

#: A wait that has taken so long is logged, once.
LONG_WAIT_SECONDS = 30.0

#: Completes an error that was raised for want of something.
Explain = Callable[[ReplayDBError], Awaitable[None]]


class Patience:
    """The time that a call has to work, in several tries if need be.

        async with Patience(signal, "math", timeout) as patience:
            while True:
                try:
                    return await self._try(patience.end)
                except NotEnoughGroupsError as error:
                    await patience.wait(error)

    Attributes:
        end: When a try has to be over; None: it may take as long as the database does.
    """

    def __init__(
        self,
        signal: Signal,
        buffer_name: str,
        timeout: float | None,
        explain: Explain | None = None,
    ) -> None:
        """Begin.

        Args:
            signal: Tells of commits.
            buffer_name: For the log.
            timeout: Seconds; None: for ever. Zero is one try, however long it takes the database.
            explain: Says more about what is waited for, in the log and in the error at the end.
        """
        self._signal = signal
        self._buffer_name = buffer_name
        self._explain = explain
        self._begin = _now()
        self._deadline = math.inf if timeout is None else self._begin + timeout
        self._is_last = timeout == 0
        self._ticket: asyncio.Event | None = None
        self._told = False
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
        """Wait until another try might work. After the last one, raise what it failed of.

        Args:
            error: What the last try failed of.
            worthwhile: A cheap look, by when it has to be over, at whether a try could work. The
                last one is made in any case.
        """
        while not self._is_last:
            if self._ticket is None:  # something may have been committed before anybody listened
                await self._listening.enter_async_context(self._signal.listening())
            else:
                await self._tell(error)
                await self._signal.wait(self._ticket, self._deadline - _now())
            self._ticket = self._signal.ticket()
            self._is_last = _now() >= self._deadline
            if self._is_last or worthwhile is None or await worthwhile(self.end):
                return
        if self._explain is not None:
            await self._explain(error)
        raise error

    async def _tell(self, error: ReplayDBError) -> None:
        """Log a wait that has become long, once."""
        seconds = _now() - self._begin
        if self._told or seconds < LONG_WAIT_SECONDS:
            return
        self._told = True
        if self._explain is not None:
            await self._explain(error)
        logger.warning(
            "buffer %r: a call has waited for %.0f s: %s", self._buffer_name, seconds, error
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
