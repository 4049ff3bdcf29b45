"""Conversion of a sample to the columns of a turn, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import replaydb as rdb
from replaydb.domain.episodes.arrays import to_array, to_int32
from replaydb.integrations.values import to_reward, to_tensor, uniform

Sample = Mapping[str, Any]
_TEACHER = "teacher_log_probs"
_EXPERTS = "rollout_routed_experts"
_TOP_P, _OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
#: Fields that are lists, arrays or tensors.
ARRAYS = (_EXPERTS, _TOP_P, _OFFSETS)
#: By the type of such a field: how to restore it.
_FORMS: dict[str, Callable[[Any], Any]] = {
    "list": lambda array: array.tolist(),
    "ndarray": np.array,
    "Tensor": to_tensor,
}
#: What SGLang reported, by the status that slime derives from it.
_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort"}


def to_turn(where: str, sample: Sample, kinds: dict[str, Any], reward_key: str | None) -> rdb.Turn:
    """Convert a sample. `kinds`: dtypes and shapes of the token extras of its rollout so far."""
    tokens = to_int32(f"{where}.tokens", sample.get("tokens", ()))
    size = sample.get("response_length", 0)
    if type(size) is not int or not 0 <= size <= len(tokens):
        expected = f"an integer from 0 to {len(tokens)}, the number of tokens"
        raise rdb.InvalidInputError(f"{where}.response_length", expected, repr(size))
    reward = sample.get("reward")
    try:
        return rdb.Turn(
            prompt_ids=tokens[: len(tokens) - size],
            response_ids=tokens[len(tokens) - size :],
            loss_mask=[0] * size if sample.get("remove_sample") else sample.get("loss_mask"),
            logprobs=sample.get("rollout_log_probs"),
            reward=to_reward(reward.get(reward_key) if isinstance(reward, Mapping) else reward),
            policy_version=_version(sample.get("weight_versions")),
            finish_reason=_REASONS.get(str(sample.get("status"))),
            token_extras=uniform(_extras(sample, len(tokens), size), kinds),
        )
    except rdb.InvalidInputError as error:
        name = "rollout_log_probs" if error.field == "logprobs" else error.field
        raise rdb.InvalidInputError(f"{where}.{name}", error.expected, error.actual) from error


def to_fields(turn: rdb.Turn, prompt: Any, forms: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a sample that its turn and the prompt of its group have."""
    size, extras = len(turn.response_ids), turn.token_extras
    arrays: dict[str, Any] = {}
    if _EXPERTS in extras:
        arrays[_EXPERTS] = extras[_EXPERTS]
    if _TOP_P in extras:
        kept = extras[_TOP_P][turn.num_tokens - size :]
        arrays |= {_TOP_P: kept.values, _OFFSETS: kept.offsets.astype(np.int32)}
    fields = {
        "prompt": prompt,
        "tokens": turn.prompt_ids.tolist() + turn.response_ids.tolist(),
        "response_length": size,
        "loss_mask": turn.loss_mask.astype(int).tolist(),
        "reward": turn.reward,
        "rollout_log_probs": None if turn.logprobs is None else turn.logprobs.tolist(),
        **{name: _FORMS[forms[name]](array) for name, array in arrays.items()},
    }
    if _TEACHER in extras:
        fields[_TEACHER] = extras[_TEACHER][turn.num_tokens - size :].tolist()
    return fields


def _version(versions: Any) -> int | None:
    """Return the lowest number of the weight versions of a sample; None if none is a number."""
    several = versions if isinstance(versions, list) else []
    return min((int(one) for one in several if str(one).isdecimal()), default=None)


def _extras(sample: Sample, length: int, size: int) -> dict[str, Any]:
    """Return the token extras [T - 1, ...] and [R, ...] of a sample of T tokens, R of response."""
    found: dict[str, Any] = {}
    teacher = sample.get(_TEACHER)
    if isinstance(teacher, list) and len(teacher) == size > 0 and {*map(type, teacher)} == {float}:
        found[_TEACHER] = np.array(teacher)
    experts = _array(sample.get(_EXPERTS))
    # With one token before the response, they would be taken as values of the response.
    if experts is not None and experts.shape[:1] == (length - 1,) and length - size != 1 < length:
        found[_EXPERTS] = experts
    ids, offsets = _array(sample.get(_TOP_P)), _array(sample.get(_OFFSETS))
    if ids is not None and ids.ndim == 1 and _is_offsets(offsets, size, len(ids)):
        found[_TOP_P] = rdb.Ragged(ids, np.diff(offsets))
    return found


def _is_offsets(offsets: Any, size: int, total: int) -> bool:
    """Whether an array has the positions [R + 1] of the first of `total` ids of each token."""
    if not isinstance(offsets, np.ndarray) or offsets.dtype.kind != "i":
        return False
    is_whole = size > 0 and offsets.shape == (size + 1,)
    return is_whole and bool(
        offsets[0] == 0 and offsets[-1] == total and (np.diff(offsets) >= 0).all()
    )


def _array(value: Any) -> Any:
    """Return a list, array or tensor as an array; None for others, and for ragged lists."""
    try:
        return to_array("", value) if type(value).__name__ in _FORMS else None
    except rdb.InvalidInputError:
        return None
