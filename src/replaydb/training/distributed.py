"""Batches that all ranks of a `torch.distributed` trainer share. Each reads its own groups."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist
from sqlalchemy import ColumnElement

from replaydb import blocking
from replaydb.batch.balancing import divided
from replaydb.batch.batch import Batch
from replaydb.buffer.lease import warn_of_losses
from replaydb.buffer.requests import draw_request
from replaydb.domain import checks
from replaydb.domain.policies import Fifo, SamplingPolicy, Uniform
from replaydb.domain.results import AckReport
from replaydb.errors import (
    CorruptPayloadError,
    InvalidInputError,
    LeaseExpiredError,
    ReplayDBError,
)
from replaydb.training.ranks import Ranks

P = ParamSpec("P")
T = TypeVar("T")


class _Block(AbstractContextManager[T]):
    """A block of code that can be entered once."""

    def __init__(self, block: AbstractContextManager[T]) -> None:
        self._block = block
        self._was_entered = False

    def __enter__(self) -> T:
        if self._was_entered:  # contextlib raises an AttributeError
            raise InvalidInputError("lease", "a new ShardedBuffer.lease for each block", "the same")
        self._was_entered = True
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)


def _block(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Return a function that returns a context manager, as `contextlib.contextmanager` does."""
    begin = contextmanager(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Block(begin(*args, **kwargs))

    return call


class ShardedBuffer:
    """A buffer whose leases and samples are divided among the ranks of a trainer.

    Each process creates one from a blocking buffer of its own, and all of them make the same calls
    in the same order. The first rank of the process group draws the groups. The ranks exchange ids
    and other small values through the process group. They read payloads from the store, each only
    those of its own groups.

    All calls are collective: if one rank fails in a call, all of them raise its error.

    Attributes:
        shard: Index of the part that this process reads.
        num_shards: Number of parts.
    """

    def __init__(
        self,
        buffer: blocking.Buffer,
        *,
        shard: int | None = None,
        num_shards: int | None = None,
        group: dist.ProcessGroup | None = None,
        owner: str | None = None,
    ) -> None:
        """Compare the arguments of all ranks.

        Args:
            buffer: The buffer, of a store that this process has opened.
            shard: Index of the part that this process reads. Default: its rank in `group`. Ranks of
                one tensor, pipeline or context parallel group must read the same part: pass the
                data parallel rank.
            num_shards: Number of parts, such as the data parallel size. Default: size of `group`.
            group: Process group of all these ranks. Default: the default group; without
                `torch.distributed`, this process alone.
            owner: Owner of the leases, which must be unique among trainers of the buffer and the
                same after a restart. Default: name of the run of the store.

        Raises:
            InvalidInputError: On every rank, if an argument of one is invalid, a part belongs to no
                rank or to more ranks than another, or the ranks do not agree. Or they have opened
                different buffers, also of the same name in two databases.
        """
        self._ranks = ranks = Ranks(group)
        self._buffer = buffer
        self._may_resume = True

        def checked() -> tuple[int, int, str]:
            checks.instance("buffer", buffer, blocking.Buffer)
            if (shard is None) != (num_shards is None):
                raise InvalidInputError("shard", "both shard and num_shards, or neither", shard)
            mine = checks.whole_number("shard", ranks.rank if shard is None else shard)
            size = ranks.size if num_shards is None else num_shards
            if mine >= checks.whole_number("num_shards", size, least=1):
                raise InvalidInputError("shard", f"less than num_shards, {size}", mine)
            return mine, size, buffer.run if owner is None else checks.name("owner", owner)

        given = ranks.on_all(checked)
        self.shard, self.num_shards, self._owner = *given[ranks.rank][:2], given[0][2]
        row = buffer._wrapped._row
        ranks.same(
            lambda: {
                "num_shards": self.num_shards,
                "buffer": (row.name, row.id),
                "database": f"one whose buffer was created at {row.created_at}",
            }
        )
        shards = [part for part, _, _ in given]
        numbers = Counter(shards)
        if len(numbers) < self.num_shards or len(set(numbers.values())) > 1:
            raise InvalidInputError(
                "shard",
                f"each of 0 to {self.num_shards - 1} on equally many ranks",
                f"{shards} on ranks 0 to {ranks.size - 1}",
            )

    def __repr__(self) -> str:
        return f"ShardedBuffer({self._buffer.name!r}, shard {self.shard} of {self.num_shards})"

    @_block
    def lease(
        self,
        n: int | Mapping[str, int],
        policy: SamplingPolicy = Fifo(),
        *,
        ttl: float,
        step: int,
        tasks: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        max_staleness: int | None = None,
        runs: str | Iterable[str] | None = None,
        timeout: float | None = None,
        at_least: int | None = None,
        even: bool = True,
        fields: str | Iterable[str] | None = None,
    ) -> Iterator[ShardedLease]:
        """Lease the groups of a step, once for all ranks, and read those of this rank.

        If an earlier process with the same owner leased groups for the same step and did not end
        this lease, it is resumed, also with another number of ranks, unless its groups cannot be
        divided among them. The other arguments then have no effect.

        At the end of the block the groups are acked, unless `ShardedLease.ack` was called. If the
        block of the first rank raised, they are nacked. The first rank extends the lease until
        then.

        Args:
            n: Number of groups of all ranks together, or `{task: number}`.
            policy: Sampling strategy, see `Buffer.lease`.
            ttl: Duration of the lease in seconds from its last extension.
            step: Trainer step of the batch, the same on all ranks.
            tasks: Name or names of the tasks to draw from. Default: all tasks.
            where: Condition over `replaydb.col` that groups must meet: that of the first rank.
            max_staleness: Maximum staleness of the groups, in policy versions.
            runs: Name or names of runs: lease only groups that they put. Default: all runs.
            timeout: Seconds to wait until enough groups are eligible, on the first rank. None
                (default) waits indefinitely. The process group may have a time limit of its own.
            at_least: Smallest acceptable number of groups. Default: `n`.
            even: Whether all parts must have the same number of groups. With False, the numbers
                differ by at most 1.
            fields: Name or names of the extras to read, see `Buffer.sample`. Default: all.

        Yields:
            The lease, with the groups of this rank.

        Raises:
            NotEnoughGroupsError: Too few groups were eligible until `timeout`.
            CorruptPayloadError: The stored bytes of some groups are damaged. These groups are now
                `failed`, and the others were released.
            InvalidInputError: An argument is invalid or, except for `where` and `timeout`, not the
                same on all ranks; or `even` and `num_shards` does not divide the number of groups.
                Or the buffer does not record draws, or the block was entered before. No group stays
                leased.
        """
        given = self._agreed(
            "lease", step, n, policy, tasks, where, max_staleness, runs, timeout, even, fields,
            at_least=at_least, ttl=ttl,
        )  # fmt: skip
        number = given["step"]
        leased: blocking.Lease | None = None  # on the first rank
        with ExitStack() as stack:

            def take() -> _Assigned:
                nonlocal leased
                self._check_recorded()
                opened = self._interrupted(number, ttl, even)
                if opened is None:
                    if at_least is None:
                        self._check_divides(n, even)
                    opened = self._buffer.lease(
                        n, policy, ttl=ttl, owner=self._owner, tasks=given["tasks"], where=where,
                        max_staleness=max_staleness, runs=given["runs"], step=number,
                        timeout=timeout, at_least=at_least, load=False,
                    )  # fmt: skip
                leased = stack.enter_context(opened)
                return _Assigned(opened.id, self._parts(opened, even), self._buffer.policy_version)

            found = self._ranks.on_first(take)

            def read(ids: list[int]) -> Batch:
                if not ids:
                    return Batch([])
                return self._buffer.read_lease(found.lease_id, ids, fields=given["fields"])

            try:
                batch = self._read(read, found.parts[self.shard])
            except Exception:
                if leased is not None:
                    _release(leased, "a rank could not read its groups")
                raise
            shared = ShardedLease(self._ranks, leased, number, found, batch)
            yield shared
            if not shared.has_ended:
                report = shared.ack()
                if leased is not None:
                    warn_of_losses(self._buffer.name, shared.id, report)

    def sample(
        self,
        n: int | Mapping[str, int],
        policy: SamplingPolicy = Uniform(),
        *,
        step: int,
        tasks: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        max_staleness: int | None = None,
        runs: str | Iterable[str] | None = None,
        timeout: float | None = None,
        even: bool = True,
        fields: str | Iterable[str] | None = None,
    ) -> Batch:
        """Draw the groups of a step, once for all ranks, and read those of this rank.

        The groups are not leased. One that another process deletes or replaces before all ranks
        have read it raises `PayloadGoneError`; use `lease` if others can do this.

        Args:
            n: Number of groups of all ranks together, or `{task: number}`.
            policy: Sampling strategy, see `Buffer.sample`.
            step: Trainer step of the batch, the same on all ranks.
            tasks: Name or names of the tasks to draw from. Default: all tasks.
            where: Condition over `replaydb.col` that groups must meet: that of the first rank.
            max_staleness: Maximum staleness of the groups, in policy versions.
            runs: Name or names of runs: draw only groups that they put. Default: all runs.
            timeout: Seconds to wait until enough groups are eligible, as for `lease`.
            even: As for `lease`.
            fields: As for `lease`.

        Returns:
            The groups of this rank, with the probabilities and weights of the whole draw.

        Raises:
            NotEnoughGroupsError: Too few groups were eligible until `timeout`.
            PayloadGoneError: Some groups were deleted or replaced meanwhile.
            UnknownDrawError: The record of the draw was deleted meanwhile, see `keep_draws`.
            CorruptPayloadError: The stored bytes of some groups are damaged. These groups are now
                `failed`.
            InvalidInputError: An argument is invalid or, except for `where` and `timeout`, not the
                same on all ranks; or `even` and `num_shards` does not divide `n`. Or the settings
                of the buffer do not allow to share a draw: it is not recorded, or drops the
                payloads of the groups.
        """
        given = self._agreed(
            "sample", step, n, policy, tasks, where, max_staleness, runs, timeout, even, fields
        )

        def draw() -> tuple[int | None, list[list[int]]]:
            self._check_recorded()
            self._check_divides(n, even)
            draw_id, num_tokens = self._buffer._sample_unread(
                n, policy, timeout=timeout, tasks=given["tasks"], where=where,
                max_staleness=max_staleness, runs=given["runs"], step=given["step"],
            )  # fmt: skip
            parts = divided("num_shards", num_tokens.values(), self.num_shards, even=even)
            ids = list(num_tokens)
            return draw_id, [[ids[at] for at in part] for part in parts]

        draw_id, parts = self._ranks.on_first(draw)
        if draw_id is None:
            return Batch([])
        return self._read(
            lambda ids: self._buffer._read_drawn(draw_id, ids, given["fields"]), parts[self.shard]
        )

    def _agreed(
        self,
        call: str,
        step: int,
        n: int | Mapping[str, int],
        policy: SamplingPolicy,
        tasks: str | Iterable[str] | None,
        where: ColumnElement[bool] | None,
        max_staleness: int | None,
        runs: str | Iterable[str] | None,
        timeout: float | None,
        even: bool,
        fields: str | Iterable[str] | None,
        *,
        at_least: int | None = None,
        ttl: float | None = None,
    ) -> dict[str, Any]:
        """Check that all ranks make this call with the same arguments. Return these.

        `where` and `timeout` are checked but not compared: they may depend on the clock.
        """

        def given() -> dict[str, Any]:
            of_tasks, of_runs = checks.names("tasks", tasks), checks.names("runs", runs)
            of_extras = checks.names("fields", fields)
            request = draw_request(n, policy, of_tasks, where, max_staleness, of_runs, at_least)
            checks.seconds("timeout", timeout)
            return {
                "call": call,
                "step": checks.whole_number("step", step),
                "n": n if not isinstance(n, Mapping) else dict(n),
                "policy": request.policy,
                "tasks": of_tasks and sorted(of_tasks),
                "max_staleness": max_staleness,
                "runs": of_runs and sorted(of_runs),
                "at_least": request.at_least,
                "ttl": checks.optional(checks.duration, "ttl", ttl),
                "even": checks.flag("even", even),
                "fields": None if of_extras is None else sorted(of_extras),
            }

        return self._ranks.same(given)

    def _read(self, read: Callable[[list[int]], Batch], ids: list[int]) -> Batch:
        """Read the groups of this rank, if all ranks can read theirs."""
        try:
            return self._ranks.if_all(lambda: read(ids))
        except CorruptPayloadError as error:
            if self._ranks.rank == 0:  # marks them as failed, if the other rank may only read
                with suppress(ReplayDBError):
                    read(list(error.group_ids))
            raise

    def _check_recorded(self) -> None:
        """Raise if other ranks, or the same ones after a restart, could not find a draw."""
        if not self._buffer.settings.record_draws:
            raise InvalidInputError("record_draws", "True to share a draw among ranks", False)

    def _check_divides(self, n: int | Mapping[str, int], even: bool) -> None:
        """Raise before waiting for groups if their number cannot be divided."""
        count, _ = checks.quotas("n", n)
        divided("num_shards", [0] * count, self.num_shards, even=even)

    def _parts(self, lease: blocking.Lease, even: bool) -> list[list[int]]:
        """Divide the groups of a lease; release them if that is not possible."""
        try:
            parts = divided("num_shards", lease.num_tokens, self.num_shards, even=even)
        except InvalidInputError:
            _release(lease, "the groups cannot be divided among the ranks")
            raise
        return [[lease.ids[at] for at in part] for part in parts]

    def _interrupted(self, step: int, ttl: float, even: bool) -> blocking.Lease | None:
        """Resume the lease that an earlier process took for a step.

        If its groups cannot be divided among the ranks, they are released instead.
        """
        if not self._may_resume:
            return None
        opened = None
        for one in self._buffer.leases():
            if (one.owner, one.step) == (self._owner, step) and one.num_groups:
                with suppress(LeaseExpiredError, InvalidInputError):
                    lease = self._buffer.open_lease(one.id, ttl=ttl, load=False)
                    self._parts(lease, even)
                    self._buffer.refresh()
                    opened = lease
                break
        self._may_resume = False
        return opened


class ShardedLease:
    """Groups that all ranks of a trainer have leased, of which this rank has its part.

    Get it from `ShardedBuffer.lease`.

    Attributes:
        id: Id of the lease.
        step: Trainer step that it is for.
        policy_version: Policy version of the buffer when the lease was taken or resumed.
        batch: The groups of this rank, with the probabilities and weights of the whole draw.
        has_ended: Whether the groups were acked.
    """

    def __init__(
        self,
        ranks: Ranks,
        lease: blocking.Lease | None,
        step: int,
        assigned: _Assigned,
        batch: Batch,
    ) -> None:
        self._ranks = ranks
        self._lease = lease
        self.id = assigned.lease_id
        self.step = step
        self.policy_version = assigned.policy_version
        self.batch = batch
        self.has_ended = False

    def __repr__(self) -> str:
        return f"ShardedLease(id={self.id}, step={self.step}, ids={self.batch.ids})"

    def ack(
        self, *, cursor: Mapping[str, Any] | None = None, advance_policy: int | None = None
    ) -> AckReport:
        """Acknowledge the groups of all ranks, when all have called this. One transaction.

        Args:
            cursor: JSON values by name, written in the same transaction, such as the step of the
                checkpoint that contains these groups. The same on all ranks.
            advance_policy: New policy version, set in the same transaction. The same on all ranks.

        Returns:
            Which groups of all ranks were acknowledged, and which groups the lease had lost.

        Raises:
            LeaseExpiredError: The lease has expired or ended. Nothing was changed.
            InvalidInputError: An argument is invalid or not the same on all ranks. Nothing was
                changed.
        """

        def checked() -> dict[str, Any]:
            version = checks.optional(checks.policy_version, "advance_policy", advance_policy)
            cursors = checks.cursors("cursor", cursor)
            return {"lease": self.id, "cursor": cursors, "advance_policy": version}

        given = self._ranks.same(checked)

        def settle() -> AckReport:
            assert self._lease is not None  # noqa: S101 - this is the first rank
            return self._lease.ack(cursor=given["cursor"], advance_policy=given["advance_policy"])

        report = self._ranks.on_first(settle)
        self.has_ended = True
        return report


class _Assigned(NamedTuple):
    """What the first rank tells the others of a lease: its id, and the ids of each part."""

    lease_id: int
    parts: list[list[int]]
    policy_version: int


def _release(lease: blocking.Lease, reason: str) -> None:
    """Release the groups of a lease, without an attempt. The error that led here matters more."""
    with suppress(ReplayDBError):
        lease.fail([], reason=reason)
