"""Conversion of XTuner's rollout states to episodes, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from xtuner.v1.data_proto import rl_data
from xtuner.v1.data_proto.rl_data import RolloutState

import replaydb as rdb
from replaydb.integrations.values import FLOAT32_MAX, create, from_extras, to_extras, to_reward

#: The extra of an episode with the state as JSON, without the fields that columns hold.
_STATE = "xtuner"
#: Key of the JSON with the names of fields that follow from the tokens. No field has this name.
_DERIVED = "derived fields"
#: XTuner's own data classes and enumerations, which values can contain.
_CLASSES: dict[str, type] = {
    name: value
    for name, value in vars(rl_data).items()
    if isinstance(value, type)
    and issubclass(value, BaseModel | Enum)
    and value.__module__ == rl_data.__name__
}
#: Range of token ids and policy versions in a column.
_LEAST, _MOST = -(2**31) + 1, 2**31 - 1
#: Fields that become per-token columns of the response, if they have one value per token.
_PER_TOKEN: dict[str, tuple[str, type, float, float]] = {
    "logprobs": ("logprobs", float, -FLOAT32_MAX, FLOAT32_MAX),
    "response_mask": ("loss_mask", int, 0, 1),
    "response_model_steps": ("policy_version", int, _LEAST, _MOST),
}


def to_episode(state: RolloutState, version: int) -> rdb.Episode:
    """Convert a state to an episode.

    Fields become columns if the columns preserve them exactly. All others are stored as JSON and
    arrays, and so are logprobs beyond float32, the precision of their column.

    Args:
        state: The state.
        version: Policy version of the episode if the state has no model steps for its tokens.

    Raises:
        InvalidInputError: It is not a `RolloutState`, or contains an object that cannot be stored.
    """
    fields, columns = _fields(state), {}
    for name in ("prompt_ids", "response_ids"):
        if _is_column(fields[name], int, _LEAST, _MOST):
            columns[name] = fields.pop(name)
    derived = [
        name
        for name, values in _derived(columns).items()
        if _is_column(fields.get(name), int, _LEAST, _MOST) and fields[name] == values
    ]
    if derived:
        fields = {name: fields[name] for name in fields if name not in derived}
        fields[_DERIVED] = derived
    size = len(columns.get("response_ids", ()))
    for name, (column, kind, least, most) in _PER_TOKEN.items():
        if size and _is_column(fields[name], kind, least, most) and len(fields[name]) == size:
            columns[column] = fields[name]
            if name != "logprobs" or _is_float32(fields[name]):
                del fields[name]
    if "policy_version" not in columns:
        steps = fields["response_model_steps"]
        oldest = int(min(steps)) if steps is not None and len(steps) else version
        columns["policy_version"] = min(max(oldest, _LEAST), _MOST)
    score = state.reward.get("score") if isinstance(state.reward, dict) else None
    return rdb.Episode(
        **{"prompt_ids": [], "response_ids": []} | columns,
        reward=to_reward(score),
        finish_reason=state.finish_reason,
        extras=to_extras("state", fields, _STATE, _CLASSES),
    )


def fingerprint(states: Iterable[RolloutState]) -> str:
    """Return a digest of states, without their staleness, which changes over time."""
    digest = hashlib.sha256()
    for state in states:
        fields = _fields(state)
        del fields["seq_staleness"]
        for array in to_extras("state", fields, _STATE, _CLASSES).values():
            digest.update(f"{array.dtype}{tuple(array.shape)}".encode())
            if isinstance(array, torch.Tensor):
                array = array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def to_state(episode: rdb.Episode) -> RolloutState:
    """Convert an episode of `to_episode` back to its state.

    Objects of Ray references are put into Ray again, if Ray is running.
    """
    fields = from_extras(episode.extras, _STATE, _CLASSES)
    start = episode.prompt_length
    found: dict[str, Any] = {
        "prompt_ids": episode.prompt_ids,
        "response_ids": episode.response_ids,
        "response_mask": episode.loss_mask[start:].astype(int),
    }
    if episode.logprobs is not None:
        found["logprobs"] = episode.logprobs[start:]
    if isinstance(episode.policy_version, np.ndarray):
        found["response_model_steps"] = episode.policy_version[start:]
    columns = {name: values.tolist() for name, values in found.items() if name not in fields}
    columns |= {name: [*_derived(columns)[name]] for name in fields.pop(_DERIVED, ())}
    state: RolloutState = create(RolloutState, columns | fields)
    return state


def _derived(columns: dict[str, Any]) -> dict[str, list[int]]:
    """Return the values that fields often have, by name, if prompt and response are columns."""
    if not {"prompt_ids", "response_ids"} <= columns.keys():
        return {}
    prompt = columns["prompt_ids"]
    return {"tokens": prompt, "input_ids": prompt + columns["response_ids"]}


def _fields(state: RolloutState) -> dict[str, Any]:
    if type(state) is not RolloutState:  # fields of a subclass could not be restored
        raise rdb.InvalidInputError("items", "states of the class RolloutState", repr(type(state)))
    return dict(state)


def _is_column(values: Any, kind: type, least: float, most: float) -> bool:
    """Whether a column preserves the values exactly."""
    if type(values) is not list or not set(map(type, values)) <= {kind}:
        return False
    return not values or bool(least <= min(values) and max(values) <= most)


def _is_float32(values: list[float]) -> bool:
    exact = np.array(values)
    return bool((exact.astype(np.float32) == exact).all())
