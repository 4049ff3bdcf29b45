"""Signals of commits through LISTEN and NOTIFY."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any
from weakref import WeakMethod

import asyncpg
from sqlalchemy import func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from replaydb.database.runtime.loop_thread import LoopThread
from replaydb.database.runtime.signals import Signal

#: Commits within this time share one NOTIFY, which takes a database-wide lock at its own commit.
NOTIFY_SECONDS = 0.01
#: A NOTIFY that takes longer than this is abandoned, and the next one uses another connection.
NOTIFY_TIMEOUT_SECONDS = 5.0
CHANNEL = "replaydb"
#: Interval at which a connection that listens may be given up.
CHECK_SECONDS = 1.0


class NoSignal(Signal):
    """No signal, because LISTEN needs a session. Waiting coroutines poll instead."""

    async def _watch(self) -> None:
        await asyncio.Event().wait()

    def _publish(self) -> None:
        pass


class PostgresqlSignal(Signal):
    """NOTIFY after commits, batched and in a background task; LISTEN while coroutines wait.

    Both run in the thread of the backend.
    """

    def __init__(
        self,
        listening: AsyncEngine,
        notifying: AsyncEngine,
        thread: LoopThread,
        is_short: Callable[[], bool],
    ) -> None:
        """Set the engine for LISTEN, which needs a session, and that for NOTIFY.

        While the server `is_short` of connections, both are omitted: calls check every second.
        """
        super().__init__()
        self._is_short = is_short
        self._listening, self._notifying = listening, notifying
        self._thread = thread
        self._publisher: asyncio.Task[None] | None = None
        self._is_due = False

    async def aclose(self) -> None:
        """Stop watching, send signals that are still due, and close the connections."""
        await super().aclose()
        await self._thread.run(self._end())

    async def _end(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await asyncio.wait([publisher])
        await self._listening.dispose()
        await self._notifying.dispose()

    async def _watch(self) -> None:
        loop, wake = asyncio.get_running_loop(), WeakMethod(self._wake)

        def notified() -> None:
            """Wake the callers, without keeping the signal alive."""
            if (it := wake()) is not None:
                with suppress(RuntimeError):  # the loop was closed without closing the store
                    loop.call_soon_threadsafe(it)

        while self._is_short():  # noqa: ASYNC110 - a time
            await asyncio.sleep(CHECK_SECONDS)
        await self._thread.run(_listen(self._listening, notified, self._is_short))

    def _publish(self) -> None:
        self._thread.call_soon(self._begin_to_notify)

    def _begin_to_notify(self) -> None:
        self._is_due = not self._is_short()
        if not self._is_due:
            return
        if self._publisher is None or self._publisher.done():
            self._publisher = asyncio.create_task(self._notify())

    async def _notify(self) -> None:
        # A lost hint delays a waiting coroutine by RECHECK_SECONDS. It must not fail the writer.
        with suppress(OSError, DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError):
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(NOTIFY_TIMEOUT_SECONDS):
                    connection = await stack.enter_async_context(self._notifying.connect())
                while self._is_due:
                    self._is_due = False
                    async with asyncio.timeout(NOTIFY_TIMEOUT_SECONDS):
                        await connection.execute(select(func.pg_notify(CHANNEL, "")))
                    await asyncio.sleep(NOTIFY_SECONDS)


async def _listen(
    engine: AsyncEngine, notified: Callable[[], object], is_short: Callable[[], bool]
) -> None:
    """Call `notified` for each NOTIFY, until the connection is lost or others may need it."""
    async with engine.connect() as connection:
        raw: Any = (await connection.get_raw_connection()).driver_connection
        lost = asyncio.Event()
        raw.add_termination_listener(lambda _: lost.set())
        try:
            await raw.add_listener(CHANNEL, lambda *_: notified())
            notified()  # for commits from before LISTEN took effect
            while not lost.is_set() and not is_short():
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_SECONDS):
                        await lost.wait()
        finally:
            await connection.invalidate()  # a connection that listens must not be pooled
