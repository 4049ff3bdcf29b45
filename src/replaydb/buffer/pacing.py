"""Calls that wait for a number of groups, to keep generators in step with trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sqlalchemy import ColumnElement, Select, select

from replaydb.buffer.core import BufferCore
from replaydb.buffer.requests import eligible
from replaydb.database.filters import compiling
from replaydb.database.repository import buffers, groups, maintenance
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.runtime.session import Session
from replaydb.domain import checks
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import InvalidInputError, RateLimitedError


class Pacing(BufferCore):
    """Wait for counts of groups. The result is advisory: it reserves nothing."""

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
        """Wait until there are fewer groups than a number, or at least a number.

        First, as in a draw, expired leases are released, and deadlines, `time_to_live` and
        `max_staleness` take effect (not in a read-only store).
        Nothing is reserved: concurrent callers get the same answer.

        Args:
            fewer_than: Wait until there are fewer groups than this number, which is 1 or more.
            at_least: Wait until there are at least this many groups. Give either `fewer_than` or
                `at_least`.
            tasks: Count only groups of these tasks.
            statuses: Count only groups with these statuses.
            where: Count only groups that meet this condition over `replaydb.col`.
            runs: Count only groups that these runs put.
            timeout: Seconds to wait. None (default) waits indefinitely. 0 checks once.

        Returns:
            True if the condition was met, False if `timeout` ended first.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        fewer = checks.optional(checks.whole_number, "fewer_than", fewer_than, 1)
        least = checks.optional(checks.whole_number, "at_least", at_least)
        if (fewer is None) == (least is None):
            raise InvalidInputError("wait_until", "fewer_than or at_least", "both or neither")
        names = checks.names("tasks", tasks)
        several = checks.some_of("statuses", statuses, GroupStatus)
        condition = compiling.all_of(eligible(where, None, runs).values())
        most = fewer or least or 0

        def count(session: Session, row: BufferRow) -> Select[int]:
            return groups.select_number(session, row, names, several, condition, most)

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
        """Wait until `n` more groups can be generated without becoming too stale to be trained.

        Each trainer step consumes `batch_size` groups and creates one policy version. A group that
        is started now is therefore trained about `ahead / batch_size` versions from now, where
        `ahead` counts the groups that are pending, leased, or not drawn yet. This is within
        `max_staleness` while `ahead < (max_staleness + 1) * batch_size`. AReaL and SkyRL use the
        same admission rule. Here it counts stored groups, so it holds across restarts.

        Groups that are already staler than `max_staleness` do not count as ahead. If `runs` is
        not given, groups of runs with a different lineage from the buffer do not count either.
        Nothing is
        reserved: concurrent callers get the same answer.

        Args:
            batch_size: Number of groups of a trainer step.
            max_staleness: Maximum staleness, in policy versions, at which a group is trained.
            n: Number of groups to start.
            tasks: Count only groups of these tasks.
            runs: Count only groups that these runs put.
            timeout: Seconds to wait. None (default) waits indefinitely. 0 checks once.

        Returns:
            Number of groups that can be started now, at least `n`, or 0 if `timeout` ended first. A
            group counts as ahead as soon as `open_group` or `put` stores it.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        size = checks.whole_number("batch_size", batch_size, least=1)
        stalest = checks.whole_number("max_staleness", max_staleness)
        most = size * (1 + stalest)
        wanted = checks.whole_number("n", n, least=1)
        if wanted > most:
            raise InvalidInputError("n", f"at most (max_staleness + 1) * batch_size = {most}", n)
        names = checks.names("tasks", tasks)
        putters = checks.names("runs", runs)

        def ahead(_session: Session, row: BufferRow) -> Select[int]:
            return groups.select_number_in_flight(row, names, putters, stalest)

        found = await self._number(
            ahead,
            lambda number: most - number >= wanted,
            f"{{}} groups are ahead of training; at most {most} can be",
            checks.seconds("timeout", timeout),
        )
        return 0 if found is None else most - found

    async def _number(
        self,
        count: Callable[[Session, BufferRow], Select[int]],
        accepts: Callable[[int], bool],
        reason: str,
        timeout: float | None,
    ) -> int | None:
        """Count groups until the number is accepted; return None if `timeout` ends first.

        Args:
            count: Function that returns the statement that counts.
            accepts: Function that returns whether the number is accepted.
            reason: Message for a number that is not accepted, with a placeholder for it.
            timeout: Seconds to wait.
        """

        def work(session: Session) -> tuple[int, bool]:
            row = buffers.state(session, self.id, self.name)
            now = row.time(session)
            number = count(session, row).scalar_subquery()
            [found] = session.run(select(number, maintenance.is_due(row, now)))
            return tuple(found)

        try:
            async with self._waiter(timeout) as waiter:
                while True:
                    number, due = await self._database.read(work, end=waiter.end)
                    if due and not self._database.backend.read_only:
                        await self._run_due_maintenance(waiter.end)
                        number, _due = await self._database.read(work, end=waiter.end)
                    if accepts(number):
                        return number
                    await waiter.wait(RateLimitedError(reason.format(number)))
        except RateLimitedError:
            return None
