"""A draw, from the request to the batch: in one transaction, and read from a snapshot of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
from sqlalchemy import Connection

from replaydb.batch.batch import Batch
from replaydb.buffer.core import BufferCore
from replaydb.cancellation import to_the_end
from replaydb.database.engines.protocol import LostRaceError
from replaydb.database.records import Decoded, Stored
from replaydb.database.repository import (
    buffers,
    damage,
    draws,
    groups,
    leases,
    lineage,
    shortage,
)
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import buffer_locked, tasks_locked
from replaydb.database.repository.portions import Drawn, DrawRequest
from replaydb.database.transactions import allowance, end_in
from replaydb.episodes import GroupStatus
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

logger = logging.getLogger(__name__)

#: Statuses of groups that are not drawn again, whatever is wrong with them.
_OUT_OF_USE = (GroupStatus.FAILED, GroupStatus.ARCHIVED)
#: How long it may take to find out why there were too few groups.
EXPLAIN_SECONDS = 2.0
#: How long a call that has failed waits until what it had leased is returned.
HAND_BACK_SECONDS = 5.0
#: Pause before what is leased is returned in another transaction.
HAND_BACK_PAUSE = 1.0


class Drawing(BufferCore):
    """What sampling and leasing have in common."""

    async def _draw(self, request: DrawRequest, timeout: float | None) -> Result:
        if not request.portions:
            return Result.nothing()
        async with self._patience(timeout, partial(self._explain, request)) as patience:
            while True:
                try:
                    return await self._draw_now(request, patience.end)
                except (NotEnoughGroupsError, RateLimitedError) as error:
                    if request.at_least == 0 and isinstance(error, NotEnoughGroupsError):
                        return Result.nothing()
                    await patience.wait(error, partial(self._may_suffice, request))

    async def _may_suffice(self, request: DrawRequest, end: float | None) -> bool:
        """Whether there would be enough if all were eligible: a look that locks nothing."""
        if request.statuses != (GroupStatus.COMPLETED,):
            return True
        try:
            available = await self._read(
                lambda connection: buffers.available(connection, self.id), end
            )
        except DatabaseUnavailableError:
            return True  # the attempt waits until it is back
        found = 0
        for portion in request.portions:
            names = available.keys() if portion.tasks is None else portion.tasks
            found += min(portion.count, sum(available.get(name, 0) for name in names))
        return found >= request.at_least

    async def _explain(self, request: DrawRequest, error: ReplayDBError) -> None:
        """Have an error say which groups there are instead of those that were asked for."""
        if not isinstance(error, NotEnoughGroupsError):
            return
        # Where it fails, the error says what it said.
        with suppress(DatabaseError, StoreClosedError):
            await self._database.read(
                lambda connection: shortage.explain(connection, self.id, request, error),
                end=end_in(EXPLAIN_SECONDS),
            )

    async def _draw_now(self, request: DrawRequest, end: float | None) -> Result:
        drawn: Drawn | None = None
        reading: asyncio.Task[Stored] | None = None

        def work(connection: Connection, scope: Scope) -> Drawn:
            nonlocal drawn
            with tasks_locked(connection, scope, request.tasks) as buffer:
                found = draws.draw(buffer, request)
            drawn = found  # now: a commit that is cancelled may yet be made
            return found

        try:
            async with self._database.turn_to_draw(end), AsyncExitStack() as stack:

                def undone() -> None:
                    nonlocal drawn
                    drawn = None

                async def begin_to_read(found: Drawn) -> None:
                    nonlocal reading
                    await stack.aclose()  # what an attempt before this one has begun
                    reading = await self._begin_to_read(found, end)
                    stack.push_async_callback(_end, reading)

                drawn = await self._write(
                    work,
                    end,
                    before_commit=begin_to_read,
                    is_needed=lambda found: found.stored is None,
                    undone=undone,
                )
                self._database.signal.announce()
                if drawn.stored is None and reading is not None:
                    drawn = replace(drawn, stored=await reading)
            return await self._delivered(drawn, end or end_in(allowance(drawn.num_bytes)))
        except BaseException:
            # Only here, where no reader is held: the writer may be waiting for one.
            if drawn is not None and request.lease is not None:
                await self._hand_back(drawn, request.lease.ttl, "not delivered")
            raise

    async def _delivered(self, drawn: Drawn, end: float) -> Result:
        """Decode what was drawn and read. What is damaged fails."""
        assert drawn.stored is not None  # noqa: S101
        result = Result.of(drawn, await self._decoded(drawn.stored, end))
        if result.damaged:
            await self._mark_failed(result.damaged, drawn)
        return result

    async def _begin_to_read(self, drawn: Drawn, end: float | None) -> asyncio.Task[Stored]:
        """Read what was drawn from a snapshot that is taken before this returns.

        As the tasks are locked then, nobody can delete it before it is read, and yet no lock is
        held while payloads travel. A reader whose connection is lost takes another snapshot.
        """
        loop = asyncio.get_running_loop()
        pinned: asyncio.Future[None] = loop.create_future()

        def pin() -> None:
            if not pinned.done():
                pinned.set_result(None)

        def work(connection: Connection) -> Stored:
            buffers.pin(connection, self.id)
            loop.call_soon_threadsafe(pin)
            return groups.stored(self._database.backend, connection, drawn.rows)

        read_by = end or end_in(allowance(drawn.num_bytes))
        reading = asyncio.create_task(self._database.read(work, end=read_by))
        try:
            either: list[asyncio.Future[Any]] = [reading, pinned]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await _end(reading)
            raise
        if not pinned.done():
            await reading  # raises what has kept it from its snapshot
        return reading

    async def _hand_back(self, drawn: Drawn, ttl: float, reason: str) -> None:
        """Return what was leased and never reached the caller: no attempt was made.

        If the database cannot be reached within some seconds, the caller is not kept waiting, and
        the lease is returned in the background.
        """
        returning = asyncio.create_task(self._return(drawn, ttl, reason))
        self._returning.add(returning)
        returning.add_done_callback(self._returning.discard)
        await to_the_end(asyncio.wait([returning], timeout=HAND_BACK_SECONDS))

    async def _stop_returning(self, end: float) -> None:
        """Wait a little for leases that are being returned, until `end` at most; then stop."""
        if returning := tuple(self._returning):
            seconds = min(HAND_BACK_SECONDS, end - end_in(0))
            await asyncio.wait(returning, timeout=max(seconds, 0))
            for task in returning:
                task.cancel()
            await asyncio.wait(returning)

    async def _return(self, drawn: Drawn, ttl: float, reason: str) -> None:
        """Return what was leased; after an outage or a lost race, try again until it expires."""
        assert drawn.lease_id is not None  # noqa: S101
        lease_id = drawn.lease_id
        names = {row["task_name"] for row in drawn.rows}

        def work(connection: Connection, scope: Scope) -> None:
            # The draw holds the same locks until it ends. If its commit was never answered and is
            # still on its way to the server, this waits for it instead of finding no lease.
            with tasks_locked(connection, scope, names) as buffer:
                leases.nack(buffer, lease_id, None, reason, attempts=0)

        end = end_in(ttl)
        while end_in(0) < end:
            try:
                await self._write(work)
            except DatabaseError as error:
                if not _may_pass(error):
                    logger.exception(
                        "buffer %r: lease %d was not delivered and cannot be returned; its groups"
                        " become available when it expires",
                        self.name,
                        lease_id,
                    )
                    return
                await asyncio.sleep(HAND_BACK_PAUSE)
            except ReplayDBError:  # the lease was not made, or is over, or the store is closed
                return
            else:
                self._database.signal.announce()
                return

    async def _mark_failed(self, damaged: Mapping[int, str], drawn: Drawn) -> None:
        """Damaged groups must not come back in every later draw."""
        seen = {row["id"]: row["times_replaced"] for row in drawn.rows}

        def work(connection: Connection, scope: Scope) -> list[int]:
            with buffer_locked(connection, scope) as buffer:
                rows = [
                    row
                    for row in groups.scalars(connection, self.id, sorted(damaged))
                    # What was replaced meanwhile is other content, and may well be sound.
                    if row.times_replaced == seen[row.id] and row.group_status not in _OUT_OF_USE
                ]
                damage.fail(buffer, rows, damaged)
                if drawn.draw_id is not None:
                    lineage.lose(buffer, drawn.draw_id, damaged)
            return [row.id for row in rows]

        for group_id in await self._write(work):
            logger.error("buffer %r: group %d failed: %s", self.name, group_id, damaged[group_id])


@dataclass(frozen=True, slots=True)
class Result:
    """A draw that was made.

    Attributes:
        batch: What could be read of it.
        drawn: What was drawn.
        damaged: Why the other groups could not be read, by id.
    """

    batch: Batch
    drawn: Drawn
    damaged: Mapping[int, str]

    @classmethod
    def nothing(cls) -> Self:
        """A draw of no groups, which was not made."""
        return cls.of(Drawn.nothing(), Decoded())

    @classmethod
    def of(cls, drawn: Drawn, decoded: Decoded) -> Self:
        """Put in order what was read."""
        sound = np.array([group_id in decoded.groups for group_id in drawn.ids], np.bool_)
        batch = Batch(
            [decoded.groups[group_id] for group_id in drawn.ids if group_id in decoded.groups],
            drawn.probabilities[sound],
            drawn.weights[sound],
            drawn.draw_id,
        )
        damaged = {
            group_id: decoded.corrupt.get(group_id, "the payload is missing")
            for group_id in drawn.ids
            if group_id not in decoded.groups
        }
        return cls(batch, drawn, damaged)

    def raise_if_damaged(self) -> None:
        """Tell the caller, who still gets the rest."""
        if self.damaged:
            raise CorruptPayloadError(reasons(self.damaged), sorted(self.damaged), self.batch)


def _may_pass(error: DatabaseError) -> bool:
    """Whether the same call may work later: after an outage, a full disk, or a lost race."""
    if isinstance(error, DatabaseReplacedError):  # until the store is opened again
        return False
    lost = isinstance(error.__cause__, LostRaceError)
    return lost or isinstance(error, DatabaseUnavailableError | DatabaseFullError)


async def _end(reading: asyncio.Task[Any]) -> None:
    """What a draw that failed has begun to read is not wanted any more."""
    reading.cancel()
    await asyncio.wait([reading])
    if not reading.cancelled():
        reading.exception()  # seen: the draw has told the caller, or its own error goes first


def reasons(damaged: Mapping[int, str]) -> str:
    """What is wrong with damaged groups, each thing once."""
    return "; ".join(sorted(set(damaged.values())))
