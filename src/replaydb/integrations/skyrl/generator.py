"""SkyRL's generators, durable, and their trainer, which says what was used."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from skyrl.train.generators.base import GeneratorInterface, GeneratorOutput

import replaydb as rdb
from replaydb import blocking
from replaydb.integrations.skyrl.outputs import to_generator_output, to_groups

#: The tag that names the checkpoint which has a group.
_CHECKPOINT = "checkpoint"


class StoredGenerator(GeneratorInterface):
    """A SkyRL generator whose outputs survive the trainer.

    What it generates for training is stored, a group for each prompt, before the trainer sees it.
    A prompt that a process before this one generated, and whose group is not settled, is answered
    from the store. Everything else of the wrapped generator is as it was.

    Args:
        generator: The generator.
        buffer: Where the groups are kept; one for each training run.
        max_staleness: Stored groups that were scheduled more global steps ago are generated anew.

    Attributes:
        now: The global step, where it may have gone on since the input was made.
    """

    def __init__(
        self,
        generator: GeneratorInterface,
        buffer: blocking.Buffer,
        *,
        max_staleness: int | None = None,
    ) -> None:
        self._generator = generator
        self._buffer = buffer
        self._max_staleness = max_staleness
        self._served: set[int] = set()
        self.now: Callable[[], int] | None = None
        parameters = inspect.signature(generator.generate).parameters
        self._quiet = {"disable_tqdm"} & parameters.keys()

    def __getattr__(self, name: str) -> Any:
        if name == "_generator":  # a copy asks for it before it has one
            raise AttributeError(name)
        return getattr(self._generator, name)

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> GeneratorOutput:
        """Generate, and store what was generated; or read what was stored.

        Raises:
            InvalidInputError: Something generated cannot be stored: a reward, say, is not finite.
        """
        options = dict.fromkeys(self._quiet, disable_tqdm)
        metadata, ids = input_batch.get("batch_metadata"), input_batch.get("trajectory_ids")
        if metadata is None or metadata.training_phase != "train" or ids is None:
            return await self._generator.generate(input_batch, **options)
        uids = [one.instance_id for one in ids]
        step = metadata.global_step if self.now is None else self.now()
        stored = await asyncio.to_thread(self._stored, uids, step)
        missing = [i for i, uid in enumerate(uids) if uid not in stored]
        made: dict[str, rdb.EpisodeGroup] = {}
        if missing:
            some = input_batch if not stored else _rows(input_batch, missing)
            output = await self._generator.generate(some, **options)
            groups = to_groups(output, [uids[i] for i in missing], step=step)
            self._served.update(await asyncio.to_thread(self._buffer.put, groups))
            if not stored:
                return output
            made = {str(group.prompt_uid): group for group in groups}
        return to_generator_output([(stored | made)[uid] for uid in dict.fromkeys(uids)])

    def mark(self, uids: Iterable[str], checkpoint: str) -> None:
        """Say which prompts a checkpoint that is about to be written has.

        Args:
            uids: Uids of the prompts that were trained or filtered.
            checkpoint: A name for it, to be given to `settle`.
        """
        found = self._unsettled(set(uids))
        self._buffer.update([one.id for one in found], tags={_CHECKPOINT: checkpoint})

    def settle(
        self,
        consumed: Iterable[str],
        filtered: Iterable[str] = (),
        *,
        checkpoint: str | None = None,
    ) -> None:
        """Say which prompts a checkpoint says were used: their groups are not served again.

        Args:
            consumed: Uids of the prompts that were trained or filtered; groups become archived.
            filtered: Those of them that were dropped; groups become `filtered`.
            checkpoint: Only groups that were marked with it. Uids come again in every epoch, so
                a group may be newer than a checkpoint that has its uid.
        """
        dropped = set(filtered)
        ended: dict[str, list[int]] = {"archived": [], "filtered": []}
        for group in self._unsettled(dropped.union(consumed), checkpoint):
            ended["filtered" if group.prompt_uid in dropped else "archived"].append(group.id)
        for status, ids in ended.items():
            self._buffer.update(ids, status=status, reason="checkpointed")

    def consumed_uids(self) -> set[str]:
        """Prompts of which a group was settled, trained or filtered, in any process."""
        return self._uids("archived", "filtered")

    def filtered_uids(self) -> set[str]:
        """Prompts of which a group was dropped, in any process."""
        return self._uids("filtered")

    def _uids(self, *statuses: str) -> set[str]:
        return {str(group.prompt_uid) for group in self._buffer.find(statuses=statuses)}

    def _unsettled(self, uids: set[str], checkpoint: str | None = None) -> list[rdb.GroupInfo]:
        which = None if checkpoint is None else rdb.col.tags[_CHECKPOINT] == checkpoint
        found = self._buffer.find(statuses="completed", where=which)
        return [group for group in found if group.prompt_uid in uids]

    def _stored(self, uids: Sequence[str], step: int) -> dict[str, rdb.EpisodeGroup]:
        """Groups that are not settled, of processes before this one, by the uid of their prompt."""
        which: list[sa.ColumnElement[bool]] = [rdb.col.prompt_uid.in_(sorted(set(uids)))]
        if self._max_staleness is not None:
            which.append(rdb.col.min_policy_version >= step - self._max_staleness)
        found = self._buffer.find(statuses="completed", where=sa.and_(*which))
        sizes = Counter(uids)
        ids = {
            group.prompt_uid: group.id
            for group in found
            if group.id not in self._served and group.num_episodes == sizes[str(group.prompt_uid)]
        }
        self._served.update(ids.values())
        return {str(group.prompt_uid): group for group in self._buffer.get(ids.values())}


class CheckpointedGroups:
    """A mix-in for `FullyAsyncRayPPOTrainer`: groups are settled with the checkpoint.

    It stands before the trainer, `class Trainer(CheckpointedGroups, FullyAsyncRayPPOTrainer)`,
    whose generator is a `StoredGenerator`.
    """

    async_train_dataloader: Any
    generator: StoredGenerator
    global_step: int
    epoch: int

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # A worker makes its input, and then waits until staleness lets it begin.
        self.generator.now = lambda: self.global_step

    def save_checkpoints(self) -> Any:
        """Save, and then settle what the checkpoint says was consumed and filtered."""
        loader = self.async_train_dataloader
        consumed, filtered = loader.get_consumed_uids_list(), loader.get_filtered_uids_list()
        checkpoint = _checkpoint(self.global_step, self.epoch)
        self.generator.mark([*consumed, *filtered], checkpoint)
        saved = super().save_checkpoints()  # type: ignore[misc]
        self.generator.settle(consumed, filtered, checkpoint=checkpoint)
        return saved

    def load_checkpoints(self) -> Any:
        """Load, and settle what a process that died after saving had not."""
        loaded = super().load_checkpoints()  # type: ignore[misc]
        step, _, consumed, filtered, epoch = loaded
        self.generator.settle(consumed or (), filtered or (), checkpoint=_checkpoint(step, epoch))
        return loaded


def _checkpoint(step: int, epoch: int | None) -> str:
    """An epoch may end between steps, with a checkpoint of the step that is next."""
    return f"step {step} of epoch {epoch}"


def _rows(batch: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """Some rows of a generator's input."""
    return {
        name: [of[i] for i in indices] if isinstance(of, list) else of for name, of in batch.items()
    }
