"""The steps of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from replaydb import checks
from replaydb.episodes.arrays import (
    ArrayLike,
    Versions,
    same,
    spread,
    to_float32,
    to_int32,
    to_versions,
)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Turn:
    """One observation -> action step of an episode. Its arrays are read-only copies.

    Attributes:
        prompt_ids: Context tokens, int32 [P].
        response_ids: Action tokens, int32 [R].
        logprobs: Behaviour logprobs of the action tokens, float32 [R]; None where not recorded,
            which is not the same as empty.
        reward: Reward of this step, finite; None where there was none.
        policy_version: Version that acted, or int32 [R] with one per action token.
        finish_reason: Why the action ended, in the words of the inference engine.
        metadata: A JSON object.

    Raises:
        InvalidInputError: An argument has the wrong shape, dtype or value.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    reward: float | None
    policy_version: Versions
    finish_reason: str | None
    metadata: dict[str, Any]

    def __init__(
        self,
        *,
        prompt_ids: ArrayLike,
        response_ids: ArrayLike,
        logprobs: ArrayLike | None = None,
        reward: float | None = None,
        policy_version: ArrayLike | None = None,
        finish_reason: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        response = to_int32("response_ids", response_ids)
        if logprobs is not None:
            logprobs = spread("logprobs", to_float32("logprobs", logprobs), len(response))
        set_fields(
            self,
            prompt_ids=to_int32("prompt_ids", prompt_ids),
            response_ids=response,
            logprobs=logprobs,
            reward=checks.optional(checks.reward, "reward", reward),
            policy_version=to_versions(policy_version, len(response)),
            finish_reason=checks.optional(checks.text, "finish_reason", finish_reason),
            metadata=checks.json_object("metadata", metadata),
        )

    @classmethod
    def _trusted(cls, **values: Any) -> Self:
        """A turn of all its fields as they are stored, unchecked: for the decoder."""
        return set_fields(object.__new__(cls), **values)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other) if isinstance(other, Turn) else NotImplemented

    @property
    def num_tokens(self) -> int:
        """P + R."""
        return len(self.prompt_ids) + len(self.response_ids)


def set_fields(target: _T, **values: Any) -> _T:
    """Fill in a new frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(target, name, value)
    return target


def same_fields(one: Any, other: Any) -> bool:
    """Whether two instances of one dataclass have the same content, bit for bit."""
    return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
