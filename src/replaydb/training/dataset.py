"""PyTorch `IterableDataset` of stored groups, for trainers without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count as counted
from typing import Any, Literal

from sqlalchemy import ColumnElement
from torch.utils.data import IterableDataset, get_worker_info

from replaydb import blocking
from replaydb.batch.batch import Batch
from replaydb.buffer.loader import LoaderState, checked_state
from replaydb.database.filters import compiling
from replaydb.database.tables.schema import group
from replaydb.domain import checks
from replaydb.domain.policies import Fifo, SamplingPolicy, checked_policy
from replaydb.errors import InvalidInputError, NotSupportedError
from replaydb.training import ranks
from replaydb.training.distributed import ShardedBuffer, ShardedLease


@dataclass(eq=False, kw_only=True)
class ReplayDataset(IterableDataset[Any]):
    """Iterable dataset over batches of a buffer; ranks and workers get disjoint groups.

    Pass it to a `torch.utils.data.DataLoader` with `batch_size=None`. Each process opens the store
    when its iteration begins. Iteration ends after `num_steps` batches. The store is closed when
    the iterator ends, is closed or garbage-collected.

    Attributes:
        url: URL of the store.
        buffer: Name of the buffer, which must exist.
        batch_size: Number of groups in a batch; with `shard="batch"` and `shard="step"` in the
            batch of all ranks together, of which each gets an equal part.
        policy: Sampling strategy, `Fifo()` by default.
        shard: How ranks and workers get disjoint batches. "lease" (default): each leases its
            groups and acks them when it requests the next batch; if it dies, they return to the
            buffer when the lease expires. Workers of a DataLoader run ahead of the trainer: up to
            `num_workers * prefetch_factor` batches are acked before the trainer receives them, and
            are not trained on if it stops early. With `num_workers=0`, there are none. "modulo":
            each samples groups with `id % num_shards == shard`, repeatedly; shards are fixed, so
            one can run out of groups before another. "batch": one draw per step, of which each rank
            reads its part (`ShardedBuffer.sample`). "step": one lease per step, likewise
            (`ShardedBuffer.lease`), acked when all ranks request the next batch. The last two need
            `torch.distributed` and `num_workers=0`, and draw nothing ahead.
        collate: Function that converts each `Batch`; by default the batch itself is yielded.
            Workers send the result to the trainer, so it should be tensors rather than groups.
        prefetch: See `Buffer.loader`; 2 by default. Not used with "batch" and "step".
        ttl: Duration of leases in seconds, 600 by default.
        where: Only groups that meet this condition over `replaydb.col`.
        max_staleness: Only groups at most this many policy versions behind.
        num_steps: Number of batches; None (default) iterates forever.
        timeout: Seconds to wait for each batch; None (default) waits without limit.
        at_least: Yield a smaller batch of at least this many groups, rather than wait or fail;
            None (default) requires `batch_size`. See `Buffer.sample`.
        fields: Name or names of the extras to read, see `Buffer.sample`; None (default) reads all.
        run: Name of the run, see `Store.open`.
        rank: Index of this process, less than `world_size`. By default, both are taken from
            `torch.distributed` if it is initialized; otherwise there is one process.
        world_size: Number of processes that iterate.
        lease: With `shard="step"`, the `ShardedLease` of the current batch, to ack it with a cursor
            or a policy version on all ranks; otherwise None.

    Raises:
        InvalidInputError: An argument is invalid.
    """

    url: str = field(repr=False)  # it may hold a password
    buffer: str
    batch_size: int
    policy: SamplingPolicy = field(default_factory=Fifo)
    shard: Literal["lease", "modulo", "batch", "step"] = "lease"
    collate: Callable[[Batch], Any] | None = None
    prefetch: int = 2
    ttl: float = 600.0
    where: ColumnElement[bool] | None = None
    max_staleness: int | None = None
    num_steps: int | None = None
    timeout: float | None = None
    at_least: int | None = None
    fields: str | Iterable[str] | None = None
    run: str | None = None
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        # Checked here, so that errors are not raised in a worker of a DataLoader.
        checks.name("buffer", self.buffer)
        checks.whole_number("batch_size", self.batch_size, least=1)
        checked_policy(self.policy)
        checks.one_of("shard", self.shard, ("lease", "modulo", "batch", "step"))
        checks.optional(checks.function, "collate", self.collate)
        checks.whole_number("prefetch", self.prefetch)
        checks.duration("ttl", self.ttl)
        compiling.checked(self.where)
        checks.optional(checks.whole_number, "max_staleness", self.max_staleness)
        checks.optional(checks.whole_number, "num_steps", self.num_steps)
        checks.seconds("timeout", self.timeout)
        checks.optional(checks.whole_number, "at_least", self.at_least, most=self.batch_size)
        self.fields = checks.names("fields", self.fields)
        checks.optional(checks.name, "run", self.run)
        if (self.rank is None) != (self.world_size is None):
            raise InvalidInputError("rank", "both rank and world_size, or neither", self.rank)
        if self.rank is not None and self.world_size is not None:
            size = checks.whole_number("world_size", self.world_size, least=1)
            if checks.whole_number("rank", self.rank) >= size:
                raise InvalidInputError("rank", f"less than world_size, {size}", self.rank)
        if self._is_shared and self.at_least is not None:
            raise InvalidInputError("at_least", f"None with shard={self.shard!r}", self.at_least)
        self.lease: ShardedLease | None = None
        self._loader: blocking.Loader[Any] | None = None
        self._state: Mapping[str, Any] | None = None
        self._next_step: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker, in which `torch.distributed` may not be initialized."""
        state = self.__dict__.copy()
        number, size = ranks.position()
        if self.rank is None and size > 1:
            state |= {"rank": number, "world_size": size}
        return state

    @property
    def _is_shared(self) -> bool:
        return self.shard in ("batch", "step")

    def __iter__(self) -> Iterator[Any]:
        with blocking.Store.open(self.url, run=self.run, migrate=False) as store:
            buffer = store.buffer(self.buffer, create=False)
            state, self._state = self._state, None
            yield from (self._shared if self._is_shared else self._own)(buffer, state)

    def _own(self, buffer: blocking.Buffer, state: Mapping[str, Any] | None) -> Iterator[Any]:
        """Iterate over the batches of this process."""
        with self._open_loader(buffer) as loader:
            self._loader = loader
            if state is not None:
                loader.load_state_dict(state)
            try:
                yield from loader
            finally:
                self._loader = None

    def _shared(self, buffer: blocking.Buffer, state: Mapping[str, Any] | None) -> Iterator[Any]:
        """Iterate over the parts of this rank."""
        worker = get_worker_info()
        if worker is not None:
            # Of errors in workers, torch keeps the type only if they are made of one text.
            raise NotSupportedError(f"num_workers must be 0 with shard={self.shard!r}")
        whole = ShardedBuffer(buffer, shard=self.rank, num_shards=self.world_size)
        first = 0 if state is None else checked_state(state)["step"]
        steps = counted(first) if self.num_steps is None else range(first, self.num_steps)
        collate = self.collate or (lambda batch: batch)
        options: dict[str, Any] = {
            "where": self.where,
            "max_staleness": self.max_staleness,
            "timeout": self.timeout,
            "fields": self.fields,
        }
        try:
            for step in steps:
                self._next_step = step + 1
                if self.shard == "batch":
                    yield collate(whole.sample(self.batch_size, self.policy, step=step, **options))
                    continue
                with whole.lease(
                    self.batch_size, self.policy, ttl=self.ttl, step=step, **options
                ) as self.lease:
                    yield collate(self.lease.batch)
        finally:
            self.lease = self._next_step = None

    def state_dict(self) -> LoaderState | None:
        """Return the position of the iteration, see `Loader`; None before it begins."""
        if self._next_step is not None:
            return {"step": self._next_step, "draws": []}
        return None if self._loader is None else self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Resume the next iteration at a state returned by `state_dict`."""
        self._state = state

    def _open_loader(self, buffer: blocking.Buffer) -> blocking.Loader[Any]:
        index, count = self._position()
        where = self.where
        if self.shard == "modulo" and count > 1:
            mine = group.id % count == index
            where = mine if where is None else mine & where
        return buffer.loader(
            self.batch_size,
            self.policy,
            prefetch=self.prefetch,
            lease=self.shard == "lease",
            ttl=self.ttl,
            collate=self.collate,
            where=where,
            max_staleness=self.max_staleness,
            num_steps=self.num_steps,
            timeout=self.timeout,
            at_least=self.at_least,
            fields=self.fields,
        )

    def _position(self) -> tuple[int, int]:
        """Return the index of this shard and the number of shards, one for each worker and rank."""
        rank, size = self.rank, self.world_size
        if rank is None or size is None:
            rank, size = ranks.position()
        worker = get_worker_info()
        if worker is None:
            return rank, size
        return rank * worker.num_workers + worker.id, size * worker.num_workers
