"""Draws whose groups are leased exclusively to one consumer."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement

from replaydb.batch.batch import Batch
from replaydb.buffer.core import T
from replaydb.buffer.drawing import Drawing, Result, check_intact
from replaydb.buffer.lease import Lease
from replaydb.buffer.requests import draw_request
from replaydb.database.repository import leases
from replaydb.database.repository.draw_request import Drawn, LeaseTerms
from replaydb.database.repository.locked import LockedBuffer, Scope
from replaydb.database.repository.locking import buffer_locked, lease_locked
from replaydb.database.repository.policy import Advance, advance
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, allowance, end_in
from replaydb.database.statements.lease import select_leased
from replaydb.domain import checks
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.policies import Fifo, SamplingPolicy
from replaydb.domain.results import AckReport, LeaseInfo
from replaydb.errors import InvalidInputError
from replaydb.util.opening import Opening

#: Statuses from which groups can be leased. Pending ones are claimed.
_LEASABLE = frozenset(GroupStatus) - {
    GroupStatus.PENDING,
    GroupStatus.LEASED,
    GroupStatus.ARCHIVED,
}


class Leasing(Drawing):
    """Lease groups, and acknowledge or revoke leases by id."""

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
        load: bool = True,
        fields: str | Iterable[str] | None = None,
    ) -> Opening[Lease]:
        """Lease groups exclusively until they are acked or released, or the lease expires.

        `async with buffer.lease(...) as lease:` extends the lease while the event loop runs. At the
        end of the block it acks the groups that are still leased, or nacks them if the block
        raised. After `lease = await buffer.lease(...)` you call `extend`, `ack` and `nack`
        yourself.

        Args:
            n: Number of groups, or `{task: number}`.
            policy: Sampling strategy: which groups are leased, and in what order. Default:
                `Fifo()`, the oldest groups.
            ttl: Duration of the lease in seconds. If it is not extended in time, it expires and its
                groups are released.
            owner: Name of the consumer, which `leases` shows. Default: host name and process id.
            tasks: Name or names of the tasks to draw from. Default: all tasks. Not with a mapping
                as `n`.
            where: Condition over `replaydb.col` that groups must meet, such as `rdb.col.reward_std
                > 0`.
            max_staleness: Maximum staleness of the groups, in policy versions. It excludes groups
                whose version is unknown or not comparable. Default: only the limit of the buffer's
                settings.
            runs: Name or names of runs: lease only groups that they put. Default: all runs.
            statuses: Status or statuses of the groups to lease, for example `aborted` to resume
                them or `expired` to generate them again. Released groups get this status back.
                Not `pending`: `claim` is for them. Default: `completed`.
            step: Trainer step of the batch, recorded with the draw.
            timeout: Seconds to wait until enough groups are eligible. 0 (default) is one attempt.
                None waits indefinitely.
            at_least: Smallest acceptable batch: lease between `at_least` and `n` groups as soon as
                `at_least` are eligible. Default: `n`. With 0 the call does not wait for groups, and
                the lease may be empty.
            load: Whether to read the groups. With False, the lease has only their ids and lengths,
                and ranks of a trainer read their own groups with `Lease.shard` or `read_lease`.
            fields: Name or names of the extras to read, see `sample`. Default: all.

        Returns:
            An object to await or to enter with `async with`, both of which give a `Lease`. Nothing
            is drawn before.

        Raises:
            NotEnoughGroupsError: When awaited or entered: too few groups were eligible until
                `timeout`. Nothing was leased.
            RateLimitedError: When awaited or entered: the rate limit blocked the draw until
                `timeout`.
            CorruptPayloadError: When awaited or entered: the stored bytes of some groups are
                damaged. These groups are now `failed`, and the others were released.
            InvalidInputError: An argument is invalid.
        """
        chosen = checks.some_of("statuses", statuses, sorted(_LEASABLE))
        if not chosen:
            raise InvalidInputError("statuses", "at least one", repr(statuses))
        seconds = checks.duration("ttl", ttl)
        name = f"{socket.gethostname()}:{os.getpid()}" if owner is None else owner
        request = replace(
            draw_request(n, policy, tasks, where, max_staleness, runs, at_least, step, fields),
            statuses=tuple(GroupStatus(status) for status in sorted(chosen)),
            lease=LeaseTerms(checks.name("owner", name), seconds),
            loads=checks.flag("load", load),
        )
        wait = checks.seconds("timeout", timeout)

        async def opened() -> Lease:
            return await self._lease_of(
                await self._draw(request, wait), seconds, request.loads, request.fields
            )

        return Opening(opened)

    def open_lease(
        self,
        lease_id: int,
        *,
        ttl: float,
        load: bool = True,
        fields: str | Iterable[str] | None = None,
    ) -> Opening[Lease]:
        """Resume a lease by its id, for example after the process that took it was killed.

        The lease is extended to `ttl` seconds from now. Its batch has the groups that are still
        leased, in the order of their draw, with the probabilities and weights of that draw (NaN if
        the buffer does not record draws). Their staleness is the current one, not that of the draw.

        Another process that has the lease keeps it: both share it. For each group the first ack,
        nack or reject wins, and a later one raises `LeaseExpiredError`. To exclude other holders,
        `revoke` the lease and lease the groups again.

        Args:
            lease_id: Id of the lease, from `Lease.id` or `leases`.
            ttl: Duration of the lease in seconds, from now and from each extension.
            load: Whether to read the groups: see `lease`.
            fields: Name or names of the extras to read, see `sample`. Default: all.

        Returns:
            An object to await or to enter with `async with`, as from `lease`.

        Raises:
            LeaseExpiredError: When awaited or entered: the lease has expired, has ended, or is not
                of this buffer.
            CorruptPayloadError: When awaited or entered: the stored bytes of some groups are
                damaged. These groups are now `failed`, and the others were released.
            InvalidInputError: An argument is invalid.
        """
        number = checks.whole_number("lease_id", lease_id)
        seconds, loads = checks.duration("ttl", ttl), checks.flag("load", load)
        names = checks.names("fields", fields)

        def list_groups(session: Session) -> Mapping[int, int]:
            found = leases.members(session, self.id, number)
            return {row.group_id: row.num_tokens for row in found}

        async def opened() -> Lease:
            await self._extend(number, seconds)
            if loads:
                result = await self._leased(number, None, end_in(BULK_SECONDS), names)
                return await self._lease_of(result, seconds, loads, names)
            num_tokens = await self._read(list_groups)
            return Lease(self, number, seconds, num_tokens, None, names)

        return Opening(opened)

    async def read_lease(
        self,
        lease_id: int,
        ids: Iterable[int] | None = None,
        *,
        fields: str | Iterable[str] | None = None,
    ) -> Batch:
        """Read groups of a lease that any process has, without extending or sharing it.

        Ranks of a trainer use it to read the groups that the rank with the lease assigned to them.

        Args:
            lease_id: Id of the lease, from `Lease.id` or `leases`.
            ids: Ids of groups of the lease. Default: all.
            fields: Name or names of the extras to read, see `sample`. Default: all.

        Returns:
            The groups, in the order of their draw, as in `open_lease`.

        Raises:
            LeaseExpiredError: The lease has expired, has ended, is not of this buffer, or does not
                have one of the groups.
            CorruptPayloadError: The stored bytes of some groups are damaged. Unless the store is
                read-only, these groups are now `failed`. `error.batch` has the others, which are
                still leased.
            InvalidInputError: An argument is invalid.
        """
        number = checks.whole_number("lease_id", lease_id)
        wanted = checks.optional(checks.ids, "ids", ids)
        names = checks.names("fields", fields)
        result = await self._leased(number, wanted, end_in(BULK_SECONDS), names)
        check_intact(result.damaged, result.batch)
        return result.batch

    async def _leased(
        self, lease_id: int, ids: list[int] | None, end: float, fields: frozenset[str] | None
    ) -> Result:
        """Read groups of a lease."""

        def read(session: Session) -> Drawn:
            return leases.fetch_leased(session, self.id, lease_id, ids, fields)

        drawn = await self._database.read(read, end=end)
        return await self._delivered(drawn, drawn.contents.stored, end, fields)

    async def ack(
        self,
        lease_id: int,
        *,
        cursor: Mapping[str, Any] | None = None,
        advance_policy: int | None = None,
    ) -> AckReport:
        """Acknowledge all groups of a lease by its id, without loading its batch.

        Use it to acknowledge groups later, for example at the next checkpoint, without keeping
        their batch in memory until then. Any process can call it. See `Lease.ack` for
        the effect on the groups.

        Args:
            lease_id: Id of the lease, from `Lease.id` or `leases`. 0, the id of leases without
                groups, only writes the other arguments.
            cursor: JSON values by name, written in the same transaction. `cursor` reads them.
            advance_policy: New policy version, set in the same transaction. See `advance_policy`.

        Returns:
            Which groups were acknowledged, and which groups the lease had lost.

        Raises:
            LeaseExpiredError: The lease has expired, has ended, or is not of this buffer. Nothing
                was changed.
            InvalidInputError: An argument is invalid, or the policy cannot be advanced to this
                version. Nothing was changed.
        """
        number = checks.whole_number("lease_id", lease_id)
        report, _ = await self._ack(number, None, cursor, advance_policy)
        return report

    async def _ack(
        self,
        lease_id: int,
        ids: list[int] | None,
        cursor: Mapping[str, Any] | None,
        advance_policy: int | None,
    ) -> tuple[AckReport, bool]:
        """Acknowledge groups of a lease; None: all. There are none if its id is 0.

        Returns:
            The groups, and whether the lease has ended.
        """
        cursors = checks.cursors("cursor", cursor)
        version = checks.optional(checks.policy_version, "advance_policy", advance_policy)

        result = AckReport(), True

        def settle(buffer: LockedBuffer) -> None:
            nonlocal result
            if lease_id:
                result = leases.ack(buffer, lease_id, ids)
            buffer.cursors |= cursors

        def work_and_advance(version: int, scope: Scope, session: Session) -> Advance:
            reads = [select_leased(self.id, lease_id, ids)]
            with buffer_locked(session, scope, reads=reads) as buffer:
                settle(buffer)  # first: the staleness of archived groups is that of their step
                return advance(buffer, version)

        if version is not None:
            await self._advance(partial(work_and_advance, version), end_in(allowance()))
        elif lease_id or cursors:
            await self._settle(lease_id, ids, settle)
        return result

    def _settle(
        self, lease_id: int, ids: list[int] | None, settle: Callable[[LockedBuffer], T]
    ) -> Coroutine[Any, Any, T]:
        """Settle groups of a lease, by default all of them, in one transaction."""

        def work(scope: Scope, session: Session) -> T:
            with lease_locked(session, scope, lease_id, ids) as buffer:
                return settle(buffer)

        return self._write(work)

    def _extend(self, lease_id: int, seconds: float) -> Coroutine[Any, Any, None]:
        """Let a lease expire this many seconds from now."""

        def work(scope: Scope, session: Session) -> None:
            leases.extend(session, self.id, lease_id, session.now(), seconds)

        return self._write(work, announces=False)

    async def revoke(self, lease_id: int, *, reason: str | None = None) -> list[int]:
        """End a lease and release its groups now, whichever process has it.

        As after a nack, the attempt count of the groups is incremented, and the outcome of their
        draw is `nacked`. Every later call on the lease raises `LeaseExpiredError`.

        Args:
            lease_id: Id of the lease, from `Lease.id` or `leases`.
            reason: Text that is stored, with the prefix "revoked: ", as `status_reason` of the
                groups and as the reason of their outcome.

        Returns:
            Ids of the released groups. Empty if the lease had no groups any more, or had ended.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        number = checks.whole_number("lease_id", lease_id)
        given = checks.optional(checks.string, "reason", reason)
        why = "revoked" if given is None else f"revoked: {given}"

        return await self._settle(number, None, lambda it: leases.revoke(it, number, why))

    async def _lease_of(
        self, result: Result, ttl: float, is_loaded: bool, fields: frozenset[str] | None
    ) -> Lease:
        if result.damaged:
            reason = "other groups of the batch were damaged"
            await self._release_undelivered(result.drawn, ttl, reason)
        check_intact(result.damaged, result.batch)
        lease_id = result.drawn.lease_id or 0  # 0: an empty lease
        batch = result.batch if is_loaded else None
        return Lease(self, lease_id, ttl, result.drawn.num_tokens, batch, fields)

    async def leases(self, *, expired: bool = False) -> list[LeaseInfo]:
        """Return the active leases with their groups.

        Args:
            expired: Whether to include expired leases whose groups have not been released yet. The
                next put or draw releases them.

        Returns:
            One `LeaseInfo` per lease, oldest first.

        Raises:
            InvalidInputError: An argument is invalid.
        """
        with_expired = checks.flag("expired", expired)

        def work(session: Session) -> list[LeaseInfo]:
            now = session.now()
            return leases.list_leases(session, self.id, now, expired=with_expired)

        return await self._read(work)
