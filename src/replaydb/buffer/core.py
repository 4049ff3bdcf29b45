"""Base class of the buffer mixins: transactions, retries and properties."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from sqlalchemy import ColumnElement, select

from replaydb.buffer.waiting import Explain, Waiter
from replaydb.database.filters import compiling
from replaydb.database.payloads import Payloads
from replaydb.database.repository import aging, buffers, maintenance, tasks
from replaydb.database.repository.aging import StillExpiringError
from replaydb.database.repository.buffers import BufferRow, RunRow
from replaydb.database.repository.locked import Scope, UnfinishedMaintenanceError
from replaydb.database.repository.locking import behind_locked, tasks_locked
from replaydb.database.repository.policy import Advance
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, Database, allowance, end_in
from replaydb.database.statements.buffer import select_run
from replaydb.database.statements.selections import Selection
from replaydb.database.tables.records import Decoded, Stored, decoded
from replaydb.domain import checks
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.settings import BufferSettings
from replaydb.errors import (
    DatabaseError,
    DatabaseUnavailableError,
    ReplayDBError,
    UnknownRunError,
)

if TYPE_CHECKING:
    from replaydb.buffer.lease import Lease

T = TypeVar("T")
#: Changes the buffer of a scope in a transaction.
Work: TypeAlias = Callable[[Scope, Session], T]


class BufferCore:
    """State and transactions that all calls of a buffer share."""

    def __init__(
        self,
        database: Database,
        payloads: Payloads,
        row: BufferRow,
        run_name: str,
        run: Callable[..., Awaitable[RunRow]],
    ) -> None:
        self._database = database
        self._payloads = payloads
        self._run_name = run_name
        self._run = run
        self._row = row
        self._releasing: set[asyncio.Task[None]] = set()
        # Number of stored groups of the tasks of the last draw.
        self._drawn_tasks: dict[str, int] = {}
        # Leases that this object has taken or opened, by id, while anything refers to them.
        self._leases: WeakValueDictionary[int, Lease] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"Buffer({self.name!r})"

    @property
    def id(self) -> int:
        """Id of the buffer in its store."""
        return self._row.id

    @property
    def name(self) -> str:
        """Name of the buffer in its store."""
        return self._row.name

    @property
    def run(self) -> str:
        """Name of the run under which this object puts and draws: that of its store."""
        return self._run_name

    @property
    def settings(self) -> BufferSettings:
        """Settings as this object last read them. Another process may have changed them since."""
        return self._row.settings

    @property
    def policy_version(self) -> int:
        """The policy version that this object last read: a cached value, which may be out of date.

        It is read when the buffer is opened and by every call that changes the buffer (`put`,
        `sample`, `lease`, `advance_policy`), not when another process advances the policy. A
        process that only observes calls `refresh`.
        """
        return self._row.policy_version

    async def refresh(self) -> int:
        """Read the policy version and the settings of the buffer again.

        Returns:
            The current policy version, like `policy_version` afterwards.
        """
        self._set_row(
            await self._database.read(
                lambda session: buffers.state(session, self.id, self.name), single=True
            )
        )
        return self.policy_version

    def _set_row(self, row: BufferRow) -> None:
        """Cache the buffer's row as it was just read."""
        self._row = row

    def _write(
        self,
        work: Work[T],
        end: float | None = None,
        *,
        records_run: bool = False,
        announces: bool = True,
    ) -> Coroutine[Any, Any, T]:
        """Run `work` in one read-write transaction: see `_transact`."""
        return self._transact(
            lambda scope: self._database.write(partial(work, scope), end=end),
            end,
            records_run=records_run,
            announces=announces,
        )

    async def _transact(
        self,
        attempt: Callable[[Scope], Awaitable[T]],
        end: float | None,
        *,
        records_run: bool = False,
        announces: bool = True,
    ) -> T:
        """Run one read-write transaction, and announce its commit.

        Maintenance that is too much for one transaction is done before, in transactions of its own.

        Args:
            attempt: Runs the transaction for a buffer and run.
            end: Deadline, as for `Database.write`.
            records_run: Whether it stores rows that refer to the run of the store, which is
                inserted before if it is new.
            announces: Whether the commit is announced. It would wake all waiting calls, which is
                useless after the extension of a lease or a step of many.
        """
        limit = end_in(allowance()) if end is None else end
        run = await self._run(limit, create=records_run)
        scope = Scope(
            self._database.backend,
            self._row.id,
            self._row.name,
            run,
            self._row,
            self._set_row,
            held=self._leases,
        )
        while True:
            try:
                result = await attempt(scope)
            except StillExpiringError:
                await self._catch_up(limit, expiring=True)
            except UnfinishedMaintenanceError as error:
                await self._maintain(error, limit)
            except DatabaseError as error:
                # A foreign key may have failed. SQLite does not report which one.
                is_other = type(error) is DatabaseError and records_run
                if is_other and await self._is_deleted(run, limit):
                    raise UnknownRunError(self._run_name) from error
                raise
            else:
                scope.log_messages()
                if announces:
                    self._database.signal.announce()
                return result

    async def _read(
        self,
        work: Callable[[Session], T],
        end: float | None = None,
        *,
        has_any: Callable[[T], bool] = bool,
        single: bool = False,
    ) -> T:
        """Run `work` in one read-only transaction; raise if the buffer was deleted.

        If `work` finds nothing or fails, the buffer's row is read in the same transaction. This
        distinguishes an empty buffer from a deleted one.

        Args:
            work: Function that executes statements and returns a result.
            end: Deadline, as for `Database.read`.
            has_any: Function that returns whether a result has rows of this buffer.
            single: As for `Database.read`.

        Raises:
            UnknownBufferError: The buffer was deleted.
        """

        def checked(session: Session) -> T:
            try:
                found = work(session)
            except ReplayDBError:
                buffers.state(session, self.id, self.name)
                raise
            if not has_any(found):
                buffers.state(session, self.id, self.name)
            return found

        return await self._database.read(checked, end=end, single=single)

    async def _is_deleted(self, run: RunRow, end: float) -> bool:
        found = await self._database.read(lambda it: it.run(select_run(self._run_name)), end=end)
        return run.id not in [row.id for row in found]

    async def _maintain(self, due: UnfinishedMaintenanceError, end: float) -> None:
        """Do the maintenance that is due for some tasks, in short transactions.

        Raises:
            DatabaseUnavailableError: It takes too long. What was done is kept.
        """

        def work(scope: Scope, session: Session) -> bool:
            with tasks_locked(session, scope, due.task_names, sweeps=False) as buffer:
                return maintenance.step(buffer, evicts=due.evicts)

        done, num_steps = False, 0
        while not done:
            try:
                done = await self._write(work, end, announces=False)
            except DatabaseUnavailableError as error:
                if num_steps and end_in(0) >= end:
                    raise DatabaseUnavailableError(
                        f"{self._database.backend.shown}: many groups of buffer {self.name!r} have "
                        "expired leases, passed deadlines, outlived time_to_live or exceed a "
                        f"lowered capacity. {num_steps} transactions were not enough to change "
                        "them in time. Their changes are kept: repeat the call until it succeeds"
                    ) from error
                raise
            num_steps += 1
            await self._database.let_others_in()
        self._database.signal.announce()

    def _is_maintenance_due(self, session: Session) -> bool:
        now = session.now()
        [(due,)] = session.run(select(maintenance.is_due(self._row, now)))
        return bool(due)

    async def _run_due_maintenance(self, end: float | None) -> None:
        """Do all maintenance that is due, as a draw from all tasks does first, and commit it."""

        def work(scope: Scope, session: Session) -> None:
            with tasks_locked(session, scope, None) as buffer:
                aging.check_expired(buffer)

        await self._write(work, end)

    async def _follow_policy(self, end: float) -> None:
        """Update the rows of all groups to the current policy version, in short transactions."""
        await self._catch_up(end, expiring=True)
        await self._catch_up(end, expiring=False)

    async def _catch_up(self, end: float, *, expiring: bool) -> None:
        """Update rows of groups, only to expire those that are too stale, or of all others."""
        size, *_ = aging.STEP_GROUPS

        def work(scope: Scope, session: Session) -> tuple[bool, float]:
            with behind_locked(session, scope, aging.TASKS, expiring=expiring) as buffer:
                start = time.perf_counter()
                aging.step(buffer, size)
                task_states = buffer.task_states.values()
                left = len(task_states) == aging.TASKS or any(
                    task.is_expiring if expiring else task.is_behind for task in task_states
                )
                return left, time.perf_counter() - start

        left = True
        while left:
            left, seconds = await self._write(work, end, announces=False)
            size = aging.next_size(size, seconds)
            await self._database.let_others_in()
        self._database.signal.announce()

    async def _advance(self, work: Work[Advance], first_end: float | None = None) -> int:
        """Run `work`, which advances the policy, and update the rows of all groups.

        Args:
            work: Function that runs the first transaction.
            first_end: Deadline of this transaction. Default: that of the whole call.

        Returns:
            The number of groups that expired.
        """
        end = end_in(BULK_SECONDS)
        done = await self._write(work, first_end or end, records_run=True)
        self._set_row(done.row)
        after = done.after
        if done.is_behind:
            await self._follow_policy(end)
            after, _ = await self._database.read(
                lambda session: aging.progress(tasks.read(session, self.id).values()), end=end
            )
        return after - done.before

    async def _decoded(
        self, stored: Stored, end: float, fields: frozenset[str] | None = None
    ) -> Decoded:
        """Decode stored groups. Payloads outside the database are read first."""
        return await decoded(await self._payloads.read(stored, end, cached=True), fields)

    def _waiter(self, timeout: float | None, explain: Explain | None = None) -> Waiter:
        """Return the retry loop of a call. Arguments as for `Waiter`."""
        return Waiter(self._database.signal, self._row.name, timeout, explain)

    def _selection(
        self,
        tasks: str | Iterable[str] | None,
        statuses: str | Iterable[str] | None,
        where: ColumnElement[bool] | None,
        ids: Iterable[int] | None = None,
        uids: str | Iterable[str] | None = None,
    ) -> Selection:
        return Selection(
            self.id,
            ids=checks.optional(checks.ids, "ids", ids),
            uids=checks.optional(checks.uids, "uids", uids),
            tasks=checks.names("tasks", tasks),
            statuses=checks.some_of("statuses", statuses, GroupStatus),
            where=compiling.checked(where),
        )
