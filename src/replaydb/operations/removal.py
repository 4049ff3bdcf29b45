"""Deletion of groups, draws, buffers and runs in short transactions, while the store is in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

from sqlalchemy import Column, ColumnElement, Delete, Select, delete, func, select

from replaydb.buffer.store import Store
from replaydb.database.filters import compiling
from replaydb.database.repository import buffers, transitions
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import scope_of
from replaydb.database.repository.locking import buffer_locked
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, end_in
from replaydb.database.statements.draw import LEASED, delete_draws
from replaydb.database.statements.selections import IS_FREE, Selection, selection
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import IS_LEASED, buffer, draw, draw_group, group, run
from replaydb.domain import checks
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import GroupLeasedError, InvalidInputError, UnknownBufferError
from replaydb.util.progress import Progress

T = TypeVar("T")

#: Target duration of a step, which holds locks; groups or draws in the first and largest step.
STEP_SECONDS = 0.05
FIRST_STEP, LONGEST_STEP = 50, 5000
#: Number of ids that are read at once.
PAGE = 100_000
#: Attempts to delete a run that puts or draws meanwhile.
ATTEMPTS = 3
#: An id that no row has.
NO_ID = 0


@dataclass(frozen=True, slots=True)
class Removal:
    """Counts of deleted data, or in a dry run of data that would be deleted.

    Attributes:
        dry_run: Whether nothing was deleted.
        num_groups: Groups, with their episodes, payloads and texts.
        num_bytes: Bytes of their payloads. A database keeps the freed space and reuses it.
        num_draws: Draws, with their records of groups.
    """

    dry_run: bool
    num_groups: int = 0
    num_bytes: int = 0
    num_draws: int = 0


async def prune_groups(
    store: Store,
    *,
    names: str | Iterable[str] | None = None,
    statuses: str | Iterable[str] = GroupStatus.ARCHIVED,
    min_age: float | None = None,
    runs: str | Iterable[str] | None = None,
    where: ColumnElement[bool] | None = None,
    dry_run: bool = True,
    progress: Progress | None = None,
) -> Removal:
    """Delete groups by status, age, run and other conditions.

    Works in short transactions, between which other processes can write. Leased groups, and pending
    groups with a claimed trajectory, are kept. If interrupted, call it again to delete the rest.

    Args:
        store: The store, opened for writing unless `dry_run` is set.
        names: Names of buffers; None (default) for all.
        statuses: Statuses of the groups to delete, archived by default. "leased" is not allowed.
        min_age: Only groups put more than this many seconds ago.
        runs: Only groups that these runs put.
        where: Only groups that meet this condition over `replaydb.col`.
        dry_run: Count the groups without deleting them (default).
        progress: Called after each step with the number of groups deleted and found so far.

    Returns:
        What was deleted, or in a dry run would be.

    Raises:
        InvalidInputError: An argument is invalid.
        UnknownBufferError: A buffer does not exist.
    """
    wanted = checks.some_of("statuses", statuses, GroupStatus) or frozenset()
    if GroupStatus.LEASED in wanted:
        raise InvalidInputError("statuses", "statuses other than 'leased'", "leased")
    age = checks.optional(checks.duration, "min_age", min_age)
    of_runs = checks.names("runs", runs)
    dry_run = checks.flag("dry_run", dry_run)
    eligible = compiling.checked(where)
    task = _Deletion(store, dry_run, progress)
    before = await task.time_before(age)
    which = compiling.all_of(
        (
            None if before is None else group.created_at < before,
            None if of_runs is None else compiling.of_runs(sorted(of_runs)),
            eligible,
            IS_FREE,
        )
    )
    for row in await task.rows(checks.names("names", names)):
        await task.delete_groups(row, Selection(row.id, statuses=wanted, where=which))
    return task.done


async def prune_draws(
    store: Store,
    *,
    names: str | Iterable[str] | None = None,
    min_age: float | None = None,
    runs: str | Iterable[str] | None = None,
    dry_run: bool = True,
    progress: Progress | None = None,
) -> Removal:
    """Delete records of draws by age and run, in short transactions as `prune_groups` does.

    A draw is kept as long as any of its groups is leased.

    Args:
        store: The store, opened for writing unless `dry_run` is set.
        names: Names of buffers; None (default) for all.
        min_age: Only draws made more than this many seconds ago.
        runs: Only draws that these runs made.
        dry_run: Count the draws without deleting them (default).
        progress: Called after each step with the number of draws deleted and found so far.

    Returns:
        What was deleted, or in a dry run would be.

    Raises:
        InvalidInputError: An argument is invalid.
        UnknownBufferError: A buffer does not exist.
    """
    age = checks.optional(checks.duration, "min_age", min_age)
    of_runs = checks.names("runs", runs)
    task = _Deletion(store, checks.flag("dry_run", dry_run), progress)
    before = await task.time_before(age)
    by = None if of_runs is None else sorted(of_runs)
    for row in await task.rows(checks.names("names", names)):
        await task.delete_draws(ended_draws(row.id, before=before, runs=by))
    return task.done


async def delete_buffer(
    store: Store, name: str, *, dry_run: bool = False, progress: Progress | None = None
) -> Removal:
    """Delete a buffer: its groups, draws, leases, cursors and settings.

    Groups and draws are deleted in short transactions, the rest in the last one. Later calls on
    the buffer raise `UnknownBufferError`, and calls on its leases `LeaseExpiredError`. If
    interrupted, the buffer still exists with its remaining data; call it again to delete the rest.

    Args:
        store: The store, opened for writing unless `dry_run` is set.
        name: Name of the buffer.
        dry_run: Count groups and draws without deleting anything.
        progress: Called after each step with the number of groups and draws deleted and found so
            far.

    Returns:
        What was deleted, or in a dry run would be.

    Raises:
        UnknownBufferError: The buffer does not exist.
    """
    task = _Deletion(store, checks.flag("dry_run", dry_run), progress)
    [row] = await task.rows([checks.name("name", name)])
    if not dry_run:  # fails before the first step if the user may not do the last one
        await task.database.write(lambda it: it.run(delete_buffer_row(NO_ID)))
    await task.delete_groups(row, Selection(row.id))
    await task.delete_draws(draw.c.buffer_id == row.id)

    def end(session: Session) -> None:
        with buffer_locked(session, scope_of(task.database.backend, row)) as buffer:
            transitions.delete(buffer, selection(buffer.id), "the buffer was deleted")
        session.run(delete_buffer_row(row.id))

    if not dry_run:
        await task.database.write(end)
        task.database.signal.announce()
    return task.done


async def delete_run(
    store: Store, name: str, *, dry_run: bool = False, progress: Progress | None = None
) -> Removal:
    """Delete a run with the groups that it put, in every buffer, and its draws.

    Draws of these groups by other runs stay recorded. If a process still uses the run, its next
    put or draw raises `UnknownRunError`.

    Args:
        store: The store, opened for writing unless `dry_run` is set.
        name: Name of the run. It should have ended.
        dry_run: Count groups and draws without deleting anything.
        progress: Called after each step with the number of groups and draws deleted and found so
            far.

    Returns:
        What was deleted, or in a dry run would be.

    Raises:
        InvalidInputError: There is no such run, or it is still putting or drawing.
        GroupLeasedError: Groups that the run put or drew are leased. Nothing was deleted, unless
            they were leased during the call; leased groups are kept.
    """
    checks.name("name", name)
    known = [one.name for one in await store.runs()]
    if name not in known:
        raise InvalidInputError("name", f"one of the runs {', '.join(known) or '(none)'}", name)
    task = _Deletion(store, checks.flag("dry_run", dry_run), progress)

    async def delete_contents() -> None:
        leased = await task.read(lambda it: it.run(select_leased_of_run(name)))
        if leased:
            raise GroupLeasedError([row.id for row in leased])
        put = compiling.of_runs([name]) & IS_FREE
        for row in await task.rows(None):
            await task.delete_groups(row, Selection(row.id, where=put))
            await task.delete_draws(ended_draws(row.id, runs=[name]))

    def run_deleted(session: Session) -> bool:
        return session.run(delete_run_row(name)) > 0

    if dry_run:
        await delete_contents()
        return task.done
    attempts = 0
    # Tried first, so that it fails before anything is deleted if the user may not delete runs.
    while not await task.database.write(run_deleted, end=end_in(BULK_SECONDS)):
        if attempts == ATTEMPTS:
            raise InvalidInputError("name", "a run that has ended", f"{name!r}, which is active")
        await delete_contents()
        attempts += 1
    return task.done


class _Deletion:
    """A running deletion.

    Attributes:
        database: The database of the store.
        done: What was deleted so far.
    """

    def __init__(self, store: Store, dry_run: bool, progress: Progress | None) -> None:
        self.done = Removal(dry_run)
        self.database = store._payloads.database
        self._progress = checks.optional(checks.function, "progress", progress)
        self._total = 0

    async def time_before(self, age: float | None) -> datetime | None:
        """Return the time `age` seconds ago, by the database's clock."""
        if age is None:
            return None
        return await self.database.read(lambda it: it.now()) - timedelta(seconds=age)

    async def rows(self, names: Iterable[str] | None) -> list[BufferRow]:
        """Return buffers by name; None for all."""

        def work(session: Session) -> list[BufferRow]:
            known = buffers.buffer_names(session)
            found = []
            for name in known if names is None else names:
                row = buffers.find(session, name)
                if row is None:
                    raise UnknownBufferError(name, known)
                found.append(row)
            return found

        return await self.database.read(work)

    async def delete_groups(self, row: BufferRow, which: Selection) -> None:
        """Delete groups of a buffer that exist now."""
        expected, last = await self.read(lambda it: _measured(it, which))

        def delete(ids: Sequence[int], session: Session) -> tuple[Removal, float]:
            with buffer_locked(session, scope_of(self.database.backend, row)) as buffer:
                begun = time.perf_counter()
                # The status of some may have changed since their ids were read.
                still = which._replace(ids=ids)
                removal, _ = _measured(session, still)
                transitions.delete(buffer, still.condition, "deleted")
                return removal, time.perf_counter() - begun

        condition = which._replace(by_id=True).condition
        await self._in_steps(group.id, condition, last, expected, delete)

    async def delete_draws(self, condition: ColumnElement[bool]) -> None:
        """Delete draws that exist now."""
        weigh = weigh_draws(condition)
        [found] = await self.read(lambda it: it.run(weigh))
        expected = Removal(False, num_draws=found.number)

        def delete(ids: Sequence[int], session: Session) -> tuple[Removal, float]:
            begun = time.perf_counter()
            number = session.run(delete_draws(ids))
            return Removal(False, num_draws=number), time.perf_counter() - begun

        await self._in_steps(draw.c.id, condition, found.last or 0, expected, delete)

    async def _in_steps(
        self,
        key: Column[int],
        condition: ColumnElement[bool],
        last: int,
        expected: Removal,
        delete: Callable[[Sequence[int], Session], tuple[Removal, float]],
    ) -> None:
        """Delete rows that meet a condition, up to an id, in steps of about `STEP_SECONDS`.

        Args:
            key: Id of the rows.
            condition: The condition.
            last: The last id.
            expected: Number and size of these rows. A dry run only counts them.
            delete: Deletes rows. Returns what it deleted, and how long it worked, holding locks.
                The time that it waited for them is not included: among busy clients, steps would
                become shorter and shorter.
        """
        if self.done.dry_run:
            self._add(expected)
            return
        self._total += expected.num_groups + expected.num_draws
        size, after = FIRST_STEP, 0
        while after < last:
            some = select_ids_between(key, condition, after, last, PAGE)
            ids = [row.id for row in await self.read(methodcaller("run", some))]
            after = ids[-1] if len(ids) == PAGE else last
            while ids:
                removal, seconds = await self.database.write(partial(delete, ids[:size]))
                del ids[:size]
                self._add(removal)
                size = int(size * STEP_SECONDS / max(seconds, STEP_SECONDS / 2)) or 1
                size = min(size, LONGEST_STEP)
                await self.database.let_others_in()
        self.database.signal.announce()

    async def read(self, work: Callable[[Session], T]) -> T:
        """Run a read, which may pass over every group or draw of a buffer."""
        return await self.database.read(work, end=end_in(BULK_SECONDS))

    def _add(self, more: Removal) -> None:
        self.done = Removal(
            self.done.dry_run,
            self.done.num_groups + more.num_groups,
            self.done.num_bytes + more.num_bytes,
            self.done.num_draws + more.num_draws,
        )
        if self._progress is not None and not self.done.dry_run:
            self._progress(self.done.num_groups + self.done.num_draws, self._total)


def _measured(session: Session, which: Selection) -> tuple[Removal, int]:
    """Return number and size of the selected groups, and the largest id."""
    [found] = session.run(weigh_groups(which.condition))
    return Removal(False, found.number, int(found.size)), found.last or 0


def weigh_groups(condition: ColumnElement[bool]) -> Select[Any]:
    """Select the number, total payload size and last id of the groups that meet a condition."""
    columns: tuple[ColumnElement[Any], ...] = (
        func.count().label("number"),
        func.coalesce(func.sum(group.num_bytes), 0).label("size"),
        func.max(group.id).label("last"),
    )
    return select(*columns).where(condition)


def weigh_draws(condition: ColumnElement[bool]) -> Select[Any]:
    """Select the number and last id of the draws that meet a condition."""
    columns: tuple[ColumnElement[Any], ...] = (
        func.count().label("number"),
        func.max(draw.c.id).label("last"),
    )
    return select(*columns).where(condition)


def select_ids_between(
    key: Column[int], condition: ColumnElement[bool], after: int, last: int, most: int
) -> Select[Any]:
    """Select up to `most` ids of the groups or draws that meet a condition, in a range of ids."""
    in_range = key.between(after + 1, last)
    statement = select(key.label("id")).where(condition, in_range)
    return statement.order_by(key).limit(most)


def ended_draws(
    buffer_id: int, *, before: datetime | None = None, runs: Sequence[str] | None = None
) -> ColumnElement[bool]:
    """Condition for draws of a buffer without leased groups, made before a time, by some runs."""
    condition = (draw.c.buffer_id == buffer_id) & ~LEASED.exists()
    if before is not None:
        condition &= draw.c.created_at < before
    if runs is not None:
        condition &= draw.c.run_id.in_(select(run.c.id).where(among(run.c.name, runs)))
    return condition


def select_leased_of_run(name: str) -> Select[int]:
    """Select the leased or claimed groups that a run has put or drawn."""
    mine = select(run.c.id).where(run.c.name == name)
    drawn = select(draw_group.c.group_id).join_from(draw_group, draw)
    drawn = drawn.where(draw.c.run_id.in_(mine), IS_LEASED)
    return select(group.id).where(~IS_FREE, group.run_id.in_(mine) | group.id.in_(drawn))


def delete_buffer_row(buffer_id: int) -> Delete:
    """Delete a buffer and everything that belongs to it."""
    return delete(buffer).where(buffer.c.id == buffer_id)


def delete_run_row(name: str) -> Delete:
    """Delete a run, unless groups or draws refer to it."""
    put = select(group.id).where(group.run_id == run.c.id).exists()
    drew = select(draw.c.id).where(draw.c.run_id == run.c.id).exists()
    return delete(run).where(run.c.name == name, ~put, ~drew)
