"""SkyRL: its generator made durable, and its outputs as groups, with their turns.

StoredGenerator        a generator whose outputs are stored as they are generated, and served again
                       after a restart
CheckpointedGroups     a mix-in for trainers: what was trained is settled when it is checkpointed
to_groups              a `GeneratorOutput` as groups; `to_generator_output` is the way back
merge_stepwise_output  turns as rows, with SkyRL's rule and the names of its metrics

`docs/integrations/skyrl.md` has the lines to change.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import sqlalchemy as sa
import torch
from skyrl.train.generators.base import GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.generators.utils import concatenate_generator_outputs

import replaydb as rdb
from replaydb import blocking
from replaydb.training import merge_turns

__all__ = [
    "CheckpointedGroups",
    "StoredGenerator",
    "merge_stepwise_output",
    "to_generator_output",
    "to_groups",
]

_TASK = "skyrl"
_CHECKPOINT = "checkpoint"
_EXPERTS = "rollout_expert_indices"
_OF_TURNS = ("response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
_METRICS = "env_metrics"
_OF_ROWS = ("is_last_step", "trajectory_generation_times", _METRICS)
_ARRAYS = ("pixel_values", "image_grid_thw", _EXPERTS)

Row = dict[str, Any]


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


def to_groups(
    output: GeneratorOutput, uids: Sequence[str] | None = None, *, step: int | None = None
) -> list[rdb.EpisodeGroup]:
    """A generator's output as groups: one for each prompt, an episode for each trajectory.

    The rows of a step-wise trajectory are its turns; any other has one.

    Args:
        output: The output; rows of a prompt stand together, as SkyRL has them.
        uids: Prompt of each row; by default that of its trajectory id.
        step: The global step it was scheduled in, which is its policy version.

    Raises:
        InvalidInputError: Rows say nothing of their prompts; or something cannot be stored, such
            as a reward that is not finite.
    """
    rows = [_row(output, i) for i in range(len(output["response_ids"]))]
    is_step_wise = output.get("is_last_step") is not None
    if is_step_wise or uids is None:
        if output.get("trajectory_ids") is None:
            raise rdb.InvalidInputError("trajectory_ids", "one for each row", None)
        uids = [one.instance_id for one in output["trajectory_ids"]]
    metrics = json.dumps(output.get("rollout_metrics"), default=float)
    groups = []
    for uid, members in groupby(_trajectories(rows), lambda some: uids[some[0]["position"]]):
        episodes = [_to_episode(some, step) for some in members]
        tags = {"step_wise": is_step_wise, "rollout_metrics": metrics}
        groups.append(rdb.EpisodeGroup(_TASK, episodes, prompt_uid=uid, tags=tags))
    return groups


def to_generator_output(groups: Iterable[rdb.EpisodeGroup]) -> GeneratorOutput:
    """Stored groups as a generator's output, in their order; logprobs are those of float32."""
    return concatenate_generator_outputs([_to_output(group) for group in groups])


def merge_stepwise_output(output: GeneratorOutput) -> tuple[GeneratorOutput, dict[str, float]]:
    """Merge the turns of each trajectory as long as each prompt goes on from what was before.

    Rows are those of SkyRL's function of this name, and keep what that loses: rewards are those of
    tokens, so that every turn keeps its own, on its last token in the loss where it is one number;
    rows after the last that is a last step stay; so do times and metrics of environments.

    Returns:
        The output, and numbers of rows by the names of SkyRL's metrics.
    """
    rows = [_row(output, i) for i in range(len(output["response_ids"]))]
    merged, mismatches = [], 0
    for turns in _trajectories(rows):
        found, report = merge_turns([_to_turn(row, None) for row in turns])
        mismatches += report.num_mismatches
        for one in found:
            last, row, start = turns[one.last_turn], one.episode, one.episode.prompt_length
            rewards = row.token_extras.get("token_rewards", np.zeros(row.num_tokens))
            merged.append(
                {
                    **last,
                    "prompt_token_ids": row.prompt_ids.tolist(),
                    "response_ids": row.response_ids.tolist(),
                    "loss_masks": row.loss_mask[start:].astype(int).tolist(),
                    "rewards": rewards[start:].tolist(),
                    "rollout_logprobs": None
                    if row.logprobs is None
                    else row.logprobs[start:].tolist(),
                }
            )
    columns = {name: [row[name] for row in merged] for name in _row(output, 0) if name in output}
    return {**output, **columns}, {
        "generate/num_seq_before_merge": len(rows),
        "generate/num_seq_after_merge": len(merged),
        "generate/merge_ratio": len(rows) / max(len(merged), 1),
        "generate/num_prefix_mismatches": mismatches,
    }


def _row(output: Mapping[str, Any], i: int) -> Row:
    fields = {name: of for name, of in output.items() if name != "rollout_metrics"}
    return {"position": i, **{name: of[i] for name, of in fields.items() if of is not None}}


def _trajectories(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows up to each last step; those after the last one are a trajectory that was cut off."""
    some: list[Row] = []
    for row in rows:
        if some and (
            some[-1].get("is_last_step", True)
            or some[-1]["trajectory_ids"] != row["trajectory_ids"]
        ):
            yield some
            some = []
        some.append(row)
    if some:
        yield some


def _to_turn(row: Row, step: int | None) -> rdb.Turn:
    rewards = row["rewards"]
    of_tokens = isinstance(rewards, Sequence)
    metadata = {name: row[name] for name in _OF_ROWS if name in row}
    if (
        metadata.get(_METRICS) is not None
    ):  # text, since they may be NaN, which no JSON column takes
        metadata[_METRICS] = json.dumps(metadata[_METRICS], default=float)
    return rdb.Turn(
        prompt_ids=row["prompt_token_ids"],
        response_ids=row["response_ids"],
        loss_mask=row["loss_masks"],
        logprobs=row.get("rollout_logprobs"),
        reward=None if of_tokens else float(rewards),
        token_rewards=rewards if of_tokens else None,
        policy_version=step,
        finish_reason=row.get("stop_reasons"),
        metadata=metadata,
    )


def _to_episode(rows: Sequence[Row], step: int | None) -> rdb.Episode:
    first = rows[0]
    arrays = {name: first[name] for name in _ARRAYS if first.get(name) is not None}
    if arrays and len(rows) > 1:
        raise rdb.InvalidInputError(next(iter(arrays)), "none in a step-wise trajectory", "some")
    which = first.get("trajectory_ids")
    return rdb.Episode(
        turns=[_to_turn(row, step) for row in rows],
        extras={
            name: array if isinstance(array, torch.Tensor) else np.asarray(array, np.int32)
            for name, array in arrays.items()
        },
        metadata={} if which is None else {"repetition_id": which.repetition_id},
    )


def _to_output(group: rdb.EpisodeGroup) -> GeneratorOutput:
    rows = []
    for episode in group.episodes:
        repetition = episode.metadata.get("repetition_id")
        which = None if repetition is None else TrajectoryID(str(group.prompt_uid), repetition)
        arrays: dict[str, Any] = {
            name: torch.as_tensor(np.array(of)) for name, of in episode.extras.items()
        }
        if _EXPERTS in arrays:
            arrays[_EXPERTS] = arrays[_EXPERTS].tolist()
        rows += [{**_of_turn(turn), "trajectory_ids": which, **arrays} for turn in episode.turns]
    names = ("prompt_token_ids", *_OF_TURNS, "trajectory_ids", *_OF_ROWS, *_ARRAYS)
    output = {name: [row.get(name) for row in rows] for name in names}
    metrics = json.loads(group.tags["rollout_metrics"])
    return {
        **{name: None if set(map(type, of)) == {type(None)} else of for name, of in output.items()},
        "rollout_metrics": metrics,
    }


def _of_turn(turn: rdb.Turn) -> Row:
    rewards, logprobs = turn.token_rewards, turn.logprobs
    metrics = turn.metadata.get(_METRICS)
    its = turn.metadata if metrics is None else turn.metadata | {_METRICS: json.loads(metrics)}
    return {
        "prompt_token_ids": turn.prompt_ids.tolist(),
        "response_ids": turn.response_ids.tolist(),
        "rewards": turn.reward if rewards is None else rewards.tolist(),
        "loss_masks": turn.loss_mask.astype(int).tolist(),
        "stop_reasons": turn.finish_reason,
        "rollout_logprobs": None if logprobs is None else logprobs.tolist(),
        **its,
    }


def _rows(batch: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """Some rows of a generator's input."""
    return {
        name: [of[i] for i in indices] if isinstance(of, list) else of for name, of in batch.items()
    }
