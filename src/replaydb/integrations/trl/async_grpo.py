"""A rollout buffer for `AsyncGRPOTrainer` whose samples survive the processes that use it."""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from transformers import TrainerCallback
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from replaydb import Fifo, Queue, blocking
from replaydb.errors import (
    BufferFullError,
    InvalidInputError,
    NotEnoughGroupsError,
    RateLimitedError,
)
from replaydb.integrations.decoding import decoded
from replaydb.integrations.trl.samples import to_group, to_sample

DAY_SECONDS = 86_400.0
#: Samples that are leased at once: a transaction for each would be most of what a sample costs.
PREFETCH = 32


#: Where `trainer_state.json` of a checkpoint names the samples that it has since the one before.
STATE = "replaydb"


class _GroupId(int):
    """A `group_id` that knows its sample's place: the one thing that goes all the way with it."""

    lease_id: int
    stored_id: int
    stored_uid: str


class RolloutBuffer:
    """What `AsyncGRPOTrainer` and its worker use as a queue: a buffer of a store.

    A sample that was put stays until `done`, or, with `attach`, until a checkpoint has it: what was
    taken and not trained on is given out again after a restart. No two consumers are given the
    same sample. It can be pickled; each process opens the store by itself.

    Args:
        url: As of `Store.open`.
        run: Name of the run.
        name: Name of the buffer.
        maxsize: Samples that may wait; 0 for any number, as of `queue.Queue`. What a consumer has
            fetched ahead, up to `PREFETCH` and to `maxsize`, does not count.
        ttl: Seconds after which what a consumer has taken goes back, unless it is extended.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str,
        name: str = "rollouts",
        maxsize: int = 0,
        ttl: float = DAY_SECONDS,
    ) -> None:
        self._given: dict[str, Any] = {
            "url": url,
            "run": run,
            "name": name,
            "maxsize": maxsize,
            "ttl": ttl,
        }
        self._source = uuid.uuid4().hex
        self._owner: str | None = None
        self._lock = threading.Lock()
        self._ready: deque[RolloutSample] = deque()
        self._held: dict[int, set[int]] = {}  # by their leases, the ids of groups
        self._is_stale: Callable[[RolloutSample], bool] = lambda sample: False

    def __getstate__(self) -> dict[str, Any]:
        return {"given": self._given, "source": self._source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["given"])  # type: ignore[misc]
        self._source = state["source"]

    @cached_property
    def _store(self) -> blocking.Store:
        return blocking.Store.open(self._given["url"], run=self._given["run"])

    @cached_property
    def _buffer(self) -> blocking.Buffer:
        size = self._given["maxsize"]
        limit = Queue(size) if size else None
        return self._store.buffer(self._given["name"], rate_limit=limit)

    def put_nowait(self, sample: RolloutSample) -> None:
        """Store a sample.

        Raises:
            queue.Full: `maxsize` samples wait already.
            InvalidInputError: The sample cannot be stored.
        """
        try:
            self._buffer.put(to_group(sample, self._source), timeout=0)
        except (BufferFullError, RateLimitedError):
            raise queue.Full from None

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """The oldest sample that nobody has, held until `done` or the end of its lease.

        Its `group_id` is the one that it was put with, or, where it was put by another buffer or
        before a restart, below 0: numbers of a worker that starts anew begin at 0 again.

        Args:
            block: Whether to wait.
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            queue.Empty: There is none, or none in time; where it does not wait, also while another
                thread gets one.
        """
        limit = timeout if block else 0
        begin = time.monotonic()
        # Who holds the lock may wait for ever.
        if not self._lock.acquire(timeout=-1 if limit is None else limit):
            raise queue.Empty
        try:
            if not self._ready:
                left = None if limit is None else max(0.0, begin + limit - time.monotonic())
                self._take(left)
            sample = self._ready.popleft()
        finally:
            self._lock.release()
        if self._is_stale(sample):  # and so passed over by the trainer that gets it
            self._let_go(blocking.Lease.reject, [sample.group_id], reason="too stale")
        return sample

    def _take(self, timeout: float | None) -> None:
        ttl = self._given["ttl"]
        try:
            lease = self._buffer.lease(
                PREFETCH, Fifo(), at_least=1, ttl=ttl, timeout=timeout, owner=self._owner
            )
        except (NotEnoughGroupsError, RateLimitedError):
            raise queue.Empty from None
        samples = decoded(lease, to_sample)
        self._held[lease.id] = set(lease.batch.ids)
        for group, sample in zip(lease.batch, samples, strict=True):
            known = group.episodes[0].metadata["source"] == self._source
            sample.group_id = _GroupId(sample.group_id if known else ~sample.group_id)
            sample.group_id.lease_id, sample.group_id.stored_id = lease.id, group.id
            sample.group_id.stored_uid = group.group_uid
            self._ready.append(sample)

    def qsize(self) -> int:
        """How many samples wait, those included that were fetched ahead."""
        return self._buffer.count(statuses="completed") + len(self._ready)

    def done(self, group_ids: Iterable[int]) -> None:
        """Let samples go that nobody needs again, such as those that a checkpoint has.

        Args:
            group_ids: The very `group_id` of each, as `get` gave it.

        Raises:
            InvalidInputError: A number that is not from `get`; nothing was let go.
            LeaseExpiredError: A sample was held for longer than `ttl`; somebody may have it again.
        """
        self._let_go(blocking.Lease.ack, group_ids)

    def _let_go(self, how: Callable[..., None], group_ids: Iterable[Any], **more: str) -> None:
        chosen: dict[int, set[int]] = defaultdict(set)
        for group_id in group_ids:
            if not isinstance(group_id, _GroupId):
                raise InvalidInputError("group_ids", "the very group_id that `get` gave", group_id)
            chosen[group_id.lease_id].add(group_id.stored_id)
        for lease_id, ids in chosen.items():
            how(self._buffer.open_lease(lease_id, ttl=self._given["ttl"]), ids, **more)
            held = self._held.pop(lease_id, set()) - ids  # another consumer's are not held here
            if held:
                self._held[lease_id] = held

    def attach(self, trainer: Any) -> None:
        """Become the rollout buffer of an `AsyncGRPOTrainer`, before it trains.

        Samples are let go when a checkpoint is saved that has them, so `ttl` must be longer than
        the time from one to the next; samples too stale for the trainer, when it gets them. The
        checkpoint names them in its `trainer_state.json`. When training starts, samples that the
        checkpoint which it resumes from names are let go, and all others that were taken for the
        same `output_dir`, by this process or a killed one, are given out again. On other processes
        than the main one, which takes no samples, it does nothing.

        Args:
            trainer: The trainer, whose worker puts samples here from now on.
        """
        if not trainer.accelerator.is_main_process:
            return
        self._owner = os.path.abspath(trainer.args.output_dir)
        trainer.rollout_worker.rollout_buffer = trainer.rollout_queue = self
        self._is_stale = lambda sample: (
            trainer.model_version - sample.model_version > trainer.args.max_staleness
        )
        trainer._trained_groups = _Collated()
        trainer.add_callback(_Settling(self, trainer))

    def resume(self, trained: Iterable[str]) -> None:
        """Let go of samples that a checkpoint has, and let all others be given out again.

        The others are those that this buffer, or a trainer with the same `output_dir`, had taken.

        Args:
            trained: Their `group_uid` in the store.
        """
        uids = list(trained)
        ids = {one.id for one in self._buffer.find(uids=uids)}
        held, self._held = self._held, {}
        self._ready.clear()
        for lease in self._buffer.leases():
            if lease.owner == self._owner or lease.id in held:
                if done := ids.intersection(lease.group_ids):
                    self._buffer.open_lease(lease.id, ttl=self._given["ttl"]).ack(done)
                self._buffer.revoke(lease.id, reason="training started again")
        # Their lease may have ended since.
        self._buffer.update(uids=uids, statuses="completed", status="archived")

    def extend(self) -> None:
        """Let all that is held last `ttl` seconds from now."""
        for lease_id in self._held:
            self._buffer.open_lease(lease_id, ttl=self._given["ttl"])

    def give_back(self, reason: str) -> None:
        """Let what was taken and not let go be given out again, to whoever comes first."""
        held, self._held = self._held, {}
        self._ready.clear()
        for lease_id in held:
            self._buffer.revoke(lease_id, reason=reason)

    def close(self) -> None:
        """Give back what was taken and not let go, and close the store."""
        self.give_back("the buffer was closed")
        self._store.close()


class _Collated(set[int]):
    """Groups that were collated, as upstream counts them, and the samples of each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: deque[list[int]] = deque()

    def update(self, *groups: Iterable[int]) -> None:
        for several in groups:
            self.batches.append(list(several))
            super().update(self.batches[-1])


class _Settling(TrainerCallback):
    """Lets samples go once a checkpoint has what was learned from them."""

    def __init__(self, buffer: RolloutBuffer, trainer: Any) -> None:
        self._buffer = buffer
        self._collated: _Collated = trainer._trained_groups
        self._trained: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give out again what was taken before and is not in the checkpoint, if there is one."""
        self._buffer.resume(state.stateful_callbacks.get(STATE, {}).get("trained", []))
        self._collated.batches.clear()
        self._trained = []

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch was trained on: the oldest, as some are collated ahead."""
        self._trained += self._collated.batches.popleft()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is done, and may be saved next.

        The checkpoint itself names its samples: the process may be killed once it is complete and
        before `on_save`, which other callbacks can delay.
        """
        self.on_substep_end(args, state, control, **kwargs)
        state.stateful_callbacks[STATE] = {"trained": [one.stored_uid for one in self._trained]}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """There is a checkpoint."""
        self._buffer.done(self._trained)
        self._buffer.extend()
        self._trained = []
