"""What every side of a buffer stands on: its transactions, and waiting."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import numpy as np
from sqlalchemy import ColumnElement, Connection

from replaydb import checks
from replaydb.buffer.waiting import Explain, LongWait
from replaydb.database import filters
from replaydb.database.repository.buffers import BufferRow, RunRow
from replaydb.database.repository.locked import Scope
from replaydb.database.statements.groups import selection
from replaydb.database.transactions import GRACE_SECONDS, Database, allowance, end_in
from replaydb.episodes import GroupStatus
from replaydb.errors import ReplayDBError
from replaydb.settings import BufferSettings

T = TypeVar("T")


class BufferCore:
    """A buffer of an open store."""

    def __init__(
        self, database: Database, row: BufferRow, run: Callable[[float], Awaitable[RunRow]]
    ) -> None:
        self._database = database
        self._run = run
        self._row = row

    def __repr__(self) -> str:
        return f"Buffer({self.name!r})"

    @property
    def id(self) -> int:
        """Its row."""
        return self._row.id

    @property
    def name(self) -> str:
        """Its name in the store."""
        return self._row.name

    @property
    def settings(self) -> BufferSettings:
        """Its settings, as this process last saw them."""
        return self._row.settings

    @property
    def policy_version(self) -> int:
        """Its policy version, as this process last saw it."""
        return self._row.policy_version

    def _saw(self, row: BufferRow) -> None:
        """Remember the buffer's row as it was just read."""
        self._row = row

    async def _write(
        self,
        work: Callable[[Connection, Scope], T],
        end: float | None = None,
        *,
        hear_by: float = math.inf,
        before_commit: Callable[[T], Awaitable[object]] | None = None,
        undone: Callable[[], object] | None = None,
    ) -> T:
        """One read-write transaction on behalf of this run; arguments as of `Database.write`."""
        end = end_in(allowance()) if end is None else end
        run = await self._run(end)
        scope = Scope(self._database.backend, self.id, self.name, run, self._row, self._saw)
        result = await self._database.write(
            lambda connection: work(connection, scope),
            end=end,
            hear_by=hear_by,
            before_commit=before_commit,
            undone=undone,
        )
        scope.log_news()
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
