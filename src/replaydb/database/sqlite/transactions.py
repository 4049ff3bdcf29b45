"""Transactions on SQLite: each is one function in the thread of its connection."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from replaydb.database.runtime.pool import Pool, Waits
from replaydb.database.runtime.protocol import Pinned, Run
from replaydb.database.runtime.session import Session, Watch, Work
from replaydb.database.sqlite.connection import SqliteConnection

T = TypeVar("T")


class CallersLoop:
    """The event loop of the caller: each connection has a thread for its transactions."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Run it there."""
        return coroutine

    def time(self, time: float) -> float:
        """Return it unchanged."""
        return time

    async def close(self) -> None:
        """Do nothing."""


class SqliteTransactions:
    """The transactions on some connections.

    Attributes:
        watch: Called with the session, the SQL and the parameters of each statement.
    """

    watch: Watch | None = None

    def __init__(
        self, connect: Callable[[], Awaitable[SqliteConnection]], size: int, waits: Waits
    ) -> None:
        """Set how connections are opened, and their maximum number."""
        self.pool = Pool(connect, size, waits)

    async def write(
        self,
        work: Work[T],
        end: float,
        answer_by: float,
        *,
        committing: Callable[[], object] | None = None,
        begin_to_read: Callable[[T], Awaitable[Pinned]] | None = None,
        is_needed: Callable[[T], bool] = bool,
    ) -> T:
        """Run work and COMMIT. The answer to it cannot be lost."""

        def finish(driver: sqlite3.Connection, result: T) -> None:
            if begin_to_read is None or not is_needed(result):
                if committing is not None:
                    committing()
                driver.commit()

        async with self.pool.connection(end) as connection:
            connection.session.watch = self.watch
            result = await connection.transact(work, end, finish=finish)
            if begin_to_read is not None and connection.is_open:
                pinned = await begin_to_read(result)
                await pinned()
                await connection.transact(_no_more, end, finish=_commit)
            return result

    async def read(self, work: Work[T], end: float, *, single: bool = False) -> T:
        """Run work and ROLLBACK. A transaction costs little, so `single` changes nothing."""
        async with self.pool.connection(end) as connection:
            connection.session.watch = self.watch
            return await connection.transact(work, end, finish=_roll_back)

    @asynccontextmanager
    async def snapshot(self, end: float) -> AsyncIterator[Run[Any]]:
        """Open a transaction, which begins with its first work."""
        async with self.pool.connection(end) as connection:
            connection.session.watch = self.watch

            async def run(work: Work[Any], end: float) -> Any:
                return await connection.transact(work, end)

            yield run

    def cut_off(self) -> None:
        """Interrupt the statements that run, and run no more."""
        self.pool.cut_off()

    async def close(self) -> None:
        """Close the connections."""
        await self.pool.close()


def _no_more(session: Session) -> None:
    """End the transaction."""


def _commit(driver: sqlite3.Connection, result: object) -> None:
    driver.commit()


def _roll_back(driver: sqlite3.Connection, result: object) -> None:
    driver.rollback()
