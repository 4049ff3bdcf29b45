"""A durable rollout buffer for `AsyncGRPOTrainer`."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import KW_ONLY, asdict, dataclass
from functools import cached_property
from typing import Any

from transformers import TrainerCallback
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import replaydb as rdb
from replaydb import blocking
from replaydb.integrations.decoding import decoded
from replaydb.integrations.trl.samples import to_group, to_sample

DAY_SECONDS = 86_400.0
#: Samples per lease: a transaction for each would dominate the cost of a sample.
PREFETCH = 32


#: Key of `trainer_state.json` with the samples trained on since the previous checkpoint.
STATE = "replaydb"


class _GroupId(int):
    """A `group_id` with the stored location of its sample: TRL passes only this field on."""

    lease_id: int
    stored_id: int
    stored_uid: str


@dataclass(eq=False, repr=False)
class RolloutBuffer:
    """A durable queue of samples between `AsyncGRPOTrainer` and its worker, stored in a buffer.

    A sample is kept until `done` or, with `attach`, until a checkpoint includes it. Samples that
    were taken and not trained on are returned again after a restart. Two consumers never get the
    same sample. The object can be pickled; each process opens the store itself.

    Args:
        url: URL of the store, as for `Store.open`.
        run: Name of the run.
        name: Name of the buffer.
        maxsize: Maximum number of waiting samples; 0 means unlimited, as for `queue.Queue`. Samples
            that a consumer has prefetched, up to `PREFETCH` and `maxsize`, do not count.
        ttl: Seconds after which samples that a consumer has taken are released, unless extended.
    """

    url: str
    _: KW_ONLY
    run: str
    name: str = "rollouts"
    maxsize: int = 0
    ttl: float = DAY_SECONDS

    def __post_init__(self) -> None:
        self._source = uuid.uuid4().hex
        # Of leases; the last one takes samples.
        self._owners = [f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}"]
        self._lock = threading.Lock()
        self._ready: deque[RolloutSample] = deque()
        self._is_stale: Callable[[RolloutSample], bool] = lambda sample: False

    def __getstate__(self) -> dict[str, Any]:
        return {"given": asdict(self), "source": self._source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["given"])  # type: ignore[misc]
        self._source = state["source"]

    @cached_property
    def _store(self) -> blocking.Store:
        return blocking.Store.open(self.url, run=self.run)

    @cached_property
    def _buffer(self) -> blocking.Buffer:
        limit = rdb.Queue(self.maxsize) if self.maxsize else None
        return self._store.buffer(self.name, rate_limit=limit)

    def put_nowait(self, sample: RolloutSample) -> None:
        """Store a sample.

        Raises:
            queue.Full: `maxsize` samples are already waiting.
            InvalidInputError: The sample cannot be stored.
        """
        try:
            self._buffer.put(to_group(sample, self._source), timeout=0)
        except (rdb.BufferFullError, rdb.RateLimitedError):
            raise queue.Full from None

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """Return the oldest available sample, leased until `done` or the end of its lease.

        Its `group_id` is the original one. It is below 0 if the sample was put by another buffer
        or before a restart, because a restarted worker counts from 0 again.

        Args:
            block: Whether to wait.
            timeout: Maximum number of seconds to wait; None waits forever.

        Raises:
            queue.Empty: No sample was available in time. With `block=False`, also if another
                thread is in this call.
        """
        limit = timeout if block else 0
        begin = time.monotonic()
        # The thread that has the lock can wait forever.
        if not self._lock.acquire(timeout=-1 if limit is None else limit):
            raise queue.Empty
        try:
            if not self._ready:
                left = None if limit is None else max(0.0, begin + limit - time.monotonic())
                self._take(left)
            sample = self._ready.popleft()
        finally:
            self._lock.release()
        if self._is_stale(sample):  # the trainer skips it
            self._end_leases(blocking.Lease.reject, [sample.group_id], reason="too stale")
        return sample

    def _take(self, timeout: float | None) -> None:
        try:
            lease = self._buffer.lease(
                PREFETCH, at_least=1, ttl=self.ttl, timeout=timeout, owner=self._owners[-1]
            )
        except (rdb.NotEnoughGroupsError, rdb.RateLimitedError):
            raise queue.Empty from None
        samples = decoded(lease, to_sample)
        for group, sample in zip(lease.batch, samples, strict=True):
            known = group.episodes[0].metadata["source"] == self._source
            sample.group_id = _GroupId(sample.group_id if known else ~sample.group_id)
            sample.group_id.lease_id, sample.group_id.stored_id = lease.id, group.id
            sample.group_id.stored_uid = group.group_uid
            self._ready.append(sample)

    def qsize(self) -> int:
        """Return the number of waiting samples, including prefetched ones."""
        return self._buffer.count(statuses="completed") + len(self._ready)

    def done(self, group_ids: Iterable[int]) -> None:
        """Acknowledge samples that are not needed again, such as those that a checkpoint includes.

        Args:
            group_ids: The `group_id` object of each sample, as returned by `get`.

        Raises:
            InvalidInputError: A number is not an object that `get` returned; no sample was
                acknowledged.
            LeaseExpiredError: A sample was leased for longer than `ttl`; another consumer can have
                it now.
        """
        self._end_leases(blocking.Lease.ack, group_ids)

    def _end_leases(
        self, how: Callable[..., object], group_ids: Iterable[Any], **more: str
    ) -> None:
        chosen: dict[int, set[int]] = defaultdict(set)
        for group_id in group_ids:
            if not isinstance(group_id, _GroupId):
                expected = "the group_id object that `get` returned, not a copy"
                raise rdb.InvalidInputError("group_ids", expected, group_id)
            chosen[group_id.lease_id].add(group_id.stored_id)
        for lease_id, ids in chosen.items():
            how(self._opened(lease_id), ids, **more)

    def _opened(self, lease_id: int) -> blocking.Lease:
        return self._buffer.open_lease(lease_id, ttl=self.ttl, load=False)

    def attach(self, trainer: Any) -> None:
        """Become the rollout buffer of an `AsyncGRPOTrainer`. Call this before it trains.

        Samples are acknowledged when a checkpoint that includes them is saved, so `ttl` must be
        longer than the time between checkpoints. Samples that are too stale for the trainer are
        rejected when it gets them. The checkpoint names its samples in `trainer_state.json`.

        When training starts, samples named by the checkpoint that it resumes from are
        acknowledged. All other samples that were taken for the same `output_dir`, by this process
        or a killed one, are returned again.

        Only the main process takes samples. In other processes this does nothing.

        Args:
            trainer: The trainer. Its worker puts samples into this buffer from now on.
        """
        if not trainer.accelerator.is_main_process:
            return
        self._owners.append(os.path.abspath(trainer.args.output_dir))
        trainer.rollout_worker.rollout_buffer = trainer.rollout_queue = self
        self._is_stale = lambda sample: (
            trainer.model_version - sample.model_version > trainer.args.max_staleness
        )
        trainer._trained_groups = _Collated()
        trainer.add_callback(_Settling(self, trainer))

    def resume(self, trained: Iterable[str]) -> None:
        """Acknowledge the samples that a checkpoint includes, and release all others.

        The others are the samples that this buffer, or a trainer with the same `output_dir`, had
        taken.

        Args:
            trained: `group_uid` of the samples in the checkpoint.
        """
        uids = list(trained)
        self._release("training started again", {one.id for one in self._buffer.find(uids=uids)})
        # Their lease can have ended since.
        self._buffer.update(uids=uids, statuses="completed", status="archived")

    def extend(self) -> None:
        """Extend all leases to `ttl` seconds from now."""
        for lease in self._leases():
            self._opened(lease.id)

    def close(self) -> None:
        """Release samples that were taken and not acknowledged, and close the store."""
        with closing(self._store), suppress(rdb.StoreClosedError):
            self._release("the buffer was closed")

    def _leases(self) -> list[rdb.LeaseInfo]:
        return [one for one in self._buffer.leases() if one.owner in self._owners]

    def _release(self, reason: str, done: frozenset[int] | set[int] = frozenset()) -> None:
        """Release the samples that were taken, except those that are done."""
        self._ready.clear()
        for lease in self._leases():
            if included := done.intersection(lease.group_ids):
                self._opened(lease.id).ack(included)
            self._buffer.revoke(lease.id, reason=reason)


class _Collated(set[int]):
    """Collated groups, as upstream counts them, and the samples of each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: deque[list[int]] = deque()

    def update(self, *groups: Iterable[int]) -> None:
        for several in groups:
            self.batches.append(list(several))
            super().update(self.batches[-1])


class _Settling(TrainerCallback):
    """Acknowledges samples once a checkpoint includes the steps that trained on them."""

    def __init__(self, buffer: RolloutBuffer, trainer: Any) -> None:
        self._buffer = buffer
        self._collated: _Collated = trainer._trained_groups
        self._trained: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Release samples that were taken before and are not in the checkpoint, if there is one."""
        self._buffer.resume(state.stateful_callbacks.get(STATE, {}).get("trained", []))
        self._collated.batches.clear()
        self._trained = []

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the oldest micro-batch as trained on; later ones are collated ahead."""
        self._trained += self._collated.batches.popleft()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Name the trained samples in the state that the next checkpoint saves.

        The process can be killed when the checkpoint is complete and before `on_save`, which other
        callbacks can delay.
        """
        self.on_substep_end(args, state, control, **kwargs)
        state.stateful_callbacks[STATE] = {"trained": [one.stored_uid for one in self._trained]}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Acknowledge the trained samples: a checkpoint was saved."""
        self._buffer.done(self._trained)
        self._buffer.extend()
        self._trained = []
