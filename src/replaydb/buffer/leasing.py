"""Drawing groups to hold them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace

from sqlalchemy import ColumnElement, Connection

from replaydb import checks
from replaydb.buffer.drawing import Drawing, Result
from replaydb.buffer.lease import Lease
from replaydb.buffer.requests import draw_request
from replaydb.database.repository import leases
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import lease_locked
from replaydb.database.repository.portions import Drawn, LeaseTerms
from replaydb.database.transactions import BULK_SECONDS, end_in
from replaydb.episodes import GroupStatus
from replaydb.errors import InvalidInputError
from replaydb.opening import Opening
from replaydb.policies import Fifo, SamplingPolicy
from replaydb.results import LeaseInfo

#: Statuses from which groups can be leased: nobody else has them in hand.
_LEASABLE = frozenset(GroupStatus) - {GroupStatus.LEASED, GroupStatus.ARCHIVED}


class Leasing(Drawing):
    """Groups that one consumer holds until it says what became of them."""

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
        at_least: int | None = None,
    ) -> Opening[Lease]:
        """Draw groups and hold them: nobody else is given them until ack, nack or expiry.

        `async with buffer.lease(...) as lease:` acks what is left when the block ends and nacks
        it when the block raises, and keeps the lease alive in between, as long as the event loop
        runs. `await buffer.lease(...)` leaves all three to the caller.

        The arguments are those of `sample`, and three of its own:

        - `ttl`: Seconds after which the groups go back by themselves, unless it is extended.
        - `owner`: Shown by `leases()`; by default the host and the process.
        - `statuses`: Statuses to take groups from: `aborted` ones to go on with, `expired` ones to
          roll again. A nack gives them back the status they had. `pending` ones, which no other
          status may stand beside, are claimed to work on: they stay `pending`, and anybody still
          adds episodes; that is no draw, and is not recorded as one.

        With `at_least=0` the lease may hold nothing.

        Raises:
            NotEnoughGroupsError: When awaited or entered: there were not enough in time; nothing
                was leased.
            RateLimitedError: When awaited or entered: the rate limit did not let so many out, in
                time.
            CorruptPayloadError: When awaited or entered: stored bytes of some groups are damaged.
                They are marked `failed`, and the others went back.
            InvalidInputError: An argument is wrong.
        """
        chosen = checks.some_of("statuses", statuses, sorted(_LEASABLE))
        if not chosen:
            raise InvalidInputError("statuses", "at least one", repr(statuses))
        if GroupStatus.PENDING in chosen and len(chosen) > 1:
            raise InvalidInputError("statuses", "'pending' by itself", repr(statuses))
        seconds = checks.duration("ttl", ttl)
        who = f"{socket.gethostname()}:{os.getpid()}" if owner is None else owner
        request = replace(
            draw_request(n, policy, tasks, where, max_staleness, runs, at_least, step),
            statuses=tuple(GroupStatus(status) for status in sorted(chosen)),
            lease=LeaseTerms(checks.name("owner", who), seconds),
        )
        wait = checks.seconds("timeout", timeout)

        async def opened() -> Lease:
            return await self._lease_of(await self._draw(request, wait), seconds)

        return Opening(opened)

    def open_lease(self, lease_id: int, *, ttl: float) -> Opening[Lease]:
        """Go on with a lease that was taken elsewhere, such as by a process that was killed.

        The lease lasts `ttl` seconds from now. Its batch has the groups that it still holds, in
        the order of their draw, with the probabilities and weights of that draw; both are NaN
        where the buffer does not record draws. Their staleness is that of now, not of the draw.

        The lease is shared, not taken away: where two processes have it, the first that says what
        became of a group is heard, and the other gets `LeaseExpiredError`. To be sure that nobody
        else goes on with the groups, `revoke` the lease and lease them anew.

        Args:
            lease_id: Id of the lease, as `Lease.id` and `leases()` have it.
            ttl: Seconds after which the groups go back by themselves, unless it is extended.

        Raises:
            LeaseExpiredError: When awaited or entered: the lease is over, or not of this buffer.
            CorruptPayloadError: When awaited or entered: stored bytes of some groups are damaged;
                the others went back.
            InvalidInputError: An argument is wrong.
        """
        number = checks.whole_number("lease_id", lease_id)
        seconds = checks.duration("ttl", ttl)

        def extend(connection: Connection, scope: Scope) -> None:
            now = scope.backend.now(connection)
            leases.extend(connection, self.id, number, now, seconds)

        def read(connection: Connection) -> Drawn:
            return leases.holding(self._database.backend, connection, self.id, number)

        async def opened() -> Lease:
            await self._write(extend)
            end = end_in(BULK_SECONDS)
            drawn = await self._database.read(read, end=end)
            return await self._lease_of(await self._delivered(drawn, end), seconds)

        return Opening(opened)

    async def ack(self, lease_id: int) -> None:
        """Say that what a lease holds was used, whoever took it; its batch is not read for that.

        For groups that count as used long after they were drawn, such as at the next checkpoint:
        until then nobody has to keep their batch in memory. What it does to the groups is said by
        `Lease.ack`.

        Args:
            lease_id: Id of the lease, as `Lease.id` and `leases()` have it.

        Raises:
            LeaseExpiredError: The lease is over, or not of this buffer; nothing changed.
            InvalidInputError: An argument is wrong.
        """
        number = checks.whole_number("lease_id", lease_id)

        def work(connection: Connection, scope: Scope) -> None:
            with lease_locked(connection, scope, number) as buffer:
                leases.ack(buffer, number, None)

        await self._write(work)
        self._database.signal.announce()

    async def revoke(self, lease_id: int, *, reason: str | None = None) -> list[int]:
        """Take back what a lease holds, whoever has it, without waiting for its end.

        The groups go back as after a nack, one attempt older; the outcome of their draw is
        `nacked`. Who still has the lease gets `LeaseExpiredError` from then on.

        Args:
            lease_id: Id of the lease, as `Lease.id` and `leases()` have it.
            reason: Becomes `status_reason` of the groups and the reason of their outcome, both
                after the word "revoked".

        Returns:
            Ids of the groups that went back; none where the lease holds nothing any more.

        Raises:
            InvalidInputError: An argument is wrong.
        """
        number = checks.whole_number("lease_id", lease_id)
        said = checks.optional(checks.string, "reason", reason)
        why = "revoked" if said is None else f"revoked: {said}"

        def work(connection: Connection, scope: Scope) -> list[int]:
            with lease_locked(connection, scope, number) as buffer:
                return leases.revoke(buffer, number, why)

        ids = await self._write(work)
        self._database.signal.announce()
        return ids

    async def _lease_of(self, result: Result, ttl: float) -> Lease:
        if result.damaged:
            await self._hand_back(result.drawn, ttl, "other groups of the batch were damaged")
        result.raise_if_damaged()
        lease_id = result.drawn.lease_id or 0  # of no groups
        return Lease(self, lease_id, ttl, result.batch)

    async def leases(self, *, expired: bool = False) -> list[LeaseInfo]:
        """Leases that have not expired, the oldest first, with the groups they hold.

        Args:
            expired: Also those that have, as long as nobody has put or drawn since, by which
                their groups come back.
        """
        all_ = checks.flag("expired", expired)

        def work(connection: Connection) -> list[LeaseInfo]:
            now = self._database.backend.now(connection)
            return leases.known(connection, self.id, now, expired=all_)

        return await self._read(work)
