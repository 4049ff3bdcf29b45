"""Stored groups as a dataset of torch, for trainers that do not run in an event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed
from sqlalchemy import ColumnElement
from torch.utils.data import IterableDataset, get_worker_info

from replaydb import blocking, checks
from replaydb.batch.batch import Batch
from replaydb.buffer.loader import LoaderState
from replaydb.database import filters
from replaydb.database.schema import group
from replaydb.errors import InvalidInputError
from replaydb.policies import Fifo, SamplingPolicy, checked_policy


@dataclass(eq=False, kw_only=True)
class ReplayDataset(IterableDataset[Any]):
    """Batches of a buffer, one after another, each rank and worker its own groups.

    Goes into a `torch.utils.data.DataLoader` with `batch_size=None`, with any number of workers;
    each opens the store itself when iteration begins, so it may be forked or spawned. Iterating
    ends after `num_steps` batches; a loop that is left earlier, or garbage, closes the store.

    Attributes:
        url: The store's.
        buffer: Name of the buffer, which must be there.
        batch_size: Groups of a batch.
        policy: How groups are chosen.
        shard: How batches of ranks and workers stay disjoint. "lease": each holds its groups until
            it asks for its next batch, which acks them; one that dies gives them back when the
            lease expires. A worker of a DataLoader asks ahead of the trainer: up to `num_workers *
            prefetch_factor` batches are acked before the trainer has them, and are not trained if
            it ends early. With `num_workers=0` none is. "modulo": each is given the groups whose
            id modulo the number of shards is its own, again and again; shards are fixed, so one
            may run dry before another.
        collate: Called with each `Batch`; by default the batch itself is handed out. Workers send
            what it returns to the trainer, so tensors are better than groups.
        prefetch: See `Buffer.loader`.
        ttl: Seconds that leases last.
        where: Only groups that meet this expression over `replaydb.col`.
        max_staleness: Only groups at most this many policy versions behind.
        num_steps: End after so many batches; None never ends.
        timeout: Seconds to wait for each batch; None waits for ever.
        at_least: Hand out fewer than `batch_size` groups, but so many, rather than wait or fail;
            None means all of `batch_size`. See `Buffer.sample`.
        run: See `Store.open`.
        rank: This process among `world_size`; both by default as `torch.distributed` has them.
        world_size: Processes that iterate.

    Raises:
        InvalidInputError: An argument is wrong.
    """

    url: str = field(repr=False)  # it may hold a password
    buffer: str
    batch_size: int
    policy: SamplingPolicy = field(default_factory=Fifo)
    shard: Literal["lease", "modulo"] = "lease"
    collate: Callable[[Batch], Any] | None = None
    prefetch: int = 2
    ttl: float = 600.0
    where: ColumnElement[bool] | None = None
    max_staleness: int | None = None
    num_steps: int | None = None
    timeout: float | None = None
    at_least: int | None = None
    run: str | None = None
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        # Refused here, rather than in a worker of a DataLoader.
        checks.name("buffer", self.buffer)
        checks.whole_number("batch_size", self.batch_size, least=1)
        checked_policy(self.policy)
        checks.one_of("shard", self.shard, ("lease", "modulo"))
        checks.optional(checks.function, "collate", self.collate)
        checks.whole_number("prefetch", self.prefetch)
        checks.duration("ttl", self.ttl)
        filters.checked(self.where)
        checks.optional(checks.whole_number, "max_staleness", self.max_staleness)
        checks.optional(checks.whole_number, "num_steps", self.num_steps)
        checks.seconds("timeout", self.timeout)
        checks.optional(checks.whole_number, "at_least", self.at_least, most=self.batch_size)
        checks.optional(checks.name, "run", self.run)
        if (self.rank is None) != (self.world_size is None):
            raise InvalidInputError("rank", "rank and world_size together", self.rank)
        if self.rank is not None and self.world_size is not None:
            size = checks.whole_number("world_size", self.world_size, least=1)
            if checks.whole_number("rank", self.rank) >= size:
                raise InvalidInputError("rank", f"less than world_size, {size}", self.rank)
        self._loader: blocking.Loader[Any] | None = None
        self._state: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        with (
            blocking.Store.open(self.url, run=self.run, migrate=False) as store,
            self._open_loader(store.buffer(self.buffer, create=False)) as loader,
        ):
            self._loader = loader
            if self._state is not None:
                loader.load_state_dict(self._state)
                self._state = None
            try:
                yield from loader
            finally:
                self._loader = None

    def state_dict(self) -> LoaderState | None:
        """Where the iteration stands, see `Loader`; None before it begins."""
        return None if self._loader is None else self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Let the next iteration go on from a state that `state_dict` gave."""
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
        )

    def _position(self) -> tuple[int, int]:
        """Which shard this is, of how many: every worker of every rank is one."""
        rank, size = self.rank, self.world_size
        if rank is None or size is None:
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if distributed else 0
            size = torch.distributed.get_world_size() if distributed else 1
        worker = get_worker_info()
        if worker is None:
            return rank, size
        return rank * worker.num_workers + worker.id, size * worker.num_workers
