"""A durable SkyRL generator, and a trainer mixin that settles its groups with checkpoints."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from skyrl.train.generators.base import GeneratorInterface, GeneratorOutput
from skyrl.train.generators.utils import concatenate_generator_outputs

import replaydb as rdb
from replaydb import blocking
from replaydb.integrations.decoding import put_failed
from replaydb.integrations.skyrl.outputs import TASK, split, to_groups, to_output

#: The tag of a group that names the checkpoint that includes it.
_CHECKPOINT = "checkpoint"


class StoredGenerator(GeneratorInterface):
    """A SkyRL generator whose outputs survive the trainer process.

    Outputs for training are stored, one group per prompt, before the trainer receives them. A
    prompt is answered from the store if an earlier process generated it and its group is not
    settled. All other attributes are those of the wrapped generator.

    Args:
        generator: The wrapped generator.
        buffer: The buffer for the groups; one per training run.
        max_staleness: Prompts whose stored groups were scheduled more global steps ago than this
            are generated again. By default stored groups of any age are used.

    Attributes:
        now: Returns the current global step, which can be later than the step of the input. None
            to use the step of the input.
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
        if name == "_generator":  # `copy` looks it up before it is set
            raise AttributeError(name)
        return getattr(self._generator, name)

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> GeneratorOutput:
        """Return stored outputs, and generate and store the missing ones.

        Outputs that are not for training are generated and not stored. The output of a prompt that
        cannot be stored, for example because a reward is not finite, is returned all the same. A
        `failed` group without episodes is stored instead, with the error as its `status_reason`.

        Args:
            input_batch: The input of SkyRL's generator.
            disable_tqdm: Passed to the wrapped generator if it has this parameter.
        """
        options = dict.fromkeys(self._quiet, disable_tqdm)
        metadata, ids = input_batch.get("batch_metadata"), input_batch.get("trajectory_ids")
        if metadata is None or metadata.training_phase != "train" or ids is None:
            return await self._generator.generate(input_batch, **options)
        uids = [one.instance_id for one in ids]
        step = metadata.global_step if self.now is None else self.now()
        stored = await asyncio.to_thread(self._stored, uids, step)
        missing = [i for i, uid in enumerate(uids) if uid not in stored]
        made: dict[str, GeneratorOutput] = {}
        if missing:
            some = input_batch if not stored else _rows(input_batch, missing)
            output = await self._generator.generate(some, **options)
            made = split(output, [uids[i] for i in missing])
            await asyncio.to_thread(self._store, made, step)
            if not stored:
                return output
        made |= {uid: to_output(group) for uid, group in stored.items()}
        return concatenate_generator_outputs([made[uid] for uid in dict.fromkeys(uids)])

    def mark(self, uids: Iterable[str], checkpoint: str) -> None:
        """Record which prompts a checkpoint includes, before it is written.

        Args:
            uids: Uids of the prompts that were trained on or filtered.
            checkpoint: A name for the checkpoint, to be passed to `settle`.
        """
        found = [one.id for one in self._unsettled(set(uids))]
        self._buffer.update(found, statuses="completed", tags={_CHECKPOINT: checkpoint})

    def settle(
        self,
        consumed: Iterable[str],
        filtered: Iterable[str] = (),
        *,
        checkpoint: str | None = None,
    ) -> None:
        """Settle the groups of prompts that a checkpoint includes: they are not served again.

        Args:
            consumed: Uids of the prompts that were trained on or filtered; their groups become
                `archived`.
            filtered: Uids of the filtered prompts; their groups become `filtered`.
            checkpoint: Only groups that were marked with this name. Uids repeat in every epoch, so
                a group can be newer than a checkpoint that includes its uid.
        """
        dropped = set(filtered)
        ended: dict[str, list[int]] = {"archived": [], "filtered": []}
        for group in self._unsettled(dropped.union(consumed), checkpoint):
            ended["filtered" if group.prompt_uid in dropped else "archived"].append(group.id)
        for status, ids in ended.items():
            self._buffer.update(ids, statuses="completed", status=status, reason="checkpointed")

    def consumed_uids(self) -> set[str]:
        """Return the uids of prompts with a settled (trained or filtered) group, of any process."""
        return self._uids("archived", "filtered")

    def filtered_uids(self) -> set[str]:
        """Return the uids of prompts with a filtered group, of any process."""
        return self._uids("filtered")

    def _uids(self, *statuses: str) -> set[str]:
        return {str(group.prompt_uid) for group in self._buffer.find(statuses=statuses)}

    def _unsettled(self, uids: set[str], checkpoint: str | None = None) -> list[rdb.GroupInfo]:
        which = None if checkpoint is None else rdb.col.tags[_CHECKPOINT] == checkpoint
        found = self._buffer.find(statuses="completed", where=which)
        return [group for group in found if group.prompt_uid in uids]

    def _store(self, outputs: Mapping[str, GeneratorOutput], step: int) -> None:
        groups: list[rdb.EpisodeGroup] = []
        for uid, output in outputs.items():
            try:
                groups += to_groups(output, [uid] * len(output["response_ids"]), step=step)
            except rdb.InvalidInputError as error:
                put_failed(self._buffer, error, TASK, prompt_uid=uid)
        self._served.update(self._buffer.put(groups))

    def _stored(self, uids: Sequence[str], step: int) -> dict[str, rdb.EpisodeGroup]:
        """Return unsettled groups of earlier processes, by the uid of their prompt."""
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
    """A mixin for `FullyAsyncRayPPOTrainer` that settles the groups of complete checkpoints.

    Name it before the trainer: `class Trainer(CheckpointedGroups, FullyAsyncRayPPOTrainer)`. The
    trainer's generator must be a `StoredGenerator`.
    """

    async_train_dataloader: Any
    generator: StoredGenerator
    global_step: int
    epoch: int
    has_critic: bool

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # A worker creates its input, and then waits until the staleness limit lets it start.
        self.generator.now = lambda: self.global_step
        self._saved: tuple[list[str], list[str], str] | None = None

    async def train(self) -> Any:
        """Train, then settle the groups of the last checkpoint."""
        done = await super().train()  # type: ignore[misc]
        await asyncio.to_thread(self._settle)
        return done

    def save_checkpoints(self) -> Any:
        """Settle the groups of the checkpoint before, then save one.

        When this returns, the checkpoint can be incomplete: SkyRL writes it in the background if so
        configured, and a subclass can add to it.
        """
        self._settle()
        loader = self.async_train_dataloader
        consumed, filtered = loader.get_consumed_uids_list(), loader.get_filtered_uids_list()
        checkpoint = _checkpoint(self.global_step, self.epoch)
        self.generator.mark([*consumed, *filtered], checkpoint)
        saved = super().save_checkpoints()  # type: ignore[misc]
        self._saved = (consumed, filtered, checkpoint)
        return saved

    def _settle(self) -> None:
        """Settle the groups of consumed and filtered prompts of the last checkpoint."""
        if self._saved is None:
            return
        dispatch: Any = getattr(self, "dispatch", None)
        if hasattr(dispatch, "finalize_pending_saves"):  # SkyRL after 0.3.0
            for model in ("policy", "critic") if self.has_critic else ("policy",):
                dispatch.finalize_pending_saves(model)
        consumed, filtered, checkpoint = self._saved
        self.generator.settle(consumed, filtered, checkpoint=checkpoint)
        self._saved = None

    def load_checkpoints(self) -> Any:
        """Load a checkpoint, and settle groups that a process left unsettled when it died."""
        loaded = super().load_checkpoints()  # type: ignore[misc]
        step, _, consumed, filtered, epoch = loaded
        self.generator.settle(consumed or (), filtered or (), checkpoint=_checkpoint(step, epoch))
        return loaded


def _checkpoint(step: int, epoch: int | None) -> str:
    """Return the name of a checkpoint. Two epochs can have a checkpoint of the same step."""
    return f"step {step} of epoch {epoch}"


def _rows(batch: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """Return the selected rows of a generator's input."""
    return {
        name: [of[i] for i in indices] if isinstance(of, list) else of for name, of in batch.items()
    }
