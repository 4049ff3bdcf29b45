"""Episode: a completion or trajectory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replaydb.domain import checks
from replaydb.domain.episodes.arrays import (
    Array,
    ArrayLike,
    Versions,
    check_names,
    named_arrays,
    spread,
    spread_named,
    to_logprobs,
    to_versions,
)
from replaydb.domain.episodes.building import row_of_response, row_of_tokens, row_of_turns
from replaydb.domain.episodes.turns import Turn, same_fields, set_fields
from replaydb.errors import InvalidInputError


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Episode:
    """One completion or trajectory. Its arrays are read-only copies.

    Pass exactly one of `token_ids` with `loss_mask`, `prompt_ids` with `response_ids`, or `turns`.
    Arrays can be lists, numpy arrays or torch tensors (of any device; they are detached). T is the
    number of tokens and R that of response tokens. Arrays of length R are accepted with
    `prompt_ids` and `response_ids`. With `turns`, the tokens are the concatenation of the prompt
    and response of every turn, and the loss mask is that of the responses. Logprobs are 0.0 on
    prompts, and NaN on responses without logprobs if other turns have them.

    Attributes:
        token_ids: int32 [T].
        loss_mask: Which tokens to train on, bool [T]. Pass bools or integers 0 and 1, [T] or [R];
            with [R] the prompt is False. Default with `prompt_ids` and `response_ids`: all response
            tokens.
        logprobs: Behaviour logprobs, float32 [T], or None if not recorded. Pass [T] or [R]; with
            [R] the prompt has 0.0. NaN means not recorded, and so does -inf, which becomes NaN.
            Other float types are converted.
        prompt_length: Number of tokens before the (first) response. With `token_ids`: the number of
            leading False in `loss_mask`.
        reward: A number in the range of float32, a bool (True is 1.0), or None. Default with
            `turns`: the sum of their rewards. When turns are merged, every row gets this reward;
            rewards of single turns are in `token_extras["token_rewards"]` of the rows.
        advantage: A number in the range of float32, or None.
        policy_version: Policy version that generated the episode; or int32 [T], one per token; or
            None if unknown. Pass [T] or [R]; with [R] the prompt gets the lowest version. Default
            with `turns`: their versions, or None if one of them is unknown. If no turn has a
            version, you can pass one here.
        finish_reason: Why generation ended, as reported by the inference engine.
        token_extras: Arrays [T, ...] by name. Pass [T, ...] or [R, ...]; with [R, ...] the prompt
            has zeros. bfloat16 and float8 are torch tensors, everything else is numpy. Extras of
            turns are concatenated, with zeros for turns without them. For per-token rewards of an
            episode without turns, pass the extra "token_rewards".
        extras: Arrays of any shape by name. They are stored exactly or refused: masked arrays, for
            example, are refused.
        metadata: JSON object: str keys, finite numbers.
        text: Transcript for people. It is stored separately from the arrays.
        turns: The turns that the episode was built from, or empty.

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
            logprobs=None
            if row.logprobs is None
            else spread("logprobs", to_logprobs(row.logprobs), total, response),
            prompt_length=row.prompt_length,
            reward=checks.optional(checks.reward, "reward", reward),
            advantage=checks.optional(checks.float32, "advantage", advantage),
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

    @property
    def num_tokens(self) -> int:
        """Number of tokens T, prompt included."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens with a loss mask of True."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def num_turns(self) -> int:
        """Number of turns; 1 if it was not built from turns."""
        return len(self.turns) or 1

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """The first `prompt_length` tokens, int32."""
        return self.token_ids[: self.prompt_length]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """The tokens after the prompt, int32. With several turns, later prompts are included."""
        return self.token_ids[self.prompt_length :]

    @property
    def min_policy_version(self) -> int | None:
        """Lowest version that generated a token; None if unknown."""
        version = self.policy_version
        return int(version.min()) if isinstance(version, np.ndarray) else version

    @property
    def max_policy_version(self) -> int | None:
        """Highest version that generated a token; None if unknown."""
        version = self.policy_version
        return int(version.max()) if isinstance(version, np.ndarray) else version

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other) if isinstance(other, Episode) else NotImplemented

    def __repr__(self) -> str:
        return (
            f"Episode({self.num_tokens} tokens, {self.num_loss_tokens} in the loss, "
            f"reward={self.reward})"
        )


# Reserved names of extras. The last two are properties.
CORE_FIELDS = frozenset(f.name for f in fields(Episode)) | {"prompt_ids", "response_ids"}
