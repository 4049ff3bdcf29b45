"""Episode: a completion or trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from replaydb.domain import checks
from replaydb.domain.episodes.arrays import (
    Array,
    ArrayLike,
    Versions,
    check_names,
    named_arrays,
    spread_named,
)
from replaydb.domain.episodes.building import (
    CORE_FIELDS,
    extreme_version,
    joint_extras,
    joint_logprobs,
    joint_mask,
    joint_tokens,
    joint_versions,
    row_of_response,
    row_of_tokens,
    row_of_turns,
)
from replaydb.domain.episodes.forest import Forest, forest_of
from replaydb.domain.episodes.ragged import Values, own_extras
from replaydb.domain.episodes.segments import LOGPROBS, TOKEN_VERSIONS, Segment
from replaydb.domain.episodes.turns import Turn, parents_of, same_fields, set_fields
from replaydb.errors import InvalidInputError


@dataclass(frozen=True, init=False, eq=False, repr=False)
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
            has zeros. Without turns, arrays of all but the last token, [T - 1, ...], are kept so.
            bfloat16 and float8 are torch tensors, everything else is numpy. Extras of turns are
            concatenated, with zeros for turns without them. If the number of values varies from
            token to token, pass a `Ragged`; tokens without values then have 0 of them. For
            per-token rewards of an episode without turns, pass the extra "token_rewards".
        extras: Arrays of any shape by name. They are stored exactly or refused: masked arrays, for
            example, are refused.
        metadata: JSON object: str keys, finite numbers.
        text: Transcript for people. It is stored separately from the arrays.
        turns: The turns that the episode was built from, or empty. Arrays over all of them also
            have those that are not trained on.

    Raises:
        InvalidInputError: An argument has the wrong shape, dtype or value.
    """

    segment: Segment | None
    turns: tuple[Turn, ...]
    version: Versions
    joint_extras: dict[str, Values]
    reward: float | None
    advantage: float | None
    finish_reason: str | None
    extras: dict[str, Array]
    metadata: dict[str, Any]
    text: str | None
    #: Whether all its extras were read, so that it can be stored again.
    is_whole: ClassVar[bool] = True

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
                row = row_of_tokens(token_ids, loss_mask, logprobs, policy_version, token_extras)
            case ("prompt_ids", "response_ids"):
                row = row_of_response(
                    prompt_ids, response_ids, loss_mask, logprobs, policy_version, token_extras
                )
            case ("turns",):
                row = row_of_turns(given["turns"], loss_mask, logprobs, policy_version)
                reward = row.reward if reward is None else reward
                check_names("token_extras of turns", row.taken, CORE_FIELDS)
            case names:
                expected = "token_ids, or prompt_ids and response_ids, or turns"
                actual = " and ".join(names) or "none of them"
                raise InvalidInputError("episode", expected, actual)
        joint: dict[str, Values] = {}
        if row.turns:
            arrays = own_extras(token_extras, CORE_FIELDS | row.taken)
            total = sum(turn.num_tokens for turn in row.turns)
            joint = spread_named("token_extras", arrays, total)
        per_token = row.taken | {*(token_extras or ())}
        set_fields(
            self,
            segment=row.segment,
            turns=row.turns,
            version=row.version,
            joint_extras=joint,
            reward=checks.optional(checks.reward, "reward", reward),
            advantage=checks.optional(checks.float32, "advantage", advantage),
            finish_reason=checks.optional(checks.string, "finish_reason", finish_reason),
            extras=named_arrays("extras", extras, CORE_FIELDS | per_token),
            metadata=checks.json_object("metadata", metadata, checks.text),
            text=checks.optional(checks.text, "text", text),
        )

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Token ids, int32 [T]."""
        if self.segment is None:
            return joint_tokens(self.turns)
        return self.segment.tokens(0, self.segment.length)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """Which tokens to train on, bool [T]."""
        if self.segment is None:
            return joint_mask(self.turns)
        return self.segment.mask(0, self.segment.length)

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        """Behaviour logprobs, float32 [T], or None if not recorded."""
        if self.segment is None:
            return joint_logprobs(self.turns)
        if LOGPROBS not in self.segment.columns:
            return None
        return self.segment.values(LOGPROBS, 0, self.segment.length)  # type: ignore[return-value]

    @property
    def policy_version(self) -> Versions:
        """Policy version that generated the episode, or one per token, int32 [T]; or None."""
        if self.segment is None and self.version is None:
            return joint_versions(self.turns, [turn.policy_version for turn in self.turns])
        if self.segment is None or TOKEN_VERSIONS not in self.segment.columns:
            return self.version
        return self.segment.versions(0, self.segment.length)

    @property
    def token_extras(self) -> dict[str, Any]:
        """Arrays [T, ...] by name."""
        if self.segment is None:
            return joint_extras(self.turns) | self.joint_extras
        return self.segment.extras()

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the (first) response."""
        return self.segments[0].prompt_length

    @property
    def segments(self) -> Sequence[Segment]:
        """The tokens of each turn, or those of an episode without turns."""
        return [turn.segment for turn in self.turns] if self.segment is None else (self.segment,)

    @cached_property
    def forest(self) -> Forest:
        """How its turns continue each other, and which are trained on. One node without turns."""
        return forest_of(self.turns) if self.turns else Forest((-1,), (True,))

    @property
    def row_lengths(self) -> list[int]:
        """Number of tokens of each training row: of each path of its turns."""
        if self.segment is not None:
            return [self.segment.length]
        return [self.turns[i].num_tokens for i in self.forest.ends]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of its training rows; T without turns."""
        return sum(self.row_lengths)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens with a loss mask of True, without turns that are not trained on."""
        if self.segment is not None:
            return self.segment.num_loss_tokens
        trained = zip(self.turns, self.forest.is_trained, strict=True)
        return sum(turn.segment.num_loss_tokens for turn, is_trained in trained if is_trained)

    @property
    def num_turns(self) -> int:
        """Number of turns; 1 if it was not built from turns."""
        return len(self.turns) or 1

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """The first `prompt_length` tokens, int32."""
        return self.segments[0].tokens(0, self.prompt_length)

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """The tokens after the prompt, int32. With several turns, later prompts are included."""
        if self.segment is None:
            return self.token_ids[self.prompt_length :]
        return self.segment.tokens(self.prompt_length, self.segment.length)

    @property
    def min_policy_version(self) -> int | None:
        """Lowest version that generated a token; None if unknown."""
        return self._extreme_version(min)

    @property
    def max_policy_version(self) -> int | None:
        """Highest version that generated a token; None if unknown."""
        return self._extreme_version(max)

    def _extreme_version(self, choose: Callable[[Iterable[int]], int]) -> int | None:
        if self.segment is None and self.version is None:
            return extreme_version(self.turns, choose)
        if self.segment is None or TOKEN_VERSIONS not in self.segment.columns:
            version = self.version
        else:  # those of the prompt are the lowest, unless they are stored
            found = self.segment.pieces(TOKEN_VERSIONS, 0, self.segment.length)
            return choose(int(choose(values.tolist())) for _, values in found)
        return choose(version.tolist()) if isinstance(version, np.ndarray) else version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Episode):
            return NotImplemented
        return same_fields(self, other, _FIELDS) and parents_of(self.turns) == parents_of(
            other.turns
        )

    def __repr__(self) -> str:
        return (
            f"Episode({self.num_tokens} tokens, {self.num_loss_tokens} in the loss, "
            f"reward={self.reward})"
        )


#: Public fields that two equal episodes have in common.
_FIELDS = sorted(CORE_FIELDS - {"prompt_ids", "response_ids"})
