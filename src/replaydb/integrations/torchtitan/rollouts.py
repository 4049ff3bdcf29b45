"""Conversion of torchtitan's rollouts and training samples to groups and episodes, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torchtitan.experiments.rl.observability import metrics as m
from torchtitan.experiments.rl.rollout import Rollout, RolloutGroup, RolloutStatus, RolloutTurn
from torchtitan.experiments.rl.types import RolloutTurnID, TrainingSample

import replaydb as rdb
from replaydb.integrations.values import Arrays, decode, encode
from replaydb.training import merge_turns

#: torchtitan's metrics and their types, which values can contain.
_METRICS = {
    kind.__qualname__: kind for kind in map(vars(m).get, m.__all__) if isinstance(kind, type)
}
#: The task of all groups: mixing tasks is left to the rollouter.
TASK = "rollouts"


def to_group(
    group: RolloutGroup, *, prompt: str | Iterable[Mapping[str, Any]] | None = None
) -> rdb.EpisodeGroup:
    """Convert a rollout group to a group with one episode per rollout and one turn per turn.

    A group without rollouts is `failed`. The tokens of a turn get its oldest policy version, except
    the last, which gets its newest: torchtitan does not report where the weights changed.

    Args:
        group: The group, as the rollouter returns it.
        prompt: Stored with the group, to generate it again.

    Raises:
        InvalidInputError: A reward or an advantage is not finite, a message or a reward contains a
            value that `replaydb.integrations.values` cannot encode, or a metric does not have one
            of torchtitan's types.
    """
    arrays: Arrays = {}
    metrics = encode("metrics", group.metrics, arrays, _METRICS)
    return rdb.EpisodeGroup(
        TASK,
        [_to_episode(rollout) for rollout in group.rollouts],
        group_uid=str(group.group_id),
        status="completed" if group.rollouts else "failed",
        tags={"group_id": group.group_id, "metrics": metrics},
        prompt=prompt,
        extras=arrays,
    )


def to_rollout_group(group: rdb.EpisodeGroup) -> RolloutGroup:
    """Convert a stored group to a rollout group. Logprobs have float32 precision."""
    group_id = group.tags["group_id"]
    return RolloutGroup(
        group_id=group_id,
        rollouts=[_to_rollout(episode, group_id) for episode in group.episodes],
        metrics=decode(group.tags.get("metrics", []), group.extras, _METRICS),
    )


def to_training_samples(group: rdb.EpisodeGroup) -> list[TrainingSample]:
    """Return the training rows of a group, as torchtitan's `rollout_to_training_samples` does.

    There are two differences. The lowest version of a row is the lowest of all its turns;
    torchtitan takes the version of the first turn. Rows without tokens in the loss are left out;
    torchtitan raises `ValueError` for them.

    Raises:
        InvalidInputError: An episode has no advantage.
    """
    samples = []
    for episode in group.episodes:
        for row in merge_turns(episode)[0]:
            if row.episode.num_loss_tokens:
                sample = to_training_sample(row.episode, turn_id=row.first_turn)
                turns = [episode.turns[i] for i in row.turns]
                newest = [_versions_of(turn)[1] for turn in turns if len(turn.response_ids)]
                known = [version for version in newest if version is not None]
                samples.append(replace(sample, max_policy_version=max(known, default=None)))
    return samples


def to_training_sample(row: rdb.Episode, *, turn_id: int = 0) -> TrainingSample:
    """Convert an episode to a training row.

    Each token in the loss gets the advantage of the episode, or its own if it has one.

    Args:
        row: An episode without turns, of `to_group` or `from_training_sample`.
        turn_id: Turn of the rollout with which the row starts, if the metadata does not contain it.

    Raises:
        InvalidInputError: The episode has no advantage.
    """
    advantages = row.token_extras.get("token_advantages")
    if advantages is None:
        if row.advantage is None:
            raise rdb.InvalidInputError("advantage", "a number", None)
        advantages = np.where(row.loss_mask, row.advantage, 0.0)
    logprobs = np.zeros(row.num_tokens) if row.logprobs is None else row.logprobs
    its = {"turn_id": turn_id, **row.metadata}
    return TrainingSample(
        min_policy_version=row.min_policy_version,
        max_policy_version=row.max_policy_version,
        rollout_id=RolloutTurnID(its["group_id"], its["rollout_id"], its["turn_id"]),
        token_ids=row.token_ids.tolist(),
        loss_mask=row.loss_mask.tolist(),
        logprobs=logprobs.tolist(),
        advantage=np.asarray(advantages).tolist(),
    )


def from_training_sample(sample: TrainingSample) -> rdb.Episode:
    """Convert a row to an episode, with its token advantages as the extra `token_advantages`."""
    return rdb.Episode(
        token_ids=sample.token_ids,
        loss_mask=sample.loss_mask,
        logprobs=sample.logprobs,
        policy_version=_versions(sample, len(sample.token_ids)),
        token_extras={"token_advantages": np.asarray(sample.advantage, np.float64)},
        metadata=asdict(sample.rollout_id),
    )


def _to_episode(rollout: Rollout) -> rdb.Episode:
    arrays: Arrays = {}
    its = {
        "group_id": rollout.group_id,
        "rollout_id": rollout.rollout_id,
        "status": rollout.status.value,
        "reward_breakdown": encode("reward_breakdown", rollout.reward_breakdown, arrays),
    }
    messages: list[Any] = []
    turns = []
    for turn in rollout.turns:
        metadata = {name: encode(name, getattr(turn, name), arrays, _METRICS) for name in _OF_TURNS}
        turns.append(_to_turn(turn, metadata | _new_messages(metadata, messages)))
        messages = _conversation(metadata)
    tokens: dict[str, Any] = {"turns": turns} if turns else {"prompt_ids": [], "response_ids": []}
    return rdb.Episode(
        **tokens, reward=rollout.reward, advantage=rollout.advantage, metadata=its, extras=arrays
    )


def _to_rollout(episode: rdb.Episode, group_id: int) -> Rollout:
    rollout_id = episode.metadata["rollout_id"]
    messages: list[Any] = []
    turns = []
    for position, turn in enumerate(episode.turns):
        its: dict[str, Any] = turn.metadata
        if repeated := its.get(_REPEATED, 0):
            its = its | {"prompt_messages": messages[:repeated] + its["prompt_messages"]}
        which = RolloutTurnID(group_id, rollout_id, position)
        turns.append(_to_rollout_turn(turn, which, its, episode.extras))
        messages = _conversation(its)
    return Rollout(
        group_id=group_id,
        rollout_id=rollout_id,
        turns=turns,
        status=RolloutStatus(episode.metadata["status"]),
        reward=episode.reward,
        reward_breakdown=decode(episode.metadata["reward_breakdown"], episode.extras),
        advantage=episode.advantage,
    )


#: Fields of a turn that are stored as metadata.
_OF_TURNS = ("prompt_messages", "completion_message", "env_messages", "env_rewards", "metrics")


#: Metadata key of a turn: how many first messages of its prompt the turn before ended with.
_REPEATED = "repeated_messages"


def _conversation(metadata: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a turn: those of its prompt, the completion, and the reply."""
    prompt, reply = metadata["prompt_messages"], metadata["env_messages"]
    if not (isinstance(prompt, list) and isinstance(reply, list)):
        return []
    return [*prompt, metadata["completion_message"], *reply]


def _new_messages(metadata: Mapping[str, Any], before: list[Any]) -> dict[str, Any]:
    """Return the metadata of a prompt without the messages that it repeats.

    The messages of each turn are the whole conversation so far.
    """
    prompt = metadata["prompt_messages"]
    repeated = 0
    if isinstance(prompt, list):
        for one, other in zip(prompt, before, strict=False):
            if _text(one) != _text(other):  # 1, 1.0 and True are equal
                break
            repeated += 1
    return {"prompt_messages": prompt[repeated:], _REPEATED: repeated} if repeated else {}


def _text(message: Any) -> str:
    # Not ASCII: escaped surrogates would be equal to the character that they are half of.
    return json.dumps(message, ensure_ascii=False)


def _to_turn(turn: RolloutTurn, metadata: dict[str, Any]) -> rdb.Turn:
    if len(turn.completion_token_ids) < 2:  # no token has the newest version
        metadata["max_policy_version"] = turn.max_policy_version
    return rdb.Turn(
        prompt_ids=turn.prompt_token_ids,
        response_ids=turn.completion_token_ids,
        logprobs=turn.completion_logprobs,
        policy_version=_versions(turn, len(turn.completion_token_ids)),
        metadata=metadata,
    )


def _to_rollout_turn(
    turn: rdb.Turn,
    rollout_id: RolloutTurnID,
    metadata: Mapping[str, Any],
    arrays: Mapping[str, Any],
) -> RolloutTurn:
    lowest, highest = _versions_of(turn)
    return RolloutTurn(
        rollout_id=rollout_id,
        prompt_token_ids=turn.prompt_ids.tolist(),
        completion_token_ids=turn.response_ids.tolist(),
        completion_logprobs=[] if turn.logprobs is None else turn.logprobs.tolist(),
        min_policy_version=lowest,
        max_policy_version=highest,
        **{name: decode(metadata[name], arrays, _METRICS) for name in _OF_TURNS},
    )


def _versions(of: RolloutTurn | TrainingSample, size: int) -> Any:
    """Return the version of each token: the oldest, and the newest for the last token."""
    if of.min_policy_version == of.max_policy_version or size < 2:
        return of.min_policy_version
    return [of.min_policy_version] * (size - 1) + [of.max_policy_version]


def _versions_of(turn: rdb.Turn) -> tuple[int | None, int | None]:
    """Return the oldest and the newest version of a turn."""
    versions = turn.policy_version
    if isinstance(versions, np.ndarray):
        return int(versions.min()), int(versions.max())
    return versions, turn.metadata.get("max_policy_version", versions)
