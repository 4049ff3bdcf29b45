"""SkyRL's `GeneratorOutput` as groups, with their turns, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from skyrl.train.generators.base import GeneratorOutput, TrajectoryID
from skyrl.train.generators.utils import concatenate_generator_outputs

import replaydb as rdb
from replaydb.training import merge_turns

_TASK = "skyrl"
_EXPERTS = "rollout_expert_indices"
_OF_TURNS = ("response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
_METRICS = "env_metrics"
_OF_ROWS = ("is_last_step", "trajectory_generation_times", _METRICS)
_ARRAYS = ("pixel_values", "image_grid_thw", _EXPERTS)

Row = dict[str, Any]


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
    if metadata.get(_METRICS) is not None:  # as text: JSON columns take no NaN
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
