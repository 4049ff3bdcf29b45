"""The steps of a draw: one transaction, then payloads read from a snapshot of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any, Self

import numpy as np

from replaydb.batch.batch import Batch
from replaydb.buffer.core import BufferCore, Work
from replaydb.database.repository import (
    buffers,
    damage,
    draws,
    groups,
    leases,
    lineage,
    preview,
    shortage,
)
from replaydb.database.repository.draw_request import Drawn, DrawRequest
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import buffer_locked, tasks_locked
from replaydb.database.runtime.protocol import LostRaceError
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import allowance, end_in
from replaydb.database.tables.records import Decoded, Stored
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.episodes.turns import trusted
from replaydb.errors import (
    CorruptPayloadError,
    DatabaseError,
    DatabaseFullError,
    DatabaseReplacedError,
    DatabaseUnavailableError,
    NotEnoughGroupsError,
    RateLimitedError,
    ReplayDBError,
    StoreClosedError,
)
from replaydb.util.cancellation import run_to_completion

logger = logging.getLogger(__name__)

#: Statuses that a group keeps if its payload turns out to be damaged.
_OUT_OF_USE = (GroupStatus.FAILED, GroupStatus.ARCHIVED)
#: Time limit in seconds for counting why there were too few groups, and for maintenance before.
EXPLAIN_SECONDS = 2.0
#: How long a failed call waits, in seconds, until its lease is released.
RELEASE_SECONDS = 5.0
#: Pause in seconds before another attempt to release the lease.
RELEASE_PAUSE = 1.0


class Drawing(BufferCore):
    """The steps that `sample` and `lease` share."""

    async def _draw(self, request: DrawRequest, timeout: float | None) -> Result:
        if not request.quotas:
            return Result.nothing()
        explain = partial(self._explain, request, is_draw=True)
        # An ordered draw cannot know how far it has to read.
        is_long = request.has_ordered_filter and any(
            size > draws.MOST_SCANNED
            for name, size in self._drawn_tasks.items()
            if request.tasks is None or name in request.tasks
        )
        async with self._waiter(timeout, explain) as waiter:
            while True:
                try:
                    found = await self._evaluated(request, waiter.end) if is_long else request
                    return await self._draw_now(found, waiter.end)
                except draws.LongScanError:
                    is_long = True
                except (NotEnoughGroupsError, RateLimitedError) as error:
                    if request.at_least == 0 and isinstance(error, NotEnoughGroupsError):
                        return Result.nothing()
                    check = partial(self._may_suffice, request, evaluates=is_long)
                    await waiter.wait(error, check)

    async def _may_suffice(
        self, request: DrawRequest, end: float | None, *, evaluates: bool = False
    ) -> bool:
        """Whether there would be enough groups if all were eligible. A lock-free read."""
        if request.statuses != (GroupStatus.COMPLETED,):
            return True
        try:
            available = await self._read(
                lambda session: buffers.available(session, self.id), end, single=True
            )
        except DatabaseUnavailableError:
            return True  # the draw itself waits for the database
        found = 0
        for quota in request.quotas:
            names = available.keys() if quota.tasks is None else quota.tasks
            found += min(quota.count, sum(available.get(name, 0) for name in names))
        if found < request.at_least:
            return False
        if not evaluates or (await self._evaluated(request, end)).may_suffice:
            return True
        # Groups of an expired lease, or with a passed deadline, become candidates by maintenance.
        return await self._read(self._is_maintenance_due, end)

    async def _evaluated(self, request: DrawRequest, end: float | None) -> DrawRequest:
        """Return the request with the groups that meet its filters. A lock-free read."""
        is_single = len(request.quotas) == 1 and not request.has_ordered_filter
        return await self._read(
            lambda session: preview.with_candidates(session, self._row, request),
            end,
            has_any=lambda it: it.may_suffice,
            single=is_single and not self._row.settings.indexed_tags,
        )

    async def _explain(
        self, request: DrawRequest, error: ReplayDBError, *, is_draw: bool = False
    ) -> None:
        """Add to an error which groups exist instead of those requested.

        A draw that fails rolls back the maintenance that it began with. It is done again, so that
        the counts are those that the draw found, and stays done.
        """
        if not isinstance(error, NotEnoughGroupsError):
            return
        # If counting fails, the error keeps its short message.
        with suppress(DatabaseError, StoreClosedError):
            end = end_in(EXPLAIN_SECONDS)
            if is_draw and await self._database.read(self._is_maintenance_due, end=end):
                await self._run_due_maintenance(end)
            await self._database.read(
                lambda session: shortage.explain(session, self.id, request, error),
                end=end_in(EXPLAIN_SECONDS),
            )

    async def _draw_now(self, request: DrawRequest, end: float | None) -> Result:
        drawn: Drawn | None = None
        has_text = False

        def work(scope: Scope, session: Session) -> Drawn:
            nonlocal drawn, has_text
            with tasks_locked(
                session,
                scope,
                request.tasks,
                draws=scope.row.settings.record_draws,
                leases=request.lease is not None,
                reads=draws.first_reads(scope.buffer_id, request, self._drawn_tasks),
            ) as buffer:
                self._drawn_tasks = {
                    name: task.stored_groups for name, task in buffer.task_states.items()
                }
                found = draws.draw(buffer, request)
            has_text = bool(found.contents.with_text)
            drawn = found  # set before the commit, which may succeed even if it is cancelled
            return found

        def read(session: Session, result: Drawn, pinned: Callable[[], object]) -> Stored:
            buffers.begin_snapshot(session, self.id)
            pinned()
            return draws.read_in_snapshot(session, result, request.fields)

        def undone() -> None:
            nonlocal drawn
            drawn = None

        def attempt(scope: Scope) -> Coroutine[Any, Any, tuple[Drawn, Stored | None]]:
            return self._database.write_then_read(
                partial(work, scope),
                read,
                is_needed=lambda found: found.contents.in_snapshot,
                num_bytes=lambda found: found.contents.num_bytes,
                end=end,
                undone=undone,
            )

        try:
            found, in_snapshot = await self._transact(attempt, end, records_run=True)
            if not request.loads:
                return Result(Batch([]), found, {})
            stored = found.contents.stored
            if in_snapshot is not None:
                stored = in_snapshot._replace(groups=stored.groups)
            end = end or end_in(allowance(found.contents.num_bytes))
            return await self._delivered(found, stored, end, request.fields)
        except BaseException as error:
            # Not while a reader is open: the write transaction may wait for a reader.
            if drawn is not None and request.lease is not None:
                await self._release_undelivered(drawn, request.lease.ttl, "not delivered")
            is_undone = drawn is None and type(error) is DatabaseError
            if not (is_undone and has_text) or request.is_large:
                raise
        # A server cannot return a gigabyte of texts in one value, and their size was not known.
        return await self._draw_now(replace(request, is_large=True), end)

    async def _delivered(
        self, drawn: Drawn, stored: Stored, end: float, fields: frozenset[str] | None
    ) -> Result:
        """Decode the groups of a draw. Damaged groups become `failed`, if that can be written."""
        result = Result.of(drawn, await self._decoded(stored, end, fields))
        if result.damaged and not self._database.backend.read_only:
            seen = dict(zip(drawn.ids, drawn.times_replaced, strict=True))
            await self._mark_failed(result.damaged, seen, drawn.draw_id)
        return result

    async def _release_undelivered(self, drawn: Drawn, ttl: float, reason: str) -> None:
        """Release a lease that never reached the caller. It does not count as an attempt."""
        assert drawn.lease_id is not None  # noqa: S101
        lease_id = drawn.lease_id
        names = frozenset(drawn.task_names)

        def work(scope: Scope, session: Session) -> None:
            # The draw holds the same locks until it ends. If its commit is still on its way to the
            # server, this waits for it instead of finding no lease.
            with tasks_locked(session, scope, names) as buffer:
                leases.nack(buffer, lease_id, None, reason, attempts=0)

        await self._release_soon(f"lease {lease_id}", ttl, work)

    async def _release_soon(self, name: str, ttl: float, release: Work[None]) -> None:
        """Release a lease or a claim that never reached the caller.

        If the database cannot be reached within `RELEASE_SECONDS`, it is released in the
        background.

        Args:
            name: What is released, for the log.
            ttl: Seconds until it expires.
            release: The transaction.
        """
        releasing = asyncio.create_task(self._release(name, ttl, release))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)
        await run_to_completion(asyncio.wait([releasing], timeout=RELEASE_SECONDS))

    async def _stop_releasing(self, end: float) -> None:
        """Wait for leases that are being released, for seconds but not beyond `end`; then stop."""
        if releasing := tuple(self._releasing):
            seconds = min(RELEASE_SECONDS, end - end_in(0))
            await asyncio.wait(releasing, timeout=max(seconds, 0))
            for task in releasing:
                task.cancel()
            await asyncio.wait(releasing)

    async def _release(self, name: str, ttl: float, release: Work[None]) -> None:
        """Release a lease or claim. After an outage or a lost race, try again until it expires."""
        end = end_in(ttl)
        while end_in(0) < end:
            try:
                await self._write(release)
            except DatabaseError as error:
                if not _may_pass(error):
                    logger.exception(
                        "buffer %r: %s was not delivered and cannot be released; its groups become"
                        " available when it expires",
                        self.name,
                        name,
                    )
                    return
                await asyncio.sleep(RELEASE_PAUSE)
            except ReplayDBError:  # there is none, it has ended, or the store is closed
                return
            else:
                return

    async def _mark_failed(
        self, damaged: Mapping[int, str], seen: Mapping[int, int | None], draw_id: int | None
    ) -> None:
        """Set damaged groups of a draw to `failed`, so that later draws do not take them.

        Args:
            damaged: What is damaged, by id.
            seen: How often each group had been replaced when it was drawn, by id.
            draw_id: Id of the draw, if it is recorded.
        """

        def work(scope: Scope, session: Session) -> list[int]:
            with buffer_locked(session, scope) as buffer:
                rows = [
                    row
                    for row in groups.scalars(session, self.id, sorted(damaged))
                    # A group replaced meanwhile has other content, which may be intact.
                    if row.times_replaced == seen[row.id] and row.group_status not in _OUT_OF_USE
                ]
                damage.fail(buffer, rows, damaged)
                if draw_id is not None:
                    lineage.record_lost(buffer, draw_id, damaged)
            return [row.id for row in rows]

        for group_id in await self._write(work):
            logger.error("buffer %r: group %d failed: %s", self.name, group_id, damaged[group_id])


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a draw.

    Attributes:
        batch: The groups that could be read; empty if the request does not load them.
        drawn: The draw.
        damaged: Why each other group could not be read, by id.
    """

    batch: Batch
    drawn: Drawn
    damaged: Mapping[int, str]

    @classmethod
    def nothing(cls) -> Self:
        """Return the result of an empty draw, which is not recorded."""
        return cls.of(Drawn.empty(), Decoded())

    @classmethod
    def of(cls, drawn: Drawn, decoded: Decoded) -> Self:
        """Return the result with the decoded groups in the order of the draw."""
        sound = np.array([group_id in decoded.groups for group_id in drawn.ids], np.bool_)
        batch: Batch = trusted(
            Batch,
            groups=tuple(compress(map(decoded.groups.get, drawn.ids), sound)),
            probabilities=drawn.probabilities[sound],
            weights=drawn.weights[sound],
            draw_id=drawn.draw_id,
        )
        damaged = {
            group_id: decoded.corrupt.get(group_id, "the payload is missing")
            for group_id in drawn.ids
            if group_id not in decoded.groups
        }
        return cls(batch, drawn, damaged)


def _may_pass(error: DatabaseError) -> bool:
    """Whether the same call may succeed later: after an outage, a full disk, or a lost race."""
    if isinstance(error, DatabaseReplacedError):  # only reopening the store helps
        return False
    lost = isinstance(error.__cause__, LostRaceError)
    return lost or isinstance(error, DatabaseUnavailableError | DatabaseFullError)


def check_intact(damaged: Mapping[int, str], batch: Batch | None = None) -> None:
    """Raise `CorruptPayloadError`, with the intact groups, if some groups are damaged."""
    if damaged:
        reasons = "; ".join(sorted(set(damaged.values())))
        raise CorruptPayloadError(reasons, sorted(damaged), batch)
