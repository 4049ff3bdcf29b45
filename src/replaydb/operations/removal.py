"""Deleting what is over or not wanted, some at a time, while others use the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import Column, ColumnElement, Connection

from replaydb import checks
from replaydb.database import filters
from replaydb.database.prepared import execute
from replaydb.database.repository import buffers, transitions
from replaydb.database.repository.buffers import BufferRow, RunRow
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import buffer_locked
from replaydb.database.schema import draw, group
from replaydb.database.statements import history
from replaydb.database.statements.selections import UNHELD, Selection, selection
from replaydb.episodes import GroupStatus
from replaydb.errors import GroupLeasedError, InvalidInputError, UnknownBufferError
from replaydb.store import Store

#: How long a step should hold its locks; it is of so many groups or draws: at first, at most.
STEP_SECONDS = 0.05
FIRST_STEP, LONGEST_STEP = 50, 5000
#: Ids that are looked up at once.
PAGE = 100_000
#: Times that a run may turn out to be going on.
ATTEMPTS = 3
#: The id of nothing.
NO_ID = 0

#: Told how much is deleted, and how much there is to delete.
Progress = Callable[[int, int | None], object]


@dataclass(frozen=True, slots=True)
class Removal:
    """What was deleted, or would be.

    Attributes:
        dry_run: Whether nothing was deleted.
        num_groups: Groups, with everything that belongs to them.
        num_bytes: Bytes of their payloads. A database keeps the space and uses it again.
        num_draws: Draws, with what they say of their groups.
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
    dry_run: bool = True,
    progress: Progress | None = None,
) -> Removal:
    """Delete groups by status, age and run, in short transactions between which others write.

    Groups that a lease holds stay, also those that are claimed while they arrive. It may be broken
    off at any point, and run again: it goes on where it was.

    Args:
        store: Where.
        names: Only in these buffers; by default in all.
        statuses: Only groups of these statuses; none that are leased, which somebody holds.
        min_age: Only groups that were put so many seconds ago.
        runs: Only groups that these runs put.
        dry_run: Only look, and say how much that is.
        progress: Called with how many are deleted, and how many there are.

    Raises:
        InvalidInputError: An argument is wrong.
        UnknownBufferError: There is no buffer of one of the names.
    """
    wanted = checks.some_of("statuses", statuses, GroupStatus) or frozenset()
    if GroupStatus.LEASED in wanted:
        raise InvalidInputError("statuses", "statuses of groups that nobody holds", "leased")
    age = checks.optional(checks.duration, "min_age", min_age)
    of_runs = checks.names("runs", runs)
    dry_run = checks.flag("dry_run", dry_run)
    task = _Task(store, dry_run, progress)
    before = await task.time_before(age)
    where = filters.all_of(
        (
            None if before is None else group.created_at < before,
            None if of_runs is None else filters.of_runs(sorted(of_runs)),
            UNHELD,
        )
    )
    for row in await task.rows(checks.names("names", names)):
        await task.delete_groups(row, Selection(row.id, statuses=wanted, where=where))
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
    """Delete the record of draws by age and run, as `prune_groups` deletes groups.

    A draw of which any group is leased stays.

    Args:
        store: Where.
        names: Only of these buffers; by default of all.
        min_age: Only draws that were made so many seconds ago.
        runs: Only draws by these runs.
        dry_run: Only look, and say how many there are.
        progress: Called with how many are deleted, and how many there are.

    Raises:
        InvalidInputError: An argument is wrong.
        UnknownBufferError: There is no buffer of one of the names.
    """
    age = checks.optional(checks.duration, "min_age", min_age)
    of_runs = checks.names("runs", runs)
    task = _Task(store, checks.flag("dry_run", dry_run), progress)
    before = await task.time_before(age)
    by = None if of_runs is None else sorted(of_runs)
    for row in await task.rows(checks.names("names", names)):
        await task.delete_draws(history.draws_over(row.id, before=before, runs=by))
    return task.done


async def delete_buffer(
    store: Store, name: str, *, dry_run: bool = False, progress: Progress | None = None
) -> Removal:
    """Delete a buffer: its groups, draws, leases, cursors and settings.

    Groups and draws go in short transactions, the rest in the last one. Whoever uses the buffer
    gets `UnknownBufferError` from then on, who holds a lease `LeaseExpiredError`. If it is broken
    off, the buffer is there with what is left; to call it again does the rest.

    Args:
        store: Where.
        name: Of the buffer.
        dry_run: Only look, and say how much there is.
        progress: Called with how many groups and draws are deleted, and how many there are.

    Raises:
        UnknownBufferError: There is no such buffer.
    """
    task = _Task(store, checks.flag("dry_run", dry_run), progress)
    [row] = await task.rows([checks.name("name", name)])
    if not dry_run:  # whoever may not do the last step is refused before the first
        await store._database.write(lambda it: execute(it, history.delete_buffer(NO_ID)))
    await task.delete_groups(row, Selection(row.id))
    await task.delete_draws(draw.c.buffer_id == row.id)

    def end(connection: Connection) -> None:
        with buffer_locked(connection, task.scope(row)) as buffer:
            transitions.delete(buffer, selection(buffer.id), "the buffer was deleted")
        execute(connection, history.delete_buffer(row.id))

    if not dry_run:
        await store._database.write(end)
        store._database.signal.announce()
    return task.done


async def delete_run(
    store: Store, name: str, *, dry_run: bool = False, progress: Progress | None = None
) -> Removal:
    """Delete a run with the groups that it put, in every buffer, and the draws that it made.

    What other runs drew of its groups stays on record. A process that goes on with the run can
    not put or draw any more: it gets `UnknownRunError`.

    Args:
        store: Where.
        name: Of the run, which should be over.
        dry_run: Only look, and say how much there is.
        progress: Called with how many groups and draws are deleted, and how many there are.

    Raises:
        InvalidInputError: There is no such run, or it goes on putting or drawing.
        GroupLeasedError: A lease holds groups that it has put or drawn; they stay. Nothing was
            deleted, unless it has come meanwhile.
    """
    checks.name("name", name)
    known = [one.name for one in await store.runs()]
    if name not in known:
        raise InvalidInputError("name", f"one of the runs {', '.join(known) or '(none)'}", name)
    task = _Task(store, checks.flag("dry_run", dry_run), progress)

    async def delete_what_is_of_it() -> None:
        held = await store._database.read(lambda it: execute(it, history.select_held_by_run(name)))
        if held:
            raise GroupLeasedError([row.id for row in held])
        put = filters.of_runs([name]) & UNHELD
        for row in await task.rows(None):
            await task.delete_groups(row, Selection(row.id, where=put))
            await task.delete_draws(history.draws_over(row.id, runs=[name]))

    def run_deleted(connection: Connection) -> bool:
        return execute(connection, history.delete_run(name)) > 0

    if dry_run:
        await delete_what_is_of_it()
        return task.done
    attempts = 0
    # Asked first: whoever may not delete the run is refused before anything else is deleted.
    while not await store._database.write(run_deleted):
        if attempts == ATTEMPTS:
            raise InvalidInputError("name", "a run that is over", f"{name!r}, which goes on")
        await delete_what_is_of_it()
        attempts += 1
    return task.done


class _Task:
    """A deletion under way.

    Attributes:
        done: What is deleted by now.
    """

    def __init__(self, store: Store, dry_run: bool, progress: Progress | None) -> None:
        self.done = Removal(dry_run)
        self._database = store._database
        self._progress = checks.optional(checks.function, "progress", progress)
        self._total = 0

    async def time_before(self, age: float | None) -> datetime | None:
        """The time so many seconds ago, by the database's clock."""
        if age is None:
            return None
        return await self._database.read(self._database.backend.now) - timedelta(seconds=age)

    async def rows(self, names: Iterable[str] | None) -> list[BufferRow]:
        """Buffers by name, or all of them."""

        def work(connection: Connection) -> list[BufferRow]:
            known = buffers.buffer_names(connection)
            found = []
            for name in known if names is None else names:
                row = buffers.find(connection, name)
                if row is None:
                    raise UnknownBufferError(name, known)
                found.append(row)
            return found

        return await self._database.read(work)

    def scope(self, row: BufferRow) -> Scope:
        """Who deletes: no run."""
        nobody = RunRow(0, None)
        return Scope(self._database.backend, row.id, row.name, nobody, row, lambda _: None)

    async def delete_groups(self, row: BufferRow, which: Selection) -> None:
        """Delete groups of a buffer: those that are there now."""
        there, last = await self._database.read(lambda it: _weighed(it, which))
        if self.done.dry_run:
            self._add(there)
            return
        self._total += there.num_groups

        def delete(connection: Connection, ids: Sequence[int]) -> Removal:
            with buffer_locked(connection, self.scope(row)) as buffer:
                # Some may have come to another status since.
                still = replace(which, ids=ids)
                going, _ = _weighed(connection, still)
                transitions.delete(buffer, still.condition, "deleted")
                return going

        await self._in_steps(group.id, which.condition, last, delete)

    async def delete_draws(self, condition: ColumnElement[bool]) -> None:
        """Delete draws: those that are there now."""
        weigh = history.weigh_draws(condition)
        [found] = await self._database.read(lambda it: execute(it, weigh))
        if self.done.dry_run:
            self._add(Removal(True, num_draws=found.number))
            return
        self._total += found.number

        def delete(connection: Connection, ids: Sequence[int]) -> Removal:
            return Removal(False, num_draws=execute(connection, history.delete_draws(ids)))

        await self._in_steps(draw.c.id, condition, found.last or 0, delete)

    async def _in_steps(
        self,
        key: Column[int],
        condition: ColumnElement[bool],
        last: int,
        delete: Callable[[Connection, Sequence[int]], Removal],
    ) -> None:
        """Delete what meets a condition, up to an id, in transactions of about `STEP_SECONDS`."""
        size, after = FIRST_STEP, 0

        def step(connection: Connection, ids: Sequence[int]) -> tuple[Removal, float]:
            begun = time.perf_counter()
            return delete(connection, ids), time.perf_counter() - begun

        while after < last:
            some = history.select_ids_between(key, condition, after, last, PAGE)
            ids = [row.id for row in await self._database.read(partial(execute, statement=some))]
            after = ids[-1] if len(ids) == PAGE else last
            while ids:
                gone, seconds = await self._database.write(partial(step, ids=ids[:size]))
                del ids[:size]
                self._add(gone)
                size = int(size * STEP_SECONDS / max(seconds, STEP_SECONDS / 2)) or 1
                size = min(size, LONGEST_STEP)
                await asyncio.sleep(self._database.backend.turn_seconds)  # to others who wait
        self._database.signal.announce()

    def _add(self, more: Removal) -> None:
        self.done = Removal(
            self.done.dry_run,
            self.done.num_groups + more.num_groups,
            self.done.num_bytes + more.num_bytes,
            self.done.num_draws + more.num_draws,
        )
        if self._progress is not None and not self.done.dry_run:
            self._progress(self.done.num_groups + self.done.num_draws, self._total)


def _weighed(connection: Connection, which: Selection) -> tuple[Removal, int]:
    """How many groups there are, how large they are, and the id of the last."""
    [found] = execute(connection, history.weigh_groups(which.condition))
    return Removal(False, found.number, int(found.size)), found.last or 0
