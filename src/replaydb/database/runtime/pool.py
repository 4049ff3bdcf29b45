"""Connections that wait for their next transaction, and calls that wait for a connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from replaydb.errors import DatabaseUnavailableError, StoreClosedError
from replaydb.util.cancellation import run_to_completion


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


class Pooled(Protocol):
    """A connection."""

    @property
    def is_usable(self) -> bool:
        """Whether another transaction may run."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether a transaction has begun and not ended."""
        ...

    async def abandon(self) -> None:
        """Roll back, or make the connection unusable."""

    async def close(self) -> None:
        """Close it."""

    def cut_off(self) -> None:
        """End what runs, and what waits for an answer."""


C = TypeVar("C", bound=Pooled)


class Pool(Generic[C]):
    """Connections that are opened when they are needed, up to a number.

    The one that was released last is used next. Calls that wait get one in order of arrival.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[C]],
        size: int,
        waits: Waits,
        num_kept: Callable[[], int] | None = None,
    ) -> None:
        """Set how connections are opened, and their maximum number.

        Args:
            connect: Opens a connection.
            size: The maximum number of connections.
            waits: The waits for them.
            num_kept: Returns how many of those that no call uses stay open; 0: each is closed after
                use. By default all.
        """
        self._connect = connect
        self._num_free = size  # connections that may still be opened
        self._waits = waits
        self._num_kept = num_kept or (lambda: size)
        self._is_closed = False
        self._idle: list[C] = []
        self._used: set[C] = set()
        #: Each gets a connection, or None if it may open one.
        self._queue: deque[asyncio.Future[C | None]] = deque()

    @property
    def num_used(self) -> int:
        """Number of connections in use."""
        return len(self._used)

    @asynccontextmanager
    async def connection(self, end: float) -> AsyncIterator[C]:
        """Use a connection for the block. A transaction that is still open is rolled back.

        Raises:
            DatabaseUnavailableError: None was free, or could be opened, by `end`.
        """
        self._waits.check()
        if (one := self._take()) is None:
            async with self._waits.until(end):
                one = await self._next()
        self._used.add(one)
        try:
            yield one
        finally:
            try:
                if one.is_usable and one.is_open:
                    await run_to_completion(one.abandon())
            finally:  # even if the caller was cancelled once more
                self._used.discard(one)
                await self._release(one)

    def cut_off(self) -> None:
        """End what runs."""
        for one in (*self._used, *self._idle):
            one.cut_off()

    def discard(self) -> None:
        """Give up the connections that no call uses."""
        while self._idle:
            self._num_free += 1
            self._idle.pop().cut_off()

    async def close(self) -> None:
        """Close the connections; one that is still in use after a timeout, when it is released."""
        self._is_closed = True
        while self._idle:
            self._num_free += 1
            await run_to_completion(self._idle.pop().close())

    def _take(self) -> C | None:
        """Return a connection that no call uses, if there is one."""
        while self._idle:
            if (one := self._idle.pop()).is_usable:
                return one
            self._num_free += 1
        return None

    async def _next(self) -> C:
        """Wait for a connection, or open one."""
        if self._num_free:
            self._num_free -= 1
        else:
            turn: asyncio.Future[C | None]
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

    async def _release(self, one: C) -> None:
        num_kept = self._num_kept()
        is_kept = num_kept and (self._queue or len(self._idle) < num_kept)
        if one.is_usable and is_kept and not self._is_closed:
            self._pass_on(one)
            return
        try:
            await run_to_completion(one.close())
        finally:
            self._pass_on(None)

    def _pass_on(self, one: C | None) -> None:
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
