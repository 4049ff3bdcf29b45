"""What every side of a buffer stands on: its transactions, and waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import numpy as np
from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb import checks
from replaydb.buffer.waiting import Explain, LongWait
from replaydb.database import filters
from replaydb.database.repository.buffers import BufferRow, RunRow
from replaydb.database.repository.locking import Scope, SettingsChangedError
from replaydb.database.statements.groups import selection
from replaydb.database.transactions import GRACE_SECONDS, Database, Transaction, allowance, end_in
from replaydb.episodes import GroupStatus
from replaydb.errors import ReplayDBError
from replaydb.settings import BufferSettings

T = TypeVar("T")


class BufferCore:
    """A buffer of an open store.

    Attributes:
        id: Its row.
        name: Its name in the store.
        settings: Settings as this process last saw them.
        policy_version: Policy version as this process last saw it.
    """

    def __init__(
        self, database: Database, row: BufferRow, run: Callable[[float], Awaitable[RunRow]]
    ) -> None:
        self._database = database
        self._run = run
        self.id = row.id
        self.name = row.name
        self.settings: BufferSettings = row.settings
        self.policy_version: int = row.policy_version

    def __repr__(self) -> str:
        return f"Buffer({self.name!r})"

    def saw(self, row: BufferRow) -> None:
        """Remember the buffer's row as it was just read."""
        self.settings, self.policy_version = row.settings, row.policy_version

    async def _write(
        self,
        work: Callable[[AsyncConnection, Scope], Coroutine[Any, Any, T]],
        end: float | None = None,
    ) -> T:
        """One read-write transaction on behalf of this run, over by `end`."""

        async def steps(transaction: Transaction, scope: Scope) -> T:
            return await transaction.finish(lambda connection: work(connection, scope))

        return await self._transact(steps, end)

    async def _transact(
        self, steps: Callable[[Transaction, Scope], Awaitable[T]], end: float | None = None
    ) -> T:
        """The same, in several steps, of which the last commits."""
        end = end_in(allowance()) if end is None else end
        run = await self._run(end)
        while True:
            scope = Scope(self.id, self.name, run, self.settings, self.saw)

            async def scoped(transaction: Transaction, scope: Scope = scope) -> T:
                return await steps(transaction, scope)

            try:
                result = await self._database.transact(scoped, end=end)
            except SettingsChangedError:
                continue
            scope.tell()
            return result

    async def _in_time(
        self,
        attempt: Callable[[bool, float | None], Awaitable[T]],
        timeout: float | None,
        *,
        unless: type[ReplayDBError] | tuple[type[ReplayDBError], ...],
        worthwhile: Callable[[float | None], Awaitable[bool]] | None = None,
        explain: Explain | None = None,
    ) -> T:
        """Try until it works or the time is up, looking again whenever something was committed.

        Args:
            attempt: Called with whether it is the last attempt, and when it has to be over.
            timeout: Seconds; None: for ever. Zero is one attempt, however long it takes the
                database.
            unless: What is raised as long as it does not work.
            worthwhile: A cheap look at whether an attempt could work; never asked about the last.
            explain: Says more about why it does not work, once, for the log.
        """
        held = LongWait(self.name, explain)
        if timeout == 0:
            return await attempt(True, None)
        now = asyncio.get_running_loop().time
        deadline = np.inf if timeout is None else now() + timeout
        end = None if timeout is None else deadline + GRACE_SECONDS
        try:
            return await attempt(False, end)
        except unless as error:
            held.reason = error
        signal = self._database.signal
        async with signal.listening():
            while True:
                await held.tell()
                ticket = signal.ticket()
                left = deadline - now()
                if left <= 0:
                    return await attempt(True, end)
                if worthwhile is None or await worthwhile(end):
                    try:
                        return await attempt(False, end)
                    except unless as error:
                        held.reason = error
                await signal.wait(ticket, left)

    def _selection(
        self,
        ids: Iterable[int] | None,
        tasks: str | Iterable[str] | None,
        statuses: str | Iterable[str] | None,
        where: ColumnElement[bool] | None,
    ) -> ColumnElement[bool]:
        return selection(
            self.id,
            ids=checks.optional(checks.ids, "ids", ids),
            tasks=checks.names("tasks", tasks),
            statuses=checks.some_of("statuses", statuses, GroupStatus),
            where=filters.checked(where),
        )
