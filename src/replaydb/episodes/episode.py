"""Episodes: completions and trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from replaydb import checks
from replaydb.episodes.arrays import (
    Array,
    ArrayLike,
    Versions,
    check_names,
    named_arrays,
    spread,
    spread_named,
    to_float32,
    to_versions,
)
from replaydb.episodes.rows import row_of_response, row_of_tokens, row_of_turns
from replaydb.episodes.turns import Turn, same_fields, set_fields
from replaydb.errors import InvalidInputError


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Episode:
    """One completion or trajectory. Its arrays are read-only copies.

    Give exactly one of `token_ids` with `loss_mask`, `prompt_ids` with `response_ids`, or `turns`.
    Lists, numpy arrays and torch tensors (of any device; detached here) are taken. T is the
    number of tokens, R that of response tokens; arrays of length R are for the prompt/response
    form. From turns, the tokens are the plain concatenation of every turn's prompt and response,
    and the mask is that of the responses; prompts have logprob 0.0, and a response whose logprobs
    are absent has NaN if other turns have theirs.

    Attributes:
        token_ids: int32 [T].
        loss_mask: Tokens to train on, bool [T]; given as bools or integers 0 and 1, [T] or [R],
            the prompt then being False. In the prompt/response form the default is the response.
        logprobs: Behaviour logprobs, float32 [T]; given as [T] or [R], the prompt then has 0.0.
            NaN is legal, other float types are converted. None where not recorded.
        prompt_length: Tokens before the (first) response; for `token_ids`, the leading False of
            `loss_mask`.
        reward: A number of float32's range, or None. Of turns, by default the sum of the rewards
            they have. Merging turns gives it to every row of the episode; what each turn earned is
            in the rows' `token_extras["token_rewards"]`.
        advantage: Finite, or None.
        policy_version: Version that acted; or int32 [T], given as [T] or [R], the prompt then has
            the lowest; None for unknown. Of turns: theirs, unknown as soon as one of them is; may
            be given here where none of them has one.
        finish_reason: Why it ended, in the words of the inference engine.
        token_extras: Named arrays [T, ...], given so or as [R, ...], the prompt then has zeros.
            bfloat16 and float8 are torch tensors, everything else is numpy. Those of turns are
            put end to end, with zeros in the turns that do not have them. "token_rewards" is what
            a turn's `token_rewards` are for an episode without turns.
        extras: Named arrays of any shape.
        metadata: A JSON object: str keys, finite numbers.
        text: Transcript for people; stored apart from the arrays.
        turns: The turns it was built from, or empty.

    Raises:
        InvalidInputError: An argument has the wrong shape, dtype or value.
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32] | None
    prompt_length: int
    reward: float | None
    advantage: float | None
    policy_version: Versions
    finish_reason: str | None
    token_extras: dict[str, Array]
    extras: dict[str, Array]
    metadata: dict[str, Any]
    text: str | None
    turns: tuple[Turn, ...]

    def __init__(
        self,
        *,
        token_ids: ArrayLike | None = None,
        loss_mask: ArrayLike | None = None,
        prompt_ids: ArrayLike | None = None,
        response_ids: ArrayLike | None = None,
        turns: Iterable[Turn] | None = None,
        logprobs: ArrayLike | None = None,
        reward: float | None = None,
        advantage: float | None = None,
        policy_version: ArrayLike | None = None,
        finish_reason: str | None = None,
        token_extras: Mapping[str, ArrayLike] | None = None,
        extras: Mapping[str, ArrayLike] | None = None,
        metadata: Mapping[str, Any] | None = None,
        text: str | None = None,
    ) -> None:
        given = {
            "token_ids": token_ids,
            "prompt_ids": prompt_ids,
            "response_ids": response_ids,
            "turns": turns,
        }
        match tuple(name for name, value in given.items() if value is not None):
            case ("token_ids",):
                row = row_of_tokens(token_ids, loss_mask, logprobs, policy_version)
            case ("prompt_ids", "response_ids"):
                row = row_of_response(prompt_ids, response_ids, loss_mask, logprobs, policy_version)
            case ("turns",):
                row = row_of_turns(given["turns"], loss_mask, logprobs, policy_version)
                reward = row.reward if reward is None else reward
                check_names("token_extras of turns", row.token_extras, CORE_FIELDS)
            case names:
                expected = "token_ids, or prompt_ids and response_ids, or turns"
                actual = " and ".join(names) or "none of them"
                raise InvalidInputError("episode", expected, actual)
        total, response = len(row.token_ids), row.response
        per_token = named_arrays("token_extras", token_extras, CORE_FIELDS | row.taken)
        set_fields(
            self,
            token_ids=row.token_ids,
            loss_mask=row.loss_mask,
            logprobs=_logprobs(row.logprobs, total, response),
            prompt_length=row.prompt_length,
            reward=checks.optional(checks.reward, "reward", reward),
            advantage=checks.optional(checks.number, "advantage", advantage),
            policy_version=to_versions(row.policy_version, total, response),
            finish_reason=checks.optional(checks.string, "finish_reason", finish_reason),
            token_extras={
                **row.token_extras,
                **spread_named("token_extras", per_token, total, response),
            },
            extras=named_arrays("extras", extras, CORE_FIELDS | row.taken | per_token.keys()),
            metadata=checks.json_object("metadata", metadata, checks.text),
            text=checks.optional(checks.text, "text", text),
            turns=row.turns,
        )

    @classmethod
    def _trusted(cls, **values: Any) -> Self:
        """An episode of all its fields as they are stored, unchecked: for the decoder."""
        return set_fields(object.__new__(cls), **values)

    @property
    def num_tokens(self) -> int:
        """T, prompt included."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens the loss mask lets through."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def num_turns(self) -> int:
        """Turns it was built from; 1 where it was not."""
        return len(self.turns) or 1

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """The first `prompt_length` tokens, int32."""
        return self.token_ids[: self.prompt_length]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """The tokens after the prompt, int32; of several turns, later prompts included."""
        return self.token_ids[self.prompt_length :]

    @property
    def min_policy_version(self) -> int | None:
        """Oldest version that made a token; None if unknown."""
        version = self.policy_version
        return int(version.min()) if isinstance(version, np.ndarray) else version

    @property
    def max_policy_version(self) -> int | None:
        """Newest version that made a token; None if unknown."""
        version = self.policy_version
        return int(version.max()) if isinstance(version, np.ndarray) else version

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other) if isinstance(other, Episode) else NotImplemented

    def __repr__(self) -> str:
        return (
            f"Episode({self.num_tokens} tokens, {self.num_loss_tokens} in the loss, "
            f"reward={self.reward})"
        )


# What an extra may not be called; the last two are properties.
CORE_FIELDS = frozenset(f.name for f in fields(Episode)) | {"prompt_ids", "response_ids"}


def _logprobs(value: ArrayLike, total: int, response: int | None) -> Array | None:
    if value is None:
        return None
    return spread("logprobs", to_float32("logprobs", value), total, response)
