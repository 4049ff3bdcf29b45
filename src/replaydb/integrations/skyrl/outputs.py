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
from replaydb.integrations.values import to_tensor
from replaydb.training import merge_turns

_TASK = "skyrl"
_EXPERTS = "rollout_expert_indices"
_OF_TURNS = ("response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
_METRICS = "env_metrics"
_SPLITS = "trajectory_time_splits"  # lists of numbers by name; every other field is one list
_OF_ROWS = ("is_last_step", "trajectory_generation_times", _SPLITS, _METRICS)
_ARRAYS = ("pixel_values", "image_grid_thw", _EXPERTS)
_LISTS = "lists"  # metadata: which arrays were lists

Row = dict[str, Any]


class UnmergeableOutputError(rdb.InvalidInputError, AssertionError, TypeError):
    """An output that SkyRL's `merge_stepwise_output` does not merge either.

    It is also an error of the types that SkyRL's function raises for such an output.
    """


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
    rows = _rows(output)
    is_step_wise = output.get("is_last_step") is not None
    if is_step_wise or uids is None:
        if output.get("trajectory_ids") is None:
            raise rdb.InvalidInputError("trajectory_ids", "one for each row", None)
        uids = [one.instance_id for one in output["trajectory_ids"]]
    metrics = _to_json("rollout_metrics", output.get("rollout_metrics"))
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
    """Merge the turns of each trajectory as long as each prompt continues what was before.

    Rows are those of SkyRL's function of this name. They also keep what that loses: rows after the
    last `is_last_step`, times and metrics of environments, and rewards of earlier turns. If each
    reward is one number and an earlier turn has one other than 0, the rewards become those of
    tokens, and that of a turn is on its last token in the loss.

    Returns:
        The output, and numbers of rows by the names of SkyRL's metrics.

    Raises:
        UnmergeableOutputError: `trajectory_ids` or `is_last_step` are missing; or it has expert
            indices or images, for which there is no merged form.
    """
    for name in ("trajectory_ids", "is_last_step"):
        if output.get(name) is None:
            raise UnmergeableOutputError(name, "one for each row", None)
    for name in _ARRAYS:
        if output.get(name) is not None:
            raise UnmergeableOutputError(name, f"None: {name} not supported for merging", "some")
    rows = _rows(output)
    parts: list[list[Row]] = []
    mismatches = 0
    for turns in _trajectories(rows):
        found, report = merge_turns([_tokens_of(row) for row in turns])
        mismatches += report.num_mismatches
        parts += [turns[one.first_turn : one.last_turn + 1] for one in found]
    earlier = [row["rewards"] for part in parts for row in part[:-1]]
    is_lost = any(not _is_list(reward) and reward for reward in earlier)
    merged = [_merged(part, spread=is_lost) for part in parts]
    present = rows[0].keys() if rows else ()
    columns = {name: _column(name, merged) for name in output if name in present}
    return {**output, **columns}, {
        "generate/num_seq_before_merge": len(rows),
        "generate/num_seq_after_merge": len(merged),
        "generate/merge_ratio": len(rows) / max(len(merged), 1),
        "generate/num_prefix_mismatches": mismatches,
    }


def _tokens_of(row: Row) -> rdb.Turn:
    return rdb.Turn(prompt_ids=row["prompt_token_ids"], response_ids=row["response_ids"])


def _merged(turns: Sequence[Row], *, spread: bool) -> Row:
    """Return one row of turns, each of which begins with all tokens of those before it.

    Values are those of the turns, unchanged. `spread` makes rewards of turns those of tokens.
    """
    prompt = turns[0]["prompt_token_ids"]
    fills = {"loss_masks": 0, "rollout_logprobs": 0.0, "rewards": 0.0}
    names = [name for name in fills if _is_list(turns[0].get(name))]
    row: Row = {**turns[-1], "prompt_token_ids": prompt, "response_ids": []}
    row |= {name: [] for name in names}
    if spread:
        row["rewards"] = []
    for turn in turns:
        between = turn["prompt_token_ids"][len(prompt) + len(row["response_ids"]) :]
        row["response_ids"] += [*between, *turn["response_ids"]]
        for name in names:
            row[name] += [fills[name]] * len(between) + list(turn[name])
        if spread and row["response_ids"]:
            row["rewards"] += [0.0] * (len(row["response_ids"]) - len(row["rewards"]))
            mask = list(map(bool, turn["loss_masks"]))
            behind = mask[::-1].index(True) if True in mask else 0
            row["rewards"][-1 - behind] += turn["rewards"]
    return row


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray)


def _rows(output: Mapping[str, Any]) -> list[Row]:
    number = len(output["response_ids"])
    columns = {name: of for name, of in output.items() if name not in ("rollout_metrics", _SPLITS)}
    columns |= {f"{_SPLITS}.{name}": of for name, of in (output.get(_SPLITS) or {}).items()}
    for name, of in columns.items():
        if of is not None and len(of) != number:
            raise rdb.InvalidInputError(name, f"one for each of {number} rows", len(of))
    return [_row(output, i) for i in range(number)]


def _to_json(field: str, value: Any) -> str:
    """Return metrics as text, as JSON columns take no NaN. Numbers of numpy become Python's."""
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError) as error:
        raise rdb.InvalidInputError(field, "numbers and text", error) from error


def _plain(value: Any) -> Any:
    """Return a number for a scalar, and lists for an array or a tensor."""
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return value.tolist()
    raise TypeError(type(value).__name__)


def _row(output: Mapping[str, Any], i: int) -> Row:
    fields = {name: of for name, of in output.items() if name != "rollout_metrics"}
    row = {name: of[i] for name, of in fields.items() if of is not None and name != _SPLITS}
    if (splits := output.get(_SPLITS)) is not None:
        row[_SPLITS] = {name: of[i] for name, of in splits.items()}
    return {"position": i, **row}


def _column(name: str, rows: Sequence[Row]) -> Any:
    """Return a field of all rows as SkyRL has it; None if a row does not have it."""
    values: list[Any] = [row.get(name) for row in rows]
    if all(value is None for value in values) or (name == _SPLITS and None in values):
        return None
    if name == _SPLITS:
        return {key: [value[key] for value in values] for key in values[0]}
    return values


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
    of_tokens = _is_list(rewards)
    metadata = {name: row[name] for name in _OF_ROWS if name in row}
    if metadata.get(_METRICS) is not None:
        metadata[_METRICS] = _to_json(_METRICS, metadata[_METRICS])
    return rdb.Turn(
        prompt_ids=row["prompt_token_ids"],
        response_ids=row["response_ids"],
        loss_mask=row["loss_masks"],
        logprobs=row.get("rollout_logprobs"),
        reward=None if of_tokens else rewards,
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
    lists = [name for name, array in arrays.items() if isinstance(array, list)]
    which = first.get("trajectory_ids")
    metadata: dict[str, Any] = {_LISTS: lists} if lists else {}
    if which is not None:
        metadata["repetition_id"] = which.repetition_id
    return rdb.Episode(
        turns=[_to_turn(row, step) for row in rows],
        extras={
            name: np.asarray(array, np.int32) if name in lists else array
            for name, array in arrays.items()
        },
        metadata=metadata,
    )


def _to_output(group: rdb.EpisodeGroup) -> GeneratorOutput:
    rows = []
    for episode in group.episodes:
        repetition = episode.metadata.get("repetition_id")
        which = None if repetition is None else TrajectoryID(str(group.prompt_uid), repetition)
        arrays = {
            name: _array(name, of, name in episode.metadata.get(_LISTS, ()))
            for name, of in episode.extras.items()
        }
        rows += [{**_of_turn(turn), "trajectory_ids": which, **arrays} for turn in episode.turns]
    names = ("prompt_token_ids", *_OF_TURNS, "trajectory_ids", *_OF_ROWS, *_ARRAYS)
    output = {name: _column(name, rows) for name in names}
    return {**output, "rollout_metrics": json.loads(group.tags["rollout_metrics"])}


def _array(name: str, array: Any, is_list: bool) -> Any:
    """Return it as it was: expert indices are an array or a list, everything else a tensor."""
    if is_list:
        return array.tolist()
    return np.array(array) if name == _EXPERTS else to_tensor(array)


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
