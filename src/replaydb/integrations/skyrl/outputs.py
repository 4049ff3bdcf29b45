"""Conversion of SkyRL's `GeneratorOutput` to groups with turns, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from skyrl.train.generators.base import GeneratorOutput, TrajectoryID
from skyrl.train.generators.utils import concatenate_generator_outputs

import replaydb as rdb
from replaydb.integrations.values import Arrays, decode, encode, to_tensor
from replaydb.training import merge_turns

TASK = "skyrl"
_EXPERTS = "rollout_expert_indices"
_OF_TURNS = ("response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
_METRICS = "env_metrics"
_SPLITS = "trajectory_time_splits"  # a dict of lists; every other field is one list
_TIMES = "trajectory_generation_times"
_TOTALS = "rollout_metrics"  # of all rows
_OF_ROWS = ("is_last_step", _TIMES, _SPLITS, _METRICS)
_ARRAYS = ("pixel_values", "image_grid_thw", _EXPERTS)
_COLUMNS = ("prompt_token_ids", *_OF_TURNS, "trajectory_ids", *_OF_ROWS, *_ARRAYS)
_LISTS = "lists"  # metadata: names of the arrays that were lists

Row = dict[str, Any]


class UnmergeableOutputError(rdb.InvalidInputError, AssertionError, TypeError):
    """The output cannot be merged; SkyRL's `merge_stepwise_output` refuses it as well.

    The base classes include the errors that SkyRL's function raises for such an output.
    """


def to_groups(
    output: GeneratorOutput, uids: Sequence[str] | None = None, *, step: int | None = None
) -> list[rdb.EpisodeGroup]:
    """Convert a generator's output to groups, one per prompt, with one episode per trajectory.

    The rows of a step-wise trajectory become its turns; any other trajectory has one turn.

    Args:
        output: The output. Rows of a prompt must be adjacent, as in SkyRL.
        uids: Uid of the prompt of each row; by default taken from `trajectory_ids`.
        step: The global step in which the output was scheduled, used as its policy version.

    Raises:
        InvalidInputError: Rows have neither `uids` nor `trajectory_ids`, or a value cannot be
            stored, such as a reward that is not finite.
    """
    rows = _rows(output)
    of_rows = _uids(output, uids)
    arrays: Arrays = {}
    metrics = encode(_TOTALS, output.get(_TOTALS), arrays)
    tags = {"step_wise": _is_step_wise(output), _TOTALS: metrics}
    groups = []
    for uid, members in groupby(_trajectories(rows), lambda some: of_rows[some[0]["position"]]):
        episodes = [_to_episode(some, step) for some in members]
        groups.append(rdb.EpisodeGroup(TASK, episodes, prompt_uid=uid, tags=tags, extras=arrays))
    return groups


def split(output: GeneratorOutput, uids: Sequence[str]) -> dict[str, GeneratorOutput]:
    """Split an output by prompt. The arguments are those of `to_groups`."""
    rows: dict[str, list[Row]] = {}
    for uid, row in zip(_uids(output, uids), _rows(output), strict=True):
        rows.setdefault(uid, []).append(row)
    metrics = output.get(_TOTALS)
    return {
        uid: {**{name: _column(name, some) for name in _COLUMNS}, _TOTALS: metrics}
        for uid, some in rows.items()
    }


def to_generator_output(groups: Iterable[rdb.EpisodeGroup]) -> GeneratorOutput:
    """Convert stored groups to a generator's output, in order. Logprobs have float32 precision."""
    return concatenate_generator_outputs([to_output(group) for group in groups])


def merge_stepwise_output(output: GeneratorOutput) -> tuple[GeneratorOutput, dict[str, float]]:
    """Merge consecutive turns of each trajectory whose prompt extends the turns before it.

    Returns the same rows as SkyRL's function of this name, and keeps more: rows after the last
    `is_last_step`, times and metrics of environments, and rewards of earlier turns. If each reward
    is one number and an earlier turn has a reward other than 0, rewards become per-token rewards,
    and the reward of a turn is on its last token in the loss.

    Returns:
        The merged output, and counts of rows under the names of SkyRL's metrics.

    Raises:
        UnmergeableOutputError: `trajectory_ids` or `is_last_step` are missing, or the output has
            expert indices or images, which cannot be merged.
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


def _is_step_wise(output: GeneratorOutput) -> bool:
    return output.get("is_last_step") is not None


def _uids(output: GeneratorOutput, uids: Sequence[str] | None) -> Sequence[str]:
    """Return the uid of the prompt of each row. A step-wise output has more rows than prompts."""
    if uids is not None and not _is_step_wise(output):
        return uids
    if output.get("trajectory_ids") is None:
        raise rdb.InvalidInputError("trajectory_ids", "one for each row", None)
    return [one.instance_id for one in output["trajectory_ids"]]


def _tokens_of(row: Row) -> rdb.Turn:
    return rdb.Turn(prompt_ids=row["prompt_token_ids"], response_ids=row["response_ids"])


def _merged(turns: Sequence[Row], *, spread: bool) -> Row:
    """Return one row for turns that each start with all tokens of the turns before it.

    Values are copied unchanged. `spread` converts rewards of turns to per-token rewards.
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
    columns = {name: of for name, of in output.items() if of is not None and name != _TOTALS}
    if _SPLITS in columns:
        columns[_SPLITS] = _in_rows(columns[_SPLITS], number, f"{_SPLITS}.")
    return _in_rows({"position": range(number), **columns}, number)


def _in_rows(columns: Mapping[str, Any], number: int, prefix: str = "") -> list[Row]:
    """Return the values of each row by the names of their columns."""
    for name, of in columns.items():
        if len(of) != number:
            expected = f"one for each of {number} rows"
            raise rdb.InvalidInputError(f"{prefix}{name}", expected, len(of))
    return [{name: of[i] for name, of in columns.items()} for i in range(number)]


def _column(name: str, rows: Sequence[Row]) -> Any:
    """Return a field of all rows in SkyRL's form; None if no row has it."""
    values: list[Any] = [row.get(name) for row in rows]
    if all(value is None for value in values) or (name == _SPLITS and None in values):
        return None
    if name == _SPLITS:
        return {key: [value[key] for value in values] for key in values[0]}
    return values


def _trajectories(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows of each trajectory. The last one can be cut off, without a last step."""
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


def _to_turn(row: Row, step: int | None, arrays: Arrays) -> rdb.Turn:
    rewards = row["rewards"]
    of_tokens = _is_list(rewards)
    mask = row["loss_masks"]
    if _is_list(mask) and all(one in (0, 1) for one in mask):  # numbers of any type
        mask = [bool(one) for one in mask]
    return rdb.Turn(
        prompt_ids=row["prompt_token_ids"],
        response_ids=row["response_ids"],
        loss_mask=mask,
        logprobs=row.get("rollout_logprobs"),
        reward=None if of_tokens else rewards,
        token_rewards=rewards if of_tokens else None,
        policy_version=step,
        finish_reason=row.get("stop_reasons"),
        metadata={name: encode(name, row[name], arrays) for name in _OF_ROWS if name in row},
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
    extras: Arrays = arrays | {name: np.asarray(arrays[name], np.int32) for name in lists}
    return rdb.Episode(
        turns=[_to_turn(row, step, extras) for row in rows],
        extras=extras,
        metadata=metadata,
    )


def to_output(group: rdb.EpisodeGroup) -> GeneratorOutput:
    """Convert one stored group to a generator's output, without metrics that SkyRL computes."""
    rows = []
    for episode in group.episodes:
        repetition = episode.metadata.get("repetition_id")
        which = None if repetition is None else TrajectoryID(str(group.prompt_uid), repetition)
        arrays = {
            name: _array(name, of, name in episode.metadata.get(_LISTS, ()))
            for name, of in episode.extras.items()
            if name in _ARRAYS
        }
        rows += [
            {**_of_turn(turn, episode.extras), "trajectory_ids": which, **arrays}
            for turn in episode.turns
        ]
    output = {name: _column(name, rows) for name in _COLUMNS}
    return {**output, _TOTALS: decode(group.tags[_TOTALS], group.extras)}


def _array(name: str, array: Any, is_list: bool) -> Any:
    """Restore an array: expert indices are an array or a list, all others are tensors."""
    if is_list:
        return array.tolist()
    return np.array(array) if name == _EXPERTS else to_tensor(array)


def _of_turn(turn: rdb.Turn, extras: Mapping[str, Any]) -> Row:
    rewards, logprobs = turn.token_rewards, turn.logprobs
    return {
        "prompt_token_ids": turn.prompt_ids.tolist(),
        "response_ids": turn.response_ids.tolist(),
        "rewards": turn.reward if rewards is None else rewards.tolist(),
        "loss_masks": turn.loss_mask.astype(int).tolist(),
        "stop_reasons": turn.finish_reason,
        "rollout_logprobs": None if logprobs is None else logprobs.tolist(),
        **{name: decode(value, extras) for name, value in turn.metadata.items()},
    }
