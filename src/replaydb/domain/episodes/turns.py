"""Turn: one step of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from replaydb.domain import checks
from replaydb.domain.episodes.arrays import (
    Array,
    ArrayLike,
    Versions,
    named_arrays,
    same,
    spread,
    spread_named,
    to_bool,
    to_float32,
    to_int32,
    to_logprobs,
    to_numpy,
    to_versions,
)
from replaydb.errors import InvalidInputError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Turn:
    """One observation -> action step of an episode. Its arrays are read-only copies.

    Attributes:
        prompt_ids: Context tokens, int32 [P].
        response_ids: Action tokens, int32 [R].
        loss_mask: Which action tokens to train on, bool [R]. Default: all.
        logprobs: Behaviour logprobs of the action tokens, float32 [R], or None if not recorded.
            None is not the same as empty. NaN and -inf as in `Episode`.
        reward: Reward of this step, finite, or None. Bools as in `Episode`. Default: the sum of
            `token_rewards`. If you pass both, they must agree.
        token_rewards: Reward of each action token, finite float32 [R], or None if only the step has
            a reward. Integers and bools are converted.
        policy_version: Policy version that acted, or int32 [R] with one per action token; None if
            unknown.
        finish_reason: Why the action ended, as reported by the inference engine.
        token_extras: Arrays [P + R, ...] by name. Pass [P + R, ...] or [R, ...]; with [R, ...] the
            prompt has zeros. See `Episode`.
        metadata: JSON object.

    Raises:
        InvalidInputError: An argument has the wrong shape, dtype or value.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32] | None
    reward: float | None
    token_rewards: NDArray[np.float32] | None
    policy_version: Versions
    finish_reason: str | None
    token_extras: dict[str, Array]
    metadata: dict[str, Any]

    def __init__(
        self,
        *,
        prompt_ids: ArrayLike,
        response_ids: ArrayLike,
        loss_mask: ArrayLike | None = None,
        logprobs: ArrayLike | None = None,
        reward: float | None = None,
        token_rewards: ArrayLike | None = None,
        policy_version: ArrayLike | None = None,
        finish_reason: str | None = None,
        token_extras: Mapping[str, ArrayLike] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        prompt = to_int32("prompt_ids", prompt_ids)
        response = to_int32("response_ids", response_ids)
        size = len(response)
        mask = np.ones(size, bool) if loss_mask is None else loss_mask
        if logprobs is not None:
            logprobs = spread("logprobs", to_logprobs(logprobs), size)
        total = checks.optional(checks.reward, "reward", reward)
        if token_rewards is not None:
            token_rewards = spread("token_rewards", _rewards(token_rewards), size)
            total = total_reward(token_rewards, total)
        extras = named_arrays("token_extras", token_extras, _FIELDS)
        set_fields(
            self,
            prompt_ids=prompt,
            response_ids=response,
            loss_mask=spread("loss_mask", to_bool("loss_mask", mask), size),
            logprobs=logprobs,
            reward=total,
            token_rewards=token_rewards,
            policy_version=to_versions(policy_version, size),
            finish_reason=checks.optional(checks.string, "finish_reason", finish_reason),
            token_extras=spread_named("token_extras", extras, len(prompt) + size, size),
            metadata=checks.json_object("metadata", metadata, checks.text),
        )

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other) if isinstance(other, Turn) else NotImplemented

    @property
    def num_tokens(self) -> int:
        """Number of tokens, P + R."""
        return len(self.prompt_ids) + len(self.response_ids)


_FIELDS = frozenset(f.name for f in fields(Turn))


def _rewards(value: ArrayLike) -> NDArray[np.float32]:
    given = to_numpy("token_rewards", value)
    # The verdicts of a verifier are bools or integers.
    rewards = to_float32("token_rewards", given if given.dtype.kind == "f" else given * 1.0)
    if not np.isfinite(rewards).all():
        actual = float(rewards[~np.isfinite(rewards)][0])
        raise InvalidInputError("token_rewards", "finite numbers", actual)
    return rewards


def total_reward(rewards: NDArray[np.float32], given: float | None) -> float:
    """Return the sum of token rewards, or the given reward if it equals the sum up to rounding.

    Raises:
        InvalidInputError: It does not.
    """
    total = float(rewards.sum(dtype=np.float64))
    if given is None:
        return checks.reward("token_rewards", total)
    rounding = 1e-5 * float(np.abs(rewards).sum(dtype=np.float64))
    if abs(given - total) > rounding:
        raise InvalidInputError("reward", f"the sum of token_rewards, {total:g}", given)
    return given


def trusted(kind: type[_T], **values: Any) -> _T:
    """Create a frozen dataclass from its fields, without checks."""
    return set_fields(object.__new__(kind), **values)


def set_fields(target: _T, **values: Any) -> _T:
    """Set the fields of a new frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(target, name, value)
    return target


def same_fields(one: Any, other: Any) -> bool:
    """Whether two instances of one dataclass have the same content, bit for bit."""
    return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
