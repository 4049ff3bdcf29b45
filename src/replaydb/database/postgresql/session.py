"""Sessions on PostgreSQL: statements that are sent together, since each round trip takes time."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Connection,
    DateTime,
    Executable,
    Insert,
    Select,
    Update,
    UpdateBase,
    func,
    select,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only

from replaydb.database.postgresql import combined_reads, combined_writes, sequences
from replaydb.database.postgresql.connecting import DIALECT
from replaydb.database.postgresql.connecting import Connection as Driver
from replaydb.database.postgresql.errors import RefusedStatementError, cause_of, judge
from replaydb.database.runtime.prepared import Bound, Plan, Postponable, Write, plan_of, prepared
from replaydb.database.runtime.session import Identified, Later, Session, run_in_core
from replaydb.database.statements.payload import select_payloads
from replaydb.database.tables.schema import episode_group
from replaydb.errors import DatabaseError

Rows = Sequence[Any]


class PostgresqlSession(Session):
    """Sends statements later than they are called, or earlier: with other statements."""

    sends_together = True

    def __init__(self, driver: Driver, shown: str = "") -> None:
        """Set the connection, and the URL for messages."""
        self.driver = driver
        self._shown = shown
        self._writes: list[Postponable] = []
        self._known: list[tuple[Bound[Any], Rows]] = []
        self._later: tuple[Sequence[Bound[Any]], list[Rows]] | None = None

    @property
    def core(self) -> Connection:
        """The connection as SQLAlchemy's. It neither begins nor ends transactions."""
        return self.driver.core

    def run(self, statement: Executable | Bound[Any]) -> Any:
        """Run a statement, after what was postponed."""
        known = self._send_before(statement)
        return self._run(statement) if known is None else known

    def run_many(self, statement: Insert | Update, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run a statement once for each row, after what was postponed."""
        if rows:
            self._send_before(statement)
            self._run_many(statement, rows)

    def lock(self, statement: Bound[Any], reads: Sequence[Bound[Any]] = ()) -> Rows:
        """Run a locking statement twice, in one round trip.

        A statement reads the rows that it does not lock as they were before it waited for the
        others. If it has locked more rows the second time, for which it may have waited again, it
        is run once more.
        """
        self._send_before(statement)
        if reads:
            statement = combined_reads.with_reads(statement, reads)
        first, last = (
            Bound(statement.statement, {**statement.values, "is_last": is_last})
            for is_last in (False, True)
        )
        before, after = self._run_twice(first, last)
        while _locked(after) - _locked(before):
            before, after = after, self._run(last)
        if reads and after:
            found = combined_reads.rows_of_each(after[0], len(reads))
            self._known = list(zip(reads, found, strict=True))
        return after

    def read_together(self, reads: Sequence[Bound[Any]]) -> list[Rows]:
        """Run prepared statements as one, which reads one snapshot."""
        if len(reads) < 2:
            return [self.run(read) for read in reads]
        self.send()
        return self._read_together(reads)

    def read_later(self, reads: Sequence[Bound[Any]]) -> Later:
        """Read rows as they are now, with the last statement or before anything else is written."""
        self.send()
        found: list[Rows] = []
        self._later = reads, found
        return lambda: found

    def postpone(self, *writes: Postponable) -> None:
        """Write later. Two of the same table are not sent together: rows may be in both."""
        for write in writes:
            if isinstance(write, Write) and not write.rows:
                continue
            self._known.clear()
            if any(write.statement.table is one.statement.table for one in self._writes):
                self.send()
            self._writes.append(write)

    def send(self, last: Bound[Any] | None = None) -> Any:
        """Send what was postponed, and a statement with it. Return the result of that."""
        writes, self._writes = self._writes, []
        if last is None or self._later is None or not combined_writes.fit_together(writes):
            if writes:
                self._read_now()
            return self._write_together(writes, last)
        (reads, found), self._later = self._later, None
        rows = self._write_together(writes, combined_reads.after_reads(last, reads))
        found.extend(combined_reads.rows_of_each(rows[0], len(reads)))
        return rows

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Roll back what the block changes, if it raises. What it postpones is sent at its end."""
        self.send()
        try:
            with self.core.begin_nested():
                yield
                self.send()
        except BaseException:
            self._writes.clear()
            self._later = None
            raise

    def now(self) -> datetime:
        """Return the time of the server, because the clocks of its clients may differ."""
        [(now,)] = self._run(_select_now())
        time: datetime = now
        return time

    def identify(
        self, buffer_id: int, uids: Sequence[str], *, children: Sequence[Write]
    ) -> Identified:
        """Take new ids from the sequence of the id column.

        Payloads are inserted before their groups, so this checks that no group has the ids already.
        """
        is_small = combined_writes.fit_together(children)
        identify = sequences.identify_groups(buffer_id, uids, children if is_small else ())
        [found] = self.run(identify)
        known = dict(zip(found.known_uids or (), found.known_ids or (), strict=True))
        error = None
        if found.is_taken:
            reason = sequences.explain_behind(episode_group.name)
            error = DatabaseError(f"{self._shown}: {reason}")
            if len(known) < len(uids):
                raise error
        return Identified(known, list(found.ids or ()), is_small, error)

    def read_payloads(
        self, ids: Sequence[int], fields: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """Read the rows with their data."""
        return [row._asdict() for row in self.run(select_payloads(ids, fields))]

    def _send_before(self, statement: Any) -> Rows | None:
        """Send what precedes a statement; return its rows if they have been read already."""
        of_bound = isinstance(statement, Bound)
        for position, (read, rows) in enumerate(self._known):
            if of_bound and read.statement is statement.statement and read == statement:
                del self._known[position]
                return rows
        if isinstance(statement.statement if of_bound else statement, UpdateBase):
            self._known.clear()
            self._read_now()
        self.send()
        return None

    def _read_now(self) -> None:
        """Run the later reads before anything is written."""
        if self._later is not None:
            (reads, found), self._later = self._later, None
            found.extend(self._read_together(reads))

    def _read_together(self, reads: Sequence[Bound[Any]]) -> list[Rows]:
        [row] = self._run(combined_reads.reads_as_one(reads))
        return combined_reads.rows_of_each(row, len(reads))

    def _write_together(self, writes: Sequence[Postponable], last: Bound[Any] | None) -> Any:
        if len(writes) + (last is not None) > 1 and combined_writes.fit_together(writes):
            return self._run(combined_writes.writes_as_one(writes, last))
        for write in writes:
            if isinstance(write, Write):
                self._run_many(write.statement, write.rows)
            else:
                self._run(write)
        return None if last is None else self._run(last)

    def _run(self, statement: Executable | Bound[Any]) -> Any:
        if not isinstance(statement, Bound):
            return self._run_built(statement, {})
        if not statement.is_cached:
            return self._run_built(statement.statement, statement.values)
        plan = plan_of(statement.statement, tuple(statement.values), DIALECT)
        return self._run_plan(plan, plan.parameters(statement.values))

    def _run_built(self, statement: Executable, values: Mapping[str, Any]) -> Any:
        try:
            return run_in_core(self, statement, values)
        except DBAPIError as error:
            cause, sent = cause_of(error), error.params
        # Not in the block above: the cause of its error would become its own cause.
        reason = self._meaning(cause, sent or ())
        if reason is cause:
            raise cause
        raise reason from cause

    def _run_plan(self, plan: Plan, parameters: Sequence[Any]) -> Any:
        if plan.has_rows:
            found = self._await(self.driver.fetch(plan.sql, *parameters), plan, parameters)
            return _rows(plan, found)
        status = self._await(self.driver.execute(plan.sql, *parameters), plan, parameters)
        return int(status.rpartition(" ")[2])  # such as "UPDATE 3"

    def _run_many(self, statement: Insert | Update, rows: Sequence[Mapping[str, Any]]) -> None:
        plan = plan_of(statement, tuple(rows[0]), DIALECT)
        parameters = plan.parameters_of_each(rows)
        if len(rows) == 1:
            self._run_plan(plan, parameters[0])
        else:
            self._await(self.driver.executemany(plan.sql, parameters), plan, parameters)

    def _run_twice(self, first: Bound[Any], last: Bound[Any]) -> tuple[Rows, Rows]:
        """Run a locking statement with two sets of values. Each run has a snapshot of its own."""
        plan = plan_of(last.statement, tuple(last.values), DIALECT)
        several = [plan.parameters(one.values) for one in (first, last)]
        if self.watch is not None:
            self.watch(self, plan.sql, several[0])
        rows = _rows(plan, self._await(self.driver.fetchmany(plan.sql, several), plan, several))
        return [row for row in rows if not row.is_last], [row for row in rows if row.is_last]

    def _await(self, answer: Awaitable[Any], plan: Plan, parameters: Sequence[Any]) -> Any:
        """Wait for the driver."""
        self.has_snapshot = True
        if self.watch is not None:
            self.watch(self, plan.sql, parameters)
        try:
            return await_only(answer)
        except BaseException as error:
            reason = self._meaning(error, parameters)
            if reason is error:  # it must not become its own cause
                raise
            raise reason from error

    def _meaning(self, error: BaseException, parameters: Any) -> BaseException:
        """Return what an error means. A connection that may still be in use is closed."""
        reason = judge(error, parameters, is_closed=self.driver.is_closed())
        if reason is not None and not isinstance(reason, RefusedStatementError):
            self.driver.terminate()
        return reason or error


def _rows(plan: Plan, found: Rows) -> Rows:
    if not found:
        return []
    if plan.is_described:
        return plan.rows(found, None)
    # asyncpg has converted numbers by the types of their columns.
    return plan.rows(found, [(name, combined_reads.NUMERIC) for name, _ in found[0].items()])


def _locked(rows: Rows) -> set[str]:
    """Return the ids of the rows that a run of a locking statement has locked."""
    return set((rows[0].locked_ids or "").split(",")) - {""} if rows else set()


@prepared
def _select_now() -> Select[datetime]:
    return select(func.clock_timestamp(type_=DateTime(timezone=True)))
