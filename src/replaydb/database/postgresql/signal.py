"""Signals of commits through LISTEN and NOTIFY."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from weakref import WeakMethod

import asyncpg
from sqlalchemy.exc import DBAPIError

from replaydb.database.postgresql.connecting import Connection
from replaydb.database.postgresql.connections import Connections
from replaydb.database.runtime.pool import Pool
from replaydb.database.runtime.signals import Signal
from replaydb.errors import ReplayDBError
from replaydb.util.loop_thread import LoopThread

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
        listening: Callable[[], AbstractAsyncContextManager[Connection]],
        notifying: Pool[Connection],
        connections: Connections,
        thread: LoopThread,
    ) -> None:
        """Set the connections for LISTEN, which needs a session, and for NOTIFY.

        While the server is short of connections, both are omitted: calls check every second.
        """
        super().__init__()
        self._connections = connections
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
        await self._notifying.close()

    async def _watch(self) -> None:
        loop, wake = asyncio.get_running_loop(), WeakMethod(self._wake)

        def notified() -> None:
            """Wake the callers, without keeping the signal alive."""
            if (it := wake()) is not None:
                with suppress(RuntimeError):  # the loop was closed without closing the store
                    loop.call_soon_threadsafe(it)

        while self._connections.is_short():  # noqa: ASYNC110 - a time
            await asyncio.sleep(CHECK_SECONDS)
        await self._thread.run(_listen(self._listening, notified, self._connections.is_short))

    def _publish(self) -> None:
        self._thread.call_soon(self._begin_to_notify)

    def _begin_to_notify(self) -> None:
        self._is_due = not self._connections.is_short()
        if not self._is_due:
            return
        if self._publisher is None or self._publisher.done():
            self._publisher = asyncio.create_task(self._notify())

    async def _notify(self) -> None:
        # A lost hint delays a waiting coroutine by RECHECK_SECONDS. It must not fail the writer.
        end = asyncio.get_running_loop().time() + NOTIFY_TIMEOUT_SECONDS
        with suppress(
            OSError,
            DBAPIError,
            ReplayDBError,
            asyncpg.PostgresError,
            asyncpg.InterfaceError,
            asyncpg.InternalClientError,  # the server is ending the connection
        ):
            async with self._connections.used(self._notifying, end) as connection:
                while self._is_due:
                    self._is_due = False
                    async with asyncio.timeout(NOTIFY_TIMEOUT_SECONDS):
                        await connection.execute("NOTIFY replaydb")
                    await asyncio.sleep(NOTIFY_SECONDS)


async def _listen(
    connected: Callable[[], AbstractAsyncContextManager[Connection]],
    notified: Callable[[], object],
    is_short: Callable[[], bool],
) -> None:
    """Call `notified` for each NOTIFY, until the connection is lost or others may need it."""
    async with connected() as connection:
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        await connection.add_listener(CHANNEL, lambda *_: notified())
        notified()  # for commits from before LISTEN took effect
        while not lost.is_set() and not is_short():
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await lost.wait()
