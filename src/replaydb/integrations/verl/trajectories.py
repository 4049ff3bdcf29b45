"""Conversion of TransferQueue trajectories to episodes, and back, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from replaydb import Episode, EpisodeGroup, InvalidInputError
from replaydb.integrations.values import (
    Arrays,
    decode,
    encode,
    from_extras,
    to_extras,
    to_reward,
    to_tensor,
)
from replaydb.util.escapes import escape

Fields = dict[str, Any]
#: The task of groups whose `data_source` cannot be the name of a task.
TASK = "verl"
#: The extra of a group with the fields that all its trajectories have in common, as JSON.
_COMMON = "verl"
#: The field with the experts of each token.
_EXPERTS = "routed_experts"


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
    common = _common({key: fields for key, (fields, _) in trajectories.items()})
    return EpisodeGroup(
        next(filter(_is_name, sources), TASK),
        [to_episode(key, *one, tag, common) for key, one in trajectories.items()],
        group_uid=uid,
        prompt_uid=tag.get("prompt_uid"),
        tags=tag,
        extras=to_extras("fields", common, _COMMON),
    )


def to_episode(
    key: str,
    fields: Fields,
    tag: Mapping[str, Any],
    prompt_tag: Mapping[str, Any],
    common: Collection[str] = (),
) -> Episode:
    """Convert a trajectory to an episode.

    Its policy version is `min_global_steps`, the lowest that generated a token. If the agent loop
    does not report it, it is the version of the step that requested the prompt, which is not
    higher. Fields in `common` are left out.

    Raises:
        InvalidInputError: `prompts` or `responses` are missing, or a field cannot be stored.
    """
    for name in ("prompts", "responses"):
        if not isinstance(fields.get(name), torch.Tensor):
            raise InvalidInputError(f"{key}.{name}", "a tensor", type(fields.get(name)).__name__)
    scores, step = fields.get("rm_scores"), prompt_tag.get("global_steps")
    mask = fields.get("response_mask")
    version = tag.get("min_global_steps")
    reward = None if scores is None else to_reward(scores.sum(dtype=torch.float64).item())
    core: dict[str, Any] = {
        "prompt_ids": fields["prompts"],
        "response_ids": fields["responses"],
        "loss_mask": mask if mask is None else mask != 0,
        "logprobs": fields.get("rollout_log_probs"),
        "reward": reward,
        "policy_version": max(step - 1, 0) if version is None and step is not None else version,
        "token_extras": _token_extras(fields, reward),
    }
    usual = _usual(Episode(**core))
    given = sorted(name for name, value in fields.items() if _same(value, usual.get(name)))
    arrays: Arrays = {}
    others = {
        name: encode(f"{key}.{name}", value, arrays)
        for name, value in fields.items()
        if name not in given and name not in common
    }
    stored_tag = encode(f"{key}.tag", dict(tag), arrays)
    original = {"key": key, "tag": stored_tag, "usual": given, "fields": others}
    return Episode(**core, extras=arrays, metadata={"verl": original})


def tag_of(episode: Episode) -> Any:
    """Return the tag of a trajectory."""
    return decode(episode.metadata["verl"]["tag"], episode.extras)


def to_fields(group: EpisodeGroup, episode: Episode) -> Fields:
    """Return the fields of a trajectory of a group.

    An episode that does not come from verl has the standard fields, with its reward at its last
    token.
    """
    original, usual = episode.metadata.get("verl"), _usual(episode)
    if original is None:
        return {**usual, "uid": group.group_uid}
    others = {name: decode(value, episode.extras) for name, value in original["fields"].items()}
    common = from_extras(group.extras, _COMMON) if _COMMON in group.extras else {}
    return {name: usual[name] for name in original["usual"]} | others | common


def _is_name(source: Any) -> TypeGuard[str]:
    """Whether a `data_source` can be the name of a task; it is stored as a field in any case."""
    return isinstance(source, str) and 0 < len(source) <= 255 and escape(source) == source


def _common(trajectories: Mapping[str, Fields]) -> Fields:
    """Return the fields without arrays that all trajectories have in common, such as the prompt."""
    texts: list[dict[str, str]] = []
    for key, fields in trajectories.items():
        texts.append({})
        for name, value in fields.items():
            arrays: Arrays = {}
            stored = encode(f"{key}.{name}", value, arrays)
            if not arrays:
                texts[-1][name] = json.dumps(stored, ensure_ascii=False)
    return {
        name: fields[name]
        for name, text in texts[0].items()
        if all(one.get(name) == text for one in texts)
    }


def _token_extras(fields: Fields, reward: float | None) -> Fields:
    """Return the arrays with a value for each token, without scores that follow from the reward."""
    extras = {}
    scores, experts = fields.get("rm_scores"), fields.get(_EXPERTS)
    if scores is not None:
        usual = _scores(len(fields["responses"]), reward)
        # 0.0 equals -0.0
        if not _same(scores, usual) or not torch.equal(scores.signbit(), usual.signbit()):
            extras["rm_scores"] = scores
    num_tokens = len(fields["prompts"]) + len(fields["responses"])
    if isinstance(experts, torch.Tensor) and experts.shape[:1] == (num_tokens,):
        extras[_EXPERTS] = experts
    return extras


def _scores(length: int, reward: float | None) -> torch.Tensor:
    """Return the reward at the last token of a response, and 0 at all others."""
    scores = torch.zeros(length)
    scores[-1:] = 0.0 if reward is None else reward
    return scores


def _usual(episode: Episode) -> Fields:
    """Return the standard fields that verl derives from prompt, response, mask and logprobs."""
    prompt, extras = episode.prompt_length, episode.token_extras
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
    if "rm_scores" in extras:
        fields["rm_scores"] = to_tensor(extras["rm_scores"][prompt:])
    elif episode.reward is not None:
        fields["rm_scores"] = _scores(len(fields["responses"]), episode.reward)
    if _EXPERTS in extras:
        fields[_EXPERTS] = to_tensor(extras[_EXPERTS])
    return fields


def _same(one: Any, other: torch.Tensor | None) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and other is not None
        and one.dtype == other.dtype
        and torch.equal(one, other)
    )
