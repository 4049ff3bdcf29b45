"""Drawing groups to hold them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

from sqlalchemy import ColumnElement, Connection

from replaydb import checks
from replaydb.buffer.drawing import Drawing
from replaydb.buffer.lease import Lease
from replaydb.buffer.requests import describe, eligible, portions
from replaydb.database.repository import leases
from replaydb.database.repository.portions import DrawRequest, LeaseTerms
from replaydb.episodes import GroupStatus
from replaydb.errors import InvalidInputError
from replaydb.opening import Opening
from replaydb.policies import Fifo, SamplingPolicy
from replaydb.results import LeaseInfo

#: Statuses from which groups can be leased: nobody else has them in hand.
_LEASABLE = frozenset(GroupStatus) - {
    GroupStatus.PENDING,
    GroupStatus.LEASED,
    GroupStatus.ARCHIVED,
}


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
            return Lease(self, lease_id, seconds, result.batch)

        return Opening(opened)

    async def leases(self) -> list[LeaseInfo]:
        """Leases that have not expired, the oldest first."""

        def work(connection: Connection) -> list[LeaseInfo]:
            return leases.live(connection, self.id, self._database.backend.now(connection))

        return await self._database.read(work)
