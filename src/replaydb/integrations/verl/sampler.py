"""Durable samplers for verl's V1 trainer, and the callback that acknowledges checkpoints."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import ray
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from replaydb import GroupLeasedError, GroupStatus, InvalidInputError, NotEnoughGroupsError
from replaydb.integrations.verl.journal import TRAIN, WHERE, Journal

logger = logging.getLogger(__name__)

T = TypeVar("T")
Metrics: TypeAlias = dict[str, Any]
Sampled: TypeAlias = tuple[KVBatchMeta, Metrics]

#: verl's own settings of a sampler, which `sampler_kwargs` can contain besides `url` and `run`.
_SETTINGS = set(inspect.signature(ReplayBuffer.__init__).parameters)


class DurableReplayBuffer(ReplayBuffer):
    """verl's sampler for synchronous training; groups are stored as soon as they are finished.

    A thread stores them, also during training steps. The groups of a batch are leased for its step
    before they leave the queue, so no other sampler gets them.

    Args:
        sampler_kwargs: `url` of the store, and `run`, the name of the experiment and of its buffer.
            All other keys, such as `poll_interval`, are passed to verl's sampler.
        arguments: The arguments that verl passes to every sampler.

    Raises:
        InvalidInputError: `url` or `run` is missing, or verl's sampler has no such setting.
    """

    def __init__(self, *, sampler_kwargs: Mapping[str, Any], **arguments: Any) -> None:
        self._journal, others = Journal.of(sampler_kwargs)
        if wrong := others.keys() - _SETTINGS:
            expected = "url, run and settings of verl's sampler"
            raise InvalidInputError(WHERE, expected, ", ".join(sorted(wrong)))
        super().__init__(sampler_kwargs=sampler_kwargs, **arguments | others)
        self._step = 0
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="replaydb-verl", daemon=True)
        self._watcher.start()

    def checkpointed(self, step: int) -> None:
        """Acknowledge the groups of steps up to this one, which a checkpoint includes."""
        self._journal.settle(step)

    def close(self) -> None:
        """Stop storing finished groups, and close the store."""
        self._closed.set()
        self._watcher.join()
        self._journal.close()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Sampled:
        """See `verl.trainer.ppo.v1.replay_buffer.ReplayBuffer.sample`."""
        if partition_id == TRAIN:
            self._step = global_steps
            self._journal.advance(global_steps - 1)
        sample: Callable[..., Sampled] = super().sample
        return _retry_on_conflict(sample, global_steps, partition_id, batch_size)

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        self._journal.keep()
        self.finished_keys[TRAIN] -= self._journal.taken(self.finished_keys[TRAIN])

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> Any:
        selected = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        if partition_id == TRAIN:
            self._journal.take(selected[0], self._step)
        return selected

    def _evict_terminal_groups(
        self, global_steps: int, partition_id: str, eviction_reasons: tuple[set[str], ...]
    ) -> Any:
        if partition_id == TRAIN:
            self._journal.drop(eviction_reasons[0], GroupStatus.EXPIRED)
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        if partition_id == TRAIN:
            self._journal.drop(uids, GroupStatus.FILTERED)
        super()._clear_groups(partition_id, uids)

    def _watch(self) -> None:
        while not self._closed.wait(self.poll_interval) and ray.is_initialized():
            try:
                self._journal.keep()
            except AssertionError:  # the queue is closed
                return
            except Exception:  # the next sample raises it if it persists
                logger.exception("finished groups could not be stored")


class DurableReplayBufferAsync(DurableReplayBuffer, ReplayBufferAsync):
    """verl's sampler for asynchronous training, otherwise like `DurableReplayBuffer`."""

    def wait_for_sampleable(
        self, global_steps: int, partition_id: str, target_count: int
    ) -> tuple[set[str], Metrics]:
        """See `verl.trainer.ppo.v1.replay_buffer.ReplayBufferAsync.wait_for_sampleable`."""
        wait: Callable[..., tuple[set[str], Metrics]] = super().wait_for_sampleable
        return _retry_on_conflict(wait, global_steps, partition_id, target_count)


class AckOnCheckpoint(CheckpointCallback):
    """Checkpoint callback that acknowledges the groups of all steps in a checkpoint."""

    def on_save(
        self,
        trainer: Any,
        global_step: int,
        checkpoint_dir: str,
        async_save: bool = False,
        **kwargs: Any,
    ) -> None:
        """See `verl.trainer.ppo.checkpoint_callback.CheckpointCallback.on_save`.

        Raises:
            InvalidInputError: The trainer's sampler is not one of this module.
        """
        sampler = trainer.replay_buffer
        if not isinstance(sampler, DurableReplayBuffer):
            where = "trainer.v1.sampler.custom_sampler.name"
            raise InvalidInputError(where, "a sampler of replaydb", type(sampler).__name__)
        if async_save:  # still being written: the tracker names the last complete checkpoint
            tracker = Path(checkpoint_dir).parent / "latest_checkpointed_iteration.txt"
            global_step = int(tracker.read_text()) if tracker.exists() else 0
        sampler.checkpointed(global_step)


def _retry_on_conflict(call: Callable[..., T], *arguments: Any) -> T:
    """Call again if another sampler took a group between its selection and its lease."""
    while True:
        try:
            return call(*arguments)
        except (NotEnoughGroupsError, GroupLeasedError):
            continue
