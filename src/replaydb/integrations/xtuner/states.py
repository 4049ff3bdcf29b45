"""XTuner's rollout states as episodes, and back."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch
from xtuner.v1.data_proto.rl_data import RolloutState

import replaydb as rdb
from replaydb.errors import InvalidInputError

#: The extra of an episode that has the state, but what is in columns, as JSON.
_STATE = "xtuner"
#: Keys of what stands in that JSON for an array or tensor, by the name of its extra, and for what
#: a reference of Ray refers to.
_ARRAY, _TENSOR, _REF = "replaydb.array", "replaydb.tensor", "replaydb.ref"
#: Fields that become columns of tokens of the response, where they have one value for each.
_PER_TOKEN = {
    "logprobs": "logprobs",
    "response_mask": "loss_mask",
    "response_model_steps": "policy_version",
}


def to_episode(state: RolloutState, version: int) -> rdb.Episode:
    """A state as an episode.

    References of Ray are resolved: what they refer to dies with the cluster.

    Args:
        state: The state.
        version: Its policy version where it does not say which model made its tokens.

    Raises:
        InvalidInputError: It holds what is neither JSON nor an array.
    """
    fields: dict[str, Any] = state.model_dump(warnings=False)
    response, columns = fields["response_ids"] or [], {}
    for name, column in _PER_TOKEN.items():
        values = fields[name]
        if response and values is not None and len(values) == len(response):
            columns[column] = fields.pop(name)
    if "policy_version" not in columns:
        steps = fields["response_model_steps"]
        columns["policy_version"] = min(steps) if steps else version
    for name in ("prompt_ids", "response_ids"):
        if fields[name] is not None:
            columns[name] = fields.pop(name)
    arrays: dict[str, Any] = {}
    rest = json.dumps(_packed(fields, arrays)).encode()
    score = (state.reward or {}).get("score")
    return rdb.Episode(
        **{"prompt_ids": [], "response_ids": []} | columns,
        reward=score if _is_reward(score) else None,
        finish_reason=state.finish_reason,
        extras=arrays | {_STATE: np.frombuffer(rest, np.uint8)},
    )


def fingerprint(states: Iterable[RolloutState]) -> str:
    """A name of what states hold, but for their staleness, which changes by itself."""
    digest = hashlib.sha256()
    for state in states:
        arrays: dict[str, Any] = {}
        fields = state.model_dump(warnings=False, exclude={"seq_staleness"})
        digest.update(json.dumps(_packed(fields, arrays)).encode())
        for array in arrays.values():
            digest.update(f"{array.dtype}{tuple(array.shape)}".encode())
            if isinstance(array, torch.Tensor):
                array = array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def _is_reward(score: Any) -> bool:
    """Whether it can be the reward of an episode; others are in the state alone."""
    return isinstance(score, int | float) and abs(score) <= float(np.finfo(np.float32).max)


def to_state(episode: rdb.Episode) -> RolloutState:
    """The state that `to_episode` was given; its logprobs are float32.

    What references referred to is put into Ray again, where that runs.
    """
    fields = json.loads(np.asarray(episode.extras[_STATE]).tobytes())
    fields = _unpacked(fields, episode.extras)
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
    return RolloutState.model_validate(columns | fields)


def _packed(value: Any, arrays: dict[str, Any]) -> Any:
    """A value as JSON; its arrays go to `arrays`."""
    match value:
        case Enum():
            return _packed(value.value, arrays)
        case None | bool() | int() | float() | str():
            return value
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _packed(each, arrays) for key, each in value.items()}
        case list() | tuple():
            return [_packed(each, arrays) for each in value]
        case np.generic():
            return value.item()
        case np.ndarray() | torch.Tensor():
            name = f"{_STATE}_{len(arrays)}"
            arrays[name] = value
            return {_TENSOR if isinstance(value, torch.Tensor) else _ARRAY: name}
    if _is_ref(value):
        return {_REF: _packed(sys.modules["ray"].get(value), arrays)}
    raise InvalidInputError("item", "JSON, arrays and tensors", repr(value))


def _unpacked(value: Any, arrays: dict[str, Any]) -> Any:
    match value:
        case {"replaydb.array": str(name)}:
            return np.array(arrays[name])
        case {"replaydb.tensor": str(name)}:
            return torch.as_tensor(arrays[name]).clone()
        case {"replaydb.ref": inner}:
            ray = sys.modules.get("ray")
            found = _unpacked(inner, arrays)
            return ray.put(found) if ray is not None and ray.is_initialized() else found
        case dict():
            return {key: _unpacked(each, arrays) for key, each in value.items()}
        case list():
            return [_unpacked(each, arrays) for each in value]
    return value


def _is_ref(value: Any) -> bool:
    ray = sys.modules.get("ray")  # or nobody can have made a reference
    return ray is not None and isinstance(value, ray.ObjectRef)
