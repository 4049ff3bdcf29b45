"""Lease: groups held by one consumer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Connection

from replaydb import checks
from replaydb.batch.batch import Batch
from replaydb.buffer.core import BufferCore
from replaydb.cancellation import to_the_end
from replaydb.database.repository import leases
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import lease_locked
from replaydb.errors import (
    DatabaseError,
    InvalidInputError,
    LeaseExpiredError,
    StoreClosedError,
)
from replaydb.tracing import traced

#: The heartbeat extends a lease this many times within its ttl, and tries this many times within it
#: while the database fails: the lease is extended soon after an outage that it survives.
HEARTBEATS_PER_TTL, RETRIES_PER_TTL = 3, 30


@traced
class Lease:
    """Groups that nobody else is given until ack, nack or expiry.

    Got from `Buffer.lease`, and from `Buffer.open_lease` for a lease that another process took.

    Attributes:
        id: Id of the lease, from 1 on. Where there were no groups to hold it is 0: such a lease is
            not stored, does not expire, and to end it changes nothing.
        ttl: Seconds it lasts from its last extension.
        batch: The groups it was given, or held when it was opened.
    """

    def __init__(self, buffer: BufferCore, lease_id: int, ttl: float, batch: Batch) -> None:
        self._buffer = buffer
        self._held = set(batch.ids)
        self._heartbeat: asyncio.Task[None] | None = None
        self._extending = asyncio.Lock()
        self._extended = asyncio.Event()
        self.id = lease_id
        self.ttl = ttl
        self.batch = batch

    def __repr__(self) -> str:
        return f"Lease(id={self.id}, {len(self._held)} of {len(self.batch)} groups held)"

    async def __aenter__(self) -> Self:
        if self.id:
            self._heartbeat = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await to_the_end(self._close(error))

    async def _close(self, error: BaseException | None) -> None:
        """Stop the heartbeat, and end the lease: who leaves the block holds nothing any more."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.wait([self._heartbeat])
        if not self._held:
            return
        if error is None:
            await self.ack()
            return
        with contextlib.suppress(LeaseExpiredError, DatabaseError, StoreClosedError):
            # `error` says more
            await self.nack(reason=_storable(f"{type(error).__name__}: {error}"))

    async def ack(
        self, ids: Iterable[int] | None = None, *, cursor: Mapping[str, Any] | None = None
    ) -> None:
        """Say that groups were used: they are archived, or return if `on_ack` says so.

        Args:
            ids: Which of them; by default all that are still held.
            cursor: JSON values by name, written in the same transaction.

        Raises:
            LeaseExpiredError: The lease is over, or does not hold one of the ids; nothing changed.
            InvalidInputError: An argument is wrong.
        """
        chosen = self._chosen(ids)
        cursors = checks.cursors("cursor", cursor)
        if not (self.id or cursors):
            return

        def work(connection: Connection, scope: Scope) -> None:
            with lease_locked(connection, scope, self.id) as buffer:
                if self.id:
                    leases.ack(buffer, self.id, chosen)
                buffer.cursors |= cursors

        await self._buffer._write(work)
        self._let_go(chosen)

    async def nack(self, ids: Iterable[int] | None = None, *, reason: str | None = None) -> None:
        """Say that groups were not used: they go back, one attempt older.

        Args:
            ids: Which of them; by default all that are still held.
            reason: Becomes their `status_reason`.

        Raises:
            LeaseExpiredError: The lease is over, or does not hold one of the ids; nothing changed.
            InvalidInputError: An argument is wrong.
        """
        chosen = self._chosen(ids)
        why = checks.optional(checks.string, "reason", reason)
        if not self.id:
            return

        def work(connection: Connection, scope: Scope) -> None:
            with lease_locked(connection, scope, self.id) as buffer:
                leases.nack(buffer, self.id, chosen, why)

        await self._buffer._write(work)
        self._let_go(chosen)

    async def fail(self, ids: Iterable[int], *, reason: str) -> None:
        """End the lease because some of its groups could not be processed.

        The groups `ids` go back one attempt older. Each becomes `failed` at the `max_attempts` of
        the buffer, or at its third attempt if the buffer sets none, so that a group that no
        consumer can process does not block the groups behind it forever. The other groups that
        the lease holds go back as they were, without an attempt.

        Args:
            ids: Groups that could not be processed.
            reason: Becomes their `status_reason`.

        Raises:
            LeaseExpiredError: The lease is over, or does not hold one of the ids; nothing changed.
            InvalidInputError: An argument is wrong.
        """
        chosen = self._chosen(checks.ids("ids", ids)) or []
        why = checks.string("reason", reason)
        if not self.id:
            return

        def work(connection: Connection, scope: Scope) -> None:
            with lease_locked(connection, scope, self.id) as buffer:
                leases.fail(buffer, self.id, chosen, why)

        await self._buffer._write(work)
        self._let_go(None)

    async def reject(self, ids: Iterable[int] | None = None, *, reason: str) -> None:
        """Say that groups are of no use to anybody: they become `filtered`.

        Args:
            ids: Which of them; by default all that are still held.
            reason: Becomes their `status_reason`, and the reason of their outcome, `rejected`.

        Raises:
            LeaseExpiredError: The lease is over, or does not hold one of the ids; nothing changed.
            InvalidInputError: An argument is wrong.
        """
        chosen = self._chosen(ids)
        why = checks.string("reason", reason)
        if not self.id:
            return

        def work(connection: Connection, scope: Scope) -> None:
            with lease_locked(connection, scope, self.id) as buffer:
                leases.reject(buffer, self.id, chosen, why)

        await self._buffer._write(work)
        self._let_go(chosen)

    async def extend(self, ttl: float | None = None) -> None:
        """Let the lease last `ttl` seconds from now; by default as many as it was given.

        Raises:
            LeaseExpiredError: The lease is over.
            InvalidInputError: It is no such time.
        """
        wanted = checks.optional(checks.duration, "ttl", ttl)
        if not self.id:
            return
        async with self._extending:  # else a heartbeat with the previous ttl might be the last
            seconds = self.ttl if wanted is None else wanted

            def work(connection: Connection, scope: Scope) -> None:
                now = scope.backend.now(connection)
                leases.extend(connection, scope.buffer_id, self.id, now, seconds)

            await self._buffer._write(work)
            self.ttl = seconds
        self._extended.set()

    async def _keep_alive(self) -> None:
        beats = HEARTBEATS_PER_TTL
        while True:
            self._extended.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.ttl / beats):
                    await self._extended.wait()
            beats = HEARTBEATS_PER_TTL
            if self._extended.is_set():  # by the caller, and perhaps for a shorter time
                continue
            try:
                await self.extend()
            except (LeaseExpiredError, StoreClosedError):
                return  # the ack will say so
            except DatabaseError:
                beats = RETRIES_PER_TTL

    def _chosen(self, ids: Iterable[int] | None) -> list[int] | None:
        chosen = checks.optional(checks.ids, "ids", ids)
        if chosen and not self.id:
            raise InvalidInputError("ids", "none, of a lease that holds nothing", chosen)
        return chosen

    def _let_go(self, ids: list[int] | None) -> None:
        self._held -= self._held if ids is None else set(ids)
        self._buffer._database.signal.announce()


def _storable(text: str) -> str:
    """Text that any engine takes: a message may hold what its author did not choose."""
    return text.replace("\0", "").encode(errors="replace").decode()
