"""Waiting until there are more groups, or fewer: how generators keep in step with trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sqlalchemy import ColumnElement, Connection

from replaydb import checks
from replaydb.buffer.core import BufferCore
from replaydb.buffer.requests import eligible
from replaydb.database import filters
from replaydb.database.repository import buffers, groups, upkeep
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import tasks_locked
from replaydb.episodes import GroupStatus
from replaydb.errors import InvalidInputError, RateLimitedError


class Pacing(BufferCore):
    """Looks that wait. They reserve nothing: of several who look, all see the same."""

    async def wait_until(
        self,
        *,
        fewer_than: int | None = None,
        at_least: int | None = None,
        tasks: str | Iterable[str] | None = None,
        statuses: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        runs: str | Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Wait until there are fewer groups than a number, or at least that many.

        Leases and deadlines that have run out, and `time_to_live`, are dealt with first, as a
        put or a draw does.

        Args:
            fewer_than: Wait until there are fewer groups than this.
            at_least: Wait until there are at least so many; instead of `fewer_than`.
            tasks: Count only groups of these tasks.
            statuses: Count only groups of these statuses.
            where: Count only groups that meet this expression over `replaydb.col`.
            runs: Count only groups that these runs put.
            timeout: Seconds to wait; None waits for ever, 0 is one look.

        Returns:
            Whether there were, in time.

        Raises:
            InvalidInputError: An argument is wrong.
        """
        fewer = checks.optional(checks.whole_number, "fewer_than", fewer_than, 1)
        least = checks.optional(checks.whole_number, "at_least", at_least)
        if (fewer is None) == (least is None):
            raise InvalidInputError("wait_until", "fewer_than or at_least", "both or neither")
        names = checks.names("tasks", tasks)
        several = checks.some_of("statuses", statuses, GroupStatus)
        condition = filters.all_of(eligible(where, None, runs).values())
        most = fewer or least or 0

        def count(connection: Connection, row: BufferRow) -> int:
            return groups.count_up_to(connection, row, names, several, condition, most)

        found = await self._number(
            count,
            lambda number: (number < most) == (fewer is not None),
            f"there are {{}} groups; wanted fewer than {most}"
            if fewer
            else f"there are {{}} groups; wanted at least {most}",
            checks.seconds("timeout", timeout),
        )
        return found is not None

    async def admission(
        self,
        batch_size: int,
        *,
        max_staleness: int,
        n: int = 1,
        tasks: str | Iterable[str] | None = None,
        runs: str | Iterable[str] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Wait until `n` more groups may be generated without becoming too stale to be trained.

        Each trainer step uses up `batch_size` groups and makes one policy version, so whatever
        is started now is trained about `ahead / batch_size` versions from now, where `ahead` are
        the groups still arriving, leased, or not drawn yet. That stays within `max_staleness`
        while `ahead < (max_staleness + 1) * batch_size`: the admission rule of AReaL and SkyRL,
        in terms of what is stored, so that it holds across restarts. What no trainer of these runs
        will draw at that staleness is not ahead: groups that are staler, and, where `runs` are not
        named, those of runs of another lineage than the buffer follows.

        Args:
            batch_size: Groups of a trainer step.
            max_staleness: Policy versions that a group may be behind when it is trained.
            n: How many groups the caller wants to start.
            tasks: Count only groups of these tasks.
            runs: Count only groups that these runs put.
            timeout: Seconds to wait; None waits for ever.

        Returns:
            How many may be started now, at least n; 0 where it was not in time. Groups begun with
            `open_group` count from then on; others from their put.

        Raises:
            InvalidInputError: An argument is wrong.
        """
        size = checks.whole_number("batch_size", batch_size, least=1)
        stalest = checks.whole_number("max_staleness", max_staleness)
        most = size * (1 + stalest)
        wanted = checks.whole_number("n", n, least=1)
        if wanted > most:
            raise InvalidInputError("n", f"at most (max_staleness + 1) * batch_size = {most}", n)
        names = checks.names("tasks", tasks)
        putters = checks.names("runs", runs)

        def ahead(connection: Connection, row: BufferRow) -> int:
            return groups.count_ahead(connection, row, names, putters, stalest)

        found = await self._number(
            ahead,
            lambda number: most - number >= wanted,
            f"{{}} groups wait to be trained, {most} may be ahead",
            checks.seconds("timeout", timeout),
        )
        return 0 if found is None else most - found

    async def _number(
        self,
        look: Callable[[Connection, BufferRow], int],
        suits: Callable[[int], bool],
        reason: str,
        timeout: float | None,
    ) -> int | None:
        """Read a number until it is as wanted; None where it was not in time.

        Args:
            look: Reads it.
            suits: Whether it is as wanted.
            reason: What is wrong with it otherwise, with a place for the number.
            timeout: Seconds.
        """

        def work(connection: Connection) -> tuple[int, bool]:
            row = buffers.state(connection, self.id, self.name)
            number = look(connection, row)
            if suits(number):
                return number, False
            return number, upkeep.is_due(connection, row, self._database.backend.now(connection))

        def tidy(connection: Connection, scope: Scope) -> None:
            with tasks_locked(connection, scope, None):
                pass  # it is done before anything else is

        try:
            async with self._patience(timeout) as patience:
                while True:
                    number, due = await self._database.read(work, end=patience.end)
                    if due and not self._database.backend.read_only:
                        await self._write(tidy, patience.end)
                        self._database.signal.announce()
                        number, _due = await self._database.read(work, end=patience.end)
                    if suits(number):
                        return number
                    await patience.wait(RateLimitedError(reason.format(number)))
        except RateLimitedError:
            return None
