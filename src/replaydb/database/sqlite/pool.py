"""Connections that wait for their next transaction."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from replaydb.database.runtime.waits import Waits
from replaydb.database.sqlite.connection import SqliteConnection
from replaydb.util.cancellation import run_to_completion


class Pool:
    """Connections that are opened when they are needed, up to a number.

    The one that was released last is used next. Calls that wait get one in order of arrival.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[SqliteConnection]],
        size: int,
        waits: Waits,
    ) -> None:
        """Set how connections are opened, and their maximum number."""
        self._connect = connect
        self._num_free = size  # connections that may still be opened
        self._waits = waits
        self._is_closed = False
        self._idle: list[SqliteConnection] = []
        self._used: set[SqliteConnection] = set()
        #: Each gets a connection, or None if it may open one.
        self._queue: deque[asyncio.Future[SqliteConnection | None]] = deque()

    @property
    def num_used(self) -> int:
        """Number of connections in use."""
        return len(self._used)

    @asynccontextmanager
    async def connection(self, end: float) -> AsyncIterator[SqliteConnection]:
        """Use a connection for the block. A transaction that is still open is rolled back.

        Raises:
            DatabaseUnavailableError: None was free, or could be opened, by `end`.
        """
        self._waits.check()
        if self._idle:
            one = self._idle.pop()
        else:
            async with self._waits.until(end):
                one = await self._next()
        self._used.add(one)
        try:
            yield one
        finally:
            try:
                if one.is_usable and one.is_open:
                    await run_to_completion(one.run(one.undo, math.inf))
            finally:  # even if the caller was cancelled once more
                self._used.discard(one)
                await self._release(one)

    def cut_off(self) -> None:
        """Interrupt what runs."""
        for one in self._used:
            one.cut_off()

    async def close(self) -> None:
        """Close the connections; one that is still in use after a timeout, when it is released."""
        self._is_closed = True
        while self._idle:
            self._num_free += 1
            await run_to_completion(self._idle.pop().close())

    async def _next(self) -> SqliteConnection:
        """Wait for a connection, or open one."""
        if self._num_free:
            self._num_free -= 1
        else:
            turn: asyncio.Future[SqliteConnection | None]
            turn = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            try:
                given = await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it was given one at the same time
                    self._pass_on(turn.result())
                raise
            if given is not None:
                return given
        try:
            return await self._connect()
        except BaseException:
            self._pass_on(None)
            raise

    async def _release(self, one: SqliteConnection) -> None:
        if one.is_usable and not self._is_closed:
            self._pass_on(one)
            return
        self._pass_on(None)
        await run_to_completion(one.close())

    def _pass_on(self, one: SqliteConnection | None) -> None:
        """Give a connection, or the right to open one, to the call that has waited longest."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(one)
                return
        if one is None:
            self._num_free += 1
        else:
            self._idle.append(one)
