"""The trainer's side of a buffer."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb import checks
from replaydb.batch.batch import Batch
from replaydb.buffer.core import BufferCore
from replaydb.buffer.lease import Lease
from replaydb.buffer.requests import describe, eligible, portions
from replaydb.buffer.waiting import Explain
from replaydb.cancellation import to_the_end
from replaydb.database.records import Decoded
from replaydb.database.repository import (
    buffers,
    draws,
    groups,
    leases,
    lineage,
    shortage,
    transitions,
)
from replaydb.database.repository import (
    tasks as accounts_of,
)
from replaydb.database.repository.locking import Scope
from replaydb.database.repository.portions import Drawn, DrawRequest, LeaseTerms
from replaydb.database.transactions import Database, Transaction, allowance, end_in
from replaydb.episodes import GroupStatus
from replaydb.errors import (
    CorruptPayloadError,
    DatabaseError,
    DatabaseUnavailableError,
    InvalidInputError,
    LeaseExpiredError,
    NotEnoughGroupsError,
    RateLimitedError,
    ReplayDBError,
    StoreClosedError,
)
from replaydb.opening import Opening
from replaydb.policies import Fifo, SamplingPolicy, Uniform

logger = logging.getLogger(__name__)

#: Statuses of groups that are not drawn again, whatever is wrong with them.
_OUT_OF_USE = (GroupStatus.FAILED, GroupStatus.ARCHIVED)
#: How long it may take to find out why there were too few groups.
EXPLAIN_SECONDS = 2.0
#: How long a call that has failed tries to give back what it had leased.
HAND_BACK_SECONDS = 5.0
#: What drawing waits out.
_NOT_YET = (NotEnoughGroupsError, RateLimitedError)
#: Statuses from which groups can be leased: nobody else has them in hand.
_LEASABLE = frozenset(GroupStatus) - {
    GroupStatus.PENDING,
    GroupStatus.LEASED,
    GroupStatus.ARCHIVED,
}


class Drawing(BufferCore):
    """Drawing groups, to replay them or to hold them."""

    async def sample(
        self,
        n: int | Mapping[str, int],
        policy: SamplingPolicy = Uniform(),
        *,
        tasks: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        max_staleness: int | None = None,
        runs: str | Iterable[str] | None = None,
        step: int | None = None,
        timeout: float | None = 0,
        allow_partial: bool = False,
    ) -> Batch:
        """Draw groups; they stay in the buffer and can be drawn again.

        Every call counts as a draw and is recorded. To look at groups without drawing them, call
        `peek`.

        Args:
            n: How many groups; or how many of each task, all or nothing.
            policy: Which ones.
            tasks: Only groups of these tasks (not together with quotas in `n`).
            where: Only groups that meet this expression over `replaydb.col`.
            max_staleness: Only groups at most this many policy versions behind. Groups whose
                version is unknown, or does not compare, are never among them.
            runs: Only groups that these runs put.
            step: The trainer step the batch is for, for the record.
            timeout: Seconds to wait until there are enough; None waits for ever.
            allow_partial: When the time is up, take what there is, unless that is nothing.

        Returns:
            The groups, in the order of the draw.

        Raises:
            NotEnoughGroupsError: There were not enough in time; nothing was drawn.
            RateLimitedError: The rate limit did not let so many out, in time.
            CorruptPayloadError: Stored bytes of some groups are damaged. They are marked
                `failed`; `error.batch` holds the others.
            InvalidInputError: An argument is wrong.
        """
        condition = eligible(where, max_staleness, runs)
        request = DrawRequest(
            portions(n, policy, tasks, condition),
            describe(policy),
            checks.flag("allow_partial", allow_partial),
            checks.optional(checks.whole_number, "step", step),
        )
        result = await self._draw(request, checks.seconds("timeout", timeout))
        result.raise_if_damaged()
        return result.batch

    def lease(
        self,
        n: int | Mapping[str, int],
        policy: SamplingPolicy = Fifo(),
        *,
        ttl: float,
        owner: str | None = None,
        tasks: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        max_staleness: int | None = None,
        runs: str | Iterable[str] | None = None,
        statuses: str | Iterable[str] = (GroupStatus.COMPLETED,),
        step: int | None = None,
        timeout: float | None = 0,
        allow_partial: bool = False,
    ) -> Opening[Lease]:
        """Draw groups and hold them: nobody else is given them until ack, nack or expiry.

        `async with buffer.lease(...) as lease:` acks what is left when the block ends and nacks
        it when the block raises, and keeps the lease alive in between, as long as the event loop
        runs. `await buffer.lease(...)` leaves all three to the caller.

        Args:
            n: As for `sample`; so are all arguments not listed here.
            policy: Which ones.
            ttl: Seconds after which the groups go back by themselves, unless it is extended.
            owner: Shown by `leases()`; by default the host and the process.
            tasks: See `sample`.
            where: See `sample`.
            max_staleness: See `sample`.
            runs: See `sample`.
            statuses: Statuses to take groups from: `aborted` ones to go on with, `expired` ones
                to roll again. A nack gives them back the status they had.
            step: See `sample`.
            timeout: See `sample`.
            allow_partial: See `sample`.

        Raises:
            NotEnoughGroupsError: When entered; as for `sample`, so are the others.
        """
        chosen = checks.some_of("statuses", statuses, sorted(_LEASABLE))
        if not chosen:
            raise InvalidInputError("statuses", "at least one", repr(statuses))
        seconds = checks.duration("ttl", ttl)
        who = f"{socket.gethostname()}:{os.getpid()}" if owner is None else owner
        request = DrawRequest(
            portions(n, policy, tasks, eligible(where, max_staleness, runs)),
            describe(policy),
            checks.flag("allow_partial", allow_partial),
            checks.optional(checks.whole_number, "step", step),
            tuple(GroupStatus(status) for status in sorted(chosen)),
            LeaseTerms(checks.name("owner", who), seconds),
        )
        wait = checks.seconds("timeout", timeout)

        async def opened() -> Lease:
            result = await self._draw(request, wait)
            lease_id = result.drawn.held_by()
            if result.damaged:
                await self._hand_back(lease_id, "other groups of the batch were damaged")
            result.raise_if_damaged()
            return Lease(self._database, self.id, self.name, lease_id, seconds, result.batch)

        return Opening(opened)

    async def _draw(self, request: DrawRequest, timeout: float | None) -> Result:
        async def attempt(last: bool, end: float | None) -> Result:
            wanted = replace(request, allow_partial=last and request.allow_partial)
            return await self._draw_now(wanted, end)

        async def worthwhile(end: float | None) -> bool:
            return await self._may_suffice(request, end)

        explain = explaining(self._database, self.id, request)
        try:
            return await self._in_time(
                attempt, timeout, unless=_NOT_YET, worthwhile=worthwhile, explain=explain
            )
        except NotEnoughGroupsError as error:
            await explain(error)
            raise

    async def _may_suffice(self, request: DrawRequest, end: float | None) -> bool:
        """Whether there would be enough if all were eligible: a look that locks nothing."""
        if request.statuses != (GroupStatus.COMPLETED,):
            return True
        try:
            available = await self._database.read(
                lambda connection: buffers.available(connection, self.id), end=end
            )
        except DatabaseUnavailableError:
            return True  # the attempt waits until it is back
        return all(
            sum(
                number
                for name, number in available.items()
                if portion.tasks is None or name in portion.tasks
            )
            >= portion.count
            for portion in request.portions
        )

    async def _draw_now(self, request: DrawRequest, end: float | None) -> Result:
        lease_id: int | None = None
        try:
            async with self._database.turn_to_draw(end), AsyncExitStack() as stack:

                async def steps(
                    transaction: Transaction, scope: Scope
                ) -> tuple[Drawn, asyncio.Task[Decoded]]:
                    nonlocal lease_id
                    await stack.aclose()  # what an attempt before this one has opened
                    backend = self._database.backend
                    drawn = await transaction.run(
                        lambda connection: draws.draw(connection, backend, scope, request)
                    )
                    lease_id = drawn.lease_id  # now: a commit that is cancelled may yet be made
                    if drawn.stored is not None:
                        await transaction.commit()
                        return drawn, asyncio.create_task(groups.decoded(drawn.rows, *drawn.stored))
                    # A snapshot taken while the tasks are locked: nobody can delete what was
                    # drawn before it is read, and yet no lock is held while payloads travel.
                    read_by = end or end_in(allowance(drawn.num_bytes))
                    reader = await stack.enter_async_context(self._database.snapshot(end=read_by))
                    await buffers.pin(reader, self.id)
                    reading = asyncio.create_task(_payloads(reader, drawn, read_by))
                    stack.push_async_callback(_end, reading)
                    await transaction.commit()
                    return drawn, reading

                drawn, reading = await self._transact(steps, end)
                self._database.signal.announce()
                decoded = await self._read(drawn, reading, end)
        except BaseException:
            # Only here, where no reader is held: the writer may be waiting for one.
            if lease_id is not None:
                await to_the_end(self._hand_back(lease_id, "not delivered"))
            raise
        result = Result.of(drawn, decoded)
        if result.damaged:
            await self._mark_failed(result.damaged, drawn)
        return result

    async def _read(
        self, drawn: Drawn, reading: asyncio.Task[Decoded], end: float | None
    ) -> Decoded:
        """What was drawn; once more where the connection that had it was lost."""
        try:
            return await reading
        except Exception as error:
            if not self._database.backend.is_outage(error):
                raise
        return await self._database.read(
            lambda connection: groups.with_payloads(connection, drawn.rows), end=end
        )

    async def _hand_back(self, lease_id: int, reason: str) -> None:
        """End a lease that never reached the caller: no attempt was made."""

        async def work(connection: AsyncConnection) -> None:
            now = await self._database.backend.now(connection)
            settings = (await buffers.state(connection, self.id, self.name)).settings
            await leases.nack(
                connection, self.id, settings, lease_id, None, reason, now, attempts=0
            )

        # Where it fails, the lease was not made, or it expires.
        with suppress(LeaseExpiredError, DatabaseError, StoreClosedError):
            await self._database.write(work, end=end_in(HAND_BACK_SECONDS))
        self._database.signal.announce()

    async def _mark_failed(self, damaged: Mapping[int, str], drawn: Drawn) -> None:
        """Damaged groups must not come back in every later draw."""
        seen = {row["id"]: row["times_replaced"] for row in drawn.rows}

        async def work(connection: AsyncConnection) -> list[int]:
            accounts = await accounts_of.lock(connection, self.id)
            rows = [
                row
                for row in await groups.scalars(connection, self.id, sorted(damaged))
                # What was replaced meanwhile is other content, and may well be sound.
                if row.times_replaced == seen[row.id] and row.group_status not in _OUT_OF_USE
            ]
            changes = [(row, {"status_reason": damaged[row.id]}) for row in rows]
            await transitions.move(connection, accounts, changes, GroupStatus.FAILED)
            if drawn.draw_id is not None:
                now = await self._database.backend.now(connection)
                await lineage.lose(connection, drawn.draw_id, damaged, now)
            await accounts_of.save(connection, accounts.values())
            return [row.id for row in rows]

        for group_id in await self._database.write(work):
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
    def of(cls, drawn: Drawn, decoded: Decoded) -> Self:
        """Put in order what was read."""
        sound = np.array([one in decoded.groups for one in drawn.ids])
        batch = Batch(
            [decoded.groups[one] for one in drawn.ids if one in decoded.groups],
            drawn.probabilities[sound],
            drawn.weights[sound],
            drawn.draw_id,
        )
        damaged = {
            one: decoded.corrupt.get(one, "the payload is missing")
            for one in drawn.ids
            if one not in decoded.groups
        }
        return cls(batch, drawn, damaged)

    def raise_if_damaged(self) -> None:
        """Tell the caller, who still gets the rest."""
        if self.damaged:
            raise CorruptPayloadError(reasons(self.damaged), sorted(self.damaged), self.batch)


def explaining(database: Database, buffer_id: int, request: DrawRequest) -> Explain:
    """What counts, for an error, the groups that there are instead of those asked for."""

    async def explain(error: ReplayDBError) -> None:
        if not isinstance(error, NotEnoughGroupsError):
            return
        # Where it fails, the error says what it said.
        with suppress(DatabaseError, StoreClosedError):
            await database.read(
                lambda connection: shortage.explain(connection, buffer_id, request, error),
                end=end_in(EXPLAIN_SECONDS),
            )

    return explain


async def _payloads(connection: AsyncConnection, drawn: Drawn, end: float) -> Decoded:
    async with asyncio.timeout_at(end):
        return await groups.with_payloads(connection, drawn.rows)


async def _end(reading: asyncio.Task[Any]) -> None:
    """What a draw that failed has begun to read is not wanted any more."""
    reading.cancel()
    await asyncio.wait([reading])
    if not reading.cancelled():
        reading.exception()  # seen: the draw has told the caller, or its own error goes first


def reasons(damaged: Mapping[int, str]) -> str:
    """What is wrong with damaged groups, each thing once."""
    return "; ".join(sorted(set(damaged.values())))
