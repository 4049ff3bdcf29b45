"""Conversion of TransferQueue trajectories to episodes, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from replaydb import Episode, EpisodeGroup, InvalidInputError
from replaydb.integrations.values import decode, encode, to_reward, to_tensor
from replaydb.util.escapes import escape

Fields = dict[str, Any]
#: The task of groups whose `data_source` cannot be the name of a task.
TASK = "verl"


def rows(table: TensorDict) -> list[Fields]:
    """Return the rows of a TensorDict. Ragged fields keep the length of each row."""
    found: list[Fields] = [{} for _ in range(len(table))]
    for name, column in table.items():
        cells: Sequence[Any]
        if isinstance(column, torch.Tensor):
            cells = column.unbind()
        elif isinstance(column, NonTensorData) and not column.shape:
            cells = [column.data] * len(found)
        else:
            cells = [column[i].data for i in range(len(found))]
        for row, cell in zip(found, cells, strict=True):
            row[name] = cell
    return found


def to_group(
    uid: str, trajectories: Mapping[str, tuple[Fields, Mapping[str, Any]]], tag: Mapping[str, Any]
) -> EpisodeGroup:
    """Convert a prompt's trajectories (by key: fields and tag) to a group with the prompt's tag."""
    sources = [fields.get("data_source") for fields, _ in trajectories.values()]
    return EpisodeGroup(
        next(filter(_is_name, sources), TASK),
        [to_episode(key, *one, tag) for key, one in trajectories.items()],
        group_uid=uid,
        prompt_uid=tag.get("prompt_uid"),
        tags=tag,
    )


def to_episode(
    key: str, fields: Fields, tag: Mapping[str, Any], prompt_tag: Mapping[str, Any]
) -> Episode:
    """Convert a trajectory to an episode.

    Its policy version is `min_global_steps`, the lowest that generated a token. If the agent loop
    does not report it, it is the version of the step that requested the prompt, which is not
    higher.

    Raises:
        InvalidInputError: `prompts` or `responses` are missing, or a field cannot be stored.
    """
    for name in ("prompts", "responses"):
        if not isinstance(fields.get(name), torch.Tensor):
            raise InvalidInputError(f"{key}.{name}", "a tensor", type(fields.get(name)).__name__)
    scores, step = fields.get("rm_scores"), prompt_tag.get("global_steps")
    mask = fields.get("response_mask")
    version = tag.get("min_global_steps")
    core: dict[str, Any] = {
        "prompt_ids": fields["prompts"],
        "response_ids": fields["responses"],
        "loss_mask": mask if mask is None else mask != 0,
        "logprobs": fields.get("rollout_log_probs"),
        "reward": None if scores is None else to_reward(scores.sum(dtype=torch.float64).item()),
        "policy_version": max(step - 1, 0) if version is None and step is not None else version,
        "token_extras": {} if scores is None else {"rm_scores": scores},
    }
    usual = _usual(Episode(**core))
    given = sorted(name for name, value in fields.items() if _same(value, usual.get(name)))
    arrays: dict[str, Any] = {}
    others = {
        name: encode(f"{key}.{name}", value, arrays)
        for name, value in fields.items()
        if name not in given
    }
    stored_tag = encode(f"{key}.tag", dict(tag), arrays)
    original = {"key": key, "tag": stored_tag, "usual": given, "fields": others}
    return Episode(**core, extras=arrays, metadata={"verl": original})


def tag_of(episode: Episode) -> Any:
    """Return the tag of a trajectory."""
    return decode(episode.metadata["verl"]["tag"], episode.extras)


def to_fields(uid: str, episode: Episode) -> Fields:
    """Return the fields of a trajectory.

    An episode that does not come from verl has the standard fields, with its reward at its last
    token.
    """
    original, usual = episode.metadata.get("verl"), _usual(episode)
    if original is not None:
        others = {name: decode(value, episode.extras) for name, value in original["fields"].items()}
        return {name: usual[name] for name in original["usual"]} | others
    if episode.reward is not None:
        usual["rm_scores"] = torch.zeros(len(usual["responses"]))
        usual["rm_scores"][-1:] = episode.reward
    return {**usual, "uid": uid}


def _is_name(source: Any) -> TypeGuard[str]:
    """Whether a `data_source` can be the name of a task; it is stored as a field in any case."""
    return isinstance(source, str) and 0 < len(source) <= 255 and escape(source) == source


def _usual(episode: Episode) -> Fields:
    """Return the standard fields that verl derives from prompt, response, mask and logprobs."""
    prompt = episode.prompt_length
    tokens = to_tensor(episode.token_ids.astype(np.int64))
    mask = to_tensor(episode.loss_mask[prompt:].astype(np.int64))
    fields = {
        "prompts": tokens[:prompt],
        "responses": tokens[prompt:],
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "input_ids": tokens.clone(),
        "position_ids": torch.arange(len(tokens)),
    }
    if episode.logprobs is not None:
        fields["rollout_log_probs"] = to_tensor(episode.logprobs[prompt:])
    if "rm_scores" in episode.token_extras:
        fields["rm_scores"] = to_tensor(episode.token_extras["rm_scores"][prompt:])
    return fields


def _same(one: Any, other: torch.Tensor | None) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and other is not None
        and one.dtype == other.dtype
        and torch.equal(one, other)
    )
