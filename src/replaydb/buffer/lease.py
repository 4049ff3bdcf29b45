"""Lease: groups leased exclusively to one consumer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from replaydb.batch.balancing import divided
from replaydb.batch.batch import Batch
from replaydb.buffer.heartbeat import Heartbeat
from replaydb.buffer.tracing import traced
from replaydb.database.repository import leases
from replaydb.database.repository.locked import LockedBuffer
from replaydb.domain import checks
from replaydb.domain.results import AckReport
from replaydb.errors import (
    DatabaseError,
    InvalidInputError,
    LeaseExpiredError,
    StoreClosedError,
)
from replaydb.util.cancellation import run_to_completion

if TYPE_CHECKING:
    from replaydb.buffer.leasing import Leasing

logger = logging.getLogger(__name__)


@traced
class Lease:
    """Groups leased exclusively until they are acked or released, or the lease expires.

    Get it from `Buffer.lease`, or from `Buffer.open_lease` for a lease that another process took.
    Inside `async with`, a heartbeat extends the lease while the event loop runs. At the end of the
    block, the groups that are still leased are acked, or nacked if the block raised. If the lease
    has lost some of them (see `AckReport.gone`), the others are acked and a warning is logged. The
    block can be entered once.

    Attributes:
        id: Id of the lease, at least 1. An empty lease has the id 0: it is not stored, does not
            expire, and ending it changes nothing.
        ids: Ids of the groups when the lease was taken or opened, in the order of the draw [n].
        num_tokens: Number of tokens of each of these groups, prompts included [n].
    """

    def __init__(
        self,
        buffer: Leasing,
        lease_id: int,
        ttl: float,
        num_tokens: Mapping[int, int],
        batch: Batch | None,
        fields: frozenset[str] | None,
    ) -> None:
        self._buffer = buffer
        self._batch = batch
        self._fields = fields
        self._leased = set(num_tokens)
        self._given: set[int] = set()
        self._parts: list[list[int]] | None = None
        self._heartbeat = Heartbeat(ttl, lambda seconds: buffer._extend(lease_id, seconds))
        self.id = lease_id
        self.ids = list(num_tokens)
        self.num_tokens = list(num_tokens.values())
        if lease_id:
            buffer._leases[lease_id] = self

    def __repr__(self) -> str:
        return f"Lease(id={self.id}, {len(self._leased)} of {len(self.ids)} groups leased)"

    @property
    def ttl(self) -> float:
        """Duration in seconds from the last extension."""
        return self._heartbeat.ttl

    @property
    def batch(self) -> Batch:
        """The groups of the lease when it was taken or opened.

        Raises:
            InvalidInputError: The lease was taken or opened with `load=False`.
        """
        if self._batch is None:
            raise InvalidInputError(
                "load", "True to use lease.batch; lease.shard reads a part of the groups", False
            )
        return self._batch

    def shards(self, world_size: int, *, even: bool = True) -> list[list[int]]:
        """Divide the groups among the ranks of a trainer, with similar numbers of tokens.

        Groups that were acked, nacked or rejected with this object are left out.

        Args:
            world_size: Number of ranks.
            even: Whether all ranks must get the same number of groups. With False, the numbers
                differ by at most 1.

        Returns:
            Ids of the groups of each rank, in the order of the draw [world_size].

        Raises:
            InvalidInputError: An argument is invalid, or `even` and `world_size` does not divide
                the number of groups.
        """
        num_tokens = {
            one: tokens
            for one, tokens in zip(self.ids, self.num_tokens, strict=True)
            if one in self._leased
        }
        ids = list(num_tokens)
        parts = divided("world_size", num_tokens.values(), world_size, even=even)
        return [[ids[at] for at in part] for part in parts]

    async def shard(self, rank: int, world_size: int, *, even: bool = True) -> Batch:
        """Return the groups of one rank: those of `shards(world_size)[rank]`.

        The first call divides the groups, and each rank can be requested once. If the lease was
        taken or opened with `load=False`, only the payloads of the rank are read. The lease stays
        one: `ack` acknowledges the groups of all ranks.

        Args:
            rank: Index of the rank, less than `world_size`.
            world_size: Number of ranks.
            even: As for `shards`.

        Returns:
            The groups, with the probabilities and weights of the draw (NaN if they were not loaded
            and the buffer does not record draws).

        Raises:
            LeaseExpiredError: One of the groups has left the lease since the first call. With
                `load=False`, also if the lease has expired or ended.
            CorruptPayloadError: The stored bytes of some groups are damaged. These groups are now
                `failed`, and the others are still leased.
            InvalidInputError: An argument is invalid, as for `shards`; or this rank, or another
                `world_size`, was requested before.
        """
        parts = self._parts or self.shards(world_size, even=even)
        if checks.whole_number("world_size", world_size, least=1) != len(parts):
            expected = f"{len(parts)}, as for the other shards of this lease"
            raise InvalidInputError("world_size", expected, world_size)
        mine = checks.whole_number("rank", rank)
        if mine >= len(parts):
            raise InvalidInputError("rank", f"less than world_size, {len(parts)}", mine)
        if mine in self._given:
            raise InvalidInputError("rank", "one whose shard was not requested before", mine)
        if lost := set(parts[mine]) - self._leased:
            raise LeaseExpiredError(self.id, sorted(lost))
        self._parts = parts  # before the payloads are read, for calls at the same time
        self._given.add(mine)
        try:
            return await self._part(parts[mine])
        except BaseException:
            self._given.discard(mine)
            if not self._given:
                self._parts = None
            raise

    async def _part(self, ids: list[int]) -> Batch:
        if self._batch is None:
            if not ids:
                return Batch([])
            return await self._buffer.read_lease(self.id, ids, fields=self._fields)
        wanted = np.isin(self.ids, ids)
        return Batch(
            [one for one in self._batch if one.id in ids],
            self._batch.probabilities[wanted],
            self._batch.weights[wanted],
            self._batch.draw_id,
        )

    async def __aenter__(self) -> Self:
        if self._heartbeat.is_started:
            raise InvalidInputError("lease", "one whose block was not entered before", self)
        if self.id:
            self._heartbeat.start()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await run_to_completion(self._close(error))

    async def _close(self, error: BaseException | None) -> None:
        """Stop the heartbeat and end the lease. After the block no group is leased."""
        await self._heartbeat.stop()
        if not self._leased:
            return
        if error is None:
            warn_of_losses(self._buffer.name, self.id, await self.ack())
            return
        with contextlib.suppress(LeaseExpiredError, DatabaseError, StoreClosedError):
            # the error of the block is the one to raise
            await self.nack(reason=storable(f"{type(error).__name__}: {error}"))

    async def ack(
        self,
        ids: Iterable[int] | None = None,
        *,
        cursor: Mapping[str, Any] | None = None,
        advance_policy: int | None = None,
    ) -> AckReport:
        """Acknowledge groups as used: archive them, or return them if `on_ack="return"`.

        Args:
            ids: Ids of the groups. Default: all that are still leased.
            cursor: JSON values by name, written in the same transaction, for example the last
                checkpointed step. `Buffer.cursor` reads them.
            advance_policy: New policy version, set in the same transaction. See
                `Buffer.advance_policy`.

        Returns:
            Which groups were acknowledged, and which groups the lease had lost.

        Raises:
            LeaseExpiredError: The lease has expired or ended, or does not have one of the groups
                `ids`. Nothing was changed.
            InvalidInputError: An argument is invalid, or the policy cannot be advanced to this
                version: see `Buffer.advance_policy`. Nothing was changed.
        """
        chosen = self._chosen(ids)
        report, has_ended = await self._buffer._ack(self.id, chosen, cursor, advance_policy)
        self._leased.difference_update(report.gone)
        self._released(chosen, has_ended)
        return report

    async def nack(self, ids: Iterable[int] | None = None, *, reason: str | None = None) -> None:
        """Release groups unused. Their attempt count is incremented.

        At `max_attempts` of the buffer's settings a group becomes `failed`. The draw does not count
        in `times_sampled`.

        Args:
            ids: Ids of the groups. Default: all that are still leased.
            reason: Text that becomes their `status_reason`.

        Raises:
            LeaseExpiredError: The lease has expired or ended, or does not have one of the groups.
                Nothing was changed.
            InvalidInputError: An argument is invalid.
        """
        chosen = self._chosen(ids)
        why = checks.optional(checks.string, "reason", reason)
        await self._release(chosen, lambda it: leases.nack(it, self.id, chosen, why))

    async def fail(self, ids: Iterable[int], *, reason: str) -> None:
        """End the lease because some of its groups could not be processed.

        The groups `ids` are released and their attempt count is incremented. A group becomes
        `failed` at the `max_attempts` of the buffer, or at its third attempt if the buffer sets
        none. A group that no consumer can process therefore does not block the groups behind it.
        The other groups of the lease are released without an attempt.

        Args:
            ids: Ids of the groups that could not be processed.
            reason: Text that becomes their `status_reason`.

        Raises:
            LeaseExpiredError: The lease has expired or ended, or does not have one of the groups.
                Nothing was changed.
            InvalidInputError: An argument is invalid.
        """
        chosen = self._chosen(checks.ids("ids", ids)) or []
        why = checks.string("reason", reason)
        await self._release(None, lambda it: leases.fail(it, self.id, chosen, why))

    async def reject(self, ids: Iterable[int] | None = None, *, reason: str) -> None:
        """Reject groups as unusable: they become `filtered` and are not drawn again.

        Args:
            ids: Ids of the groups. Default: all that are still leased.
            reason: Text that becomes their `status_reason` and the reason of their outcome,
                `rejected`.

        Raises:
            LeaseExpiredError: The lease has expired or ended, or does not have one of the groups.
                Nothing was changed.
            InvalidInputError: An argument is invalid.
        """
        chosen = self._chosen(ids)
        why = checks.string("reason", reason)
        await self._release(chosen, lambda it: leases.reject(it, self.id, chosen, why))

    async def extend(self, ttl: float | None = None) -> None:
        """Extend the lease to `ttl` seconds from now.

        Args:
            ttl: Seconds, also for later extensions. Default: the current `ttl` of the lease.

        Raises:
            LeaseExpiredError: The lease has expired or ended.
            InvalidInputError: `ttl` is not a positive number.
        """
        if self.id:
            await self._heartbeat.extend(ttl)
        else:
            checks.optional(checks.duration, "ttl", ttl)

    def _chosen(self, ids: Iterable[int] | None) -> list[int] | None:
        chosen = checks.optional(checks.ids, "ids", ids)
        if chosen and not self.id:
            raise InvalidInputError("ids", "none, because the lease is empty", chosen)
        return chosen

    async def _release(
        self, ids: list[int] | None, settle: Callable[[LockedBuffer], bool | None]
    ) -> None:
        """Release groups, by default all, with a function that returns whether the lease ended."""
        if self.id:
            self._released(ids, bool(await self._buffer._settle(self.id, ids, settle)))

    def _released(self, ids: list[int] | None, has_ended: bool) -> None:
        # A lease also ends if its other groups have left it: replaced, deleted, or completed.
        self._leased -= self._leased if ids is None or has_ended else set(ids)


def warn_of_losses(buffer_name: str, lease_id: int, report: AckReport) -> None:
    """Log a warning if a lease had lost groups when it was acked."""
    if report.gone:
        logger.warning(
            "buffer %r: groups %s of lease %d were deleted, replaced or closed by another process "
            "or a deadline while they were leased; the other %d groups were acknowledged",
            buffer_name,
            ", ".join(map(str, report.gone)),
            lease_id,
            len(report.settled),
        )


def storable(text: str) -> str:
    """Return text that every engine can store: a message may contain arbitrary characters."""
    return text.replace("\0", "").encode(errors="replace").decode()
