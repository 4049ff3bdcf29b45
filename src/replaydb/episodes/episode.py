"""What is stored: turns, episodes, and the groups of episodes that share a prompt."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from replaydb.episodes.arrays import (
    Array,
    ArrayLike,
    Versions,
    own,
    same,
    spread,
    to_array,
    to_float32,
    to_versions,
)
from replaydb.episodes.rows import row_of_response, row_of_tokens, row_of_turns
from replaydb.episodes.turns import Turn, same_fields, set_fields
from replaydb.errors import InvalidInputError
from replaydb.inputs import (
    all_of,
    optional,
    to_int,
    to_json_object,
    to_name,
    to_number,
    to_reward,
    to_text,
)

__all__ = ["CORE_FIELDS", "Episode", "EpisodeGroup", "GroupStatus", "Turn"]


class GroupStatus(StrEnum):
    """Where a group is in its life.

    Attributes:
        PENDING: Episodes are still arriving.
        COMPLETED: May be sampled.
        LEASED: Held by one consumer until ack, nack or expiry.
        ABORTED: Generation was interrupted and can be resumed.
        EXPIRED: Too stale to train on; the prompt may be rolled again.
        FAILED: Generation or scoring went wrong.
        FILTERED: Rejected on purpose, for instance because all rewards are equal.
        ARCHIVED: Out of the samplable set, kept for analysis.
    """

    PENDING = "pending"
    COMPLETED = "completed"
    LEASED = "leased"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Episode:
    """One completion or trajectory. Its arrays are read-only copies.

    Give exactly one of `token_ids` with `loss_mask`, `prompt_ids` with `response_ids`, or `turns`.
    Lists, numpy arrays and torch tensors (of any device; detached here) are taken. T is the
    number of tokens, R that of response tokens; arrays of length R are for the prompt/response
    form. From turns, the tokens are the plain concatenation of every turn's prompt and response
    and the mask marks the responses; prompts have logprob 0.0, and a response whose logprobs
    are absent has NaN if other turns have theirs.

    Attributes:
        token_ids: int32 [T].
        loss_mask: Tokens to train on, bool [T]; given as bools or integers 0 and 1, [T] or [R],
            the prompt then being False. In the prompt/response form the default is the response.
        logprobs: Behaviour logprobs, float32 [T]; given as [T] or [R], the prompt then has 0.0.
            NaN is legal, other float types are converted. None where not recorded.
        prompt_length: Tokens before the (first) response; for `token_ids`, the leading False of
            `loss_mask`.
        reward: Finite, or None. Of turns, by default the sum of the rewards they have.
        advantage: Finite, or None.
        policy_version: Version that acted; or int32 [T], given as [T] or [R], the prompt then has
            the lowest; None for unknown. Of turns: theirs, unknown as soon as one of them is; may
            be given here where none of them has one.
        finish_reason: Why it ended, in the words of the inference engine.
        token_extras: Named arrays [T, ...], given so or as [R, ...], the prompt then has zeros.
            bfloat16 and float8 are torch tensors, everything else is numpy.
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
            case names:
                expected = "token_ids, or prompt_ids and response_ids, or turns"
                actual = " and ".join(names) or "none of them"
                raise InvalidInputError("episode", expected, actual)
        total, response = len(row.token_ids), row.response
        per_token = _named_arrays("token_extras", token_extras, {})
        set_fields(
            self,
            token_ids=row.token_ids,
            loss_mask=row.loss_mask,
            logprobs=_logprobs(row.logprobs, total, response),
            prompt_length=row.prompt_length,
            reward=optional(to_reward, "reward", reward),
            advantage=optional(to_number, "advantage", advantage),
            policy_version=to_versions(row.policy_version, total, response),
            finish_reason=optional(to_text, "finish_reason", finish_reason),
            token_extras={
                name: spread(f"token_extras[{name!r}]", array, total, response)
                for name, array in per_token.items()
            },
            extras=_named_arrays("extras", extras, per_token),
            metadata=to_json_object("metadata", metadata),
            text=optional(to_text, "text", text),
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


class EpisodeGroup:
    """The episodes of one prompt: stored, sampled, leased and evicted whole.

    Attributes:
        task_name: Which task or environment it belongs to; at most 255 characters.
        prompt_uid: The prompt's id in its dataset, or None.
        group_uid: Unique in a buffer, which makes it the idempotency key of a put; made up where
            not given.
        priority: Weight of prioritized sampling, finite and >= 0.
        status: A `GroupStatus` or its value.
        tags: A JSON object to filter by.
        expected_episodes: How many episodes will make it complete; None if not said.

    Raises:
        InvalidInputError: An argument has the wrong type or value, or a completed group has no
            episode.
    """

    def __init__(
        self,
        task_name: str,
        episodes: Iterable[Episode],
        *,
        prompt_uid: str | None = None,
        group_uid: str | None = None,
        priority: float = 1.0,
        status: GroupStatus | str = GroupStatus.COMPLETED,
        tags: Mapping[str, Any] | None = None,
        expected_episodes: int | None = None,
    ) -> None:
        self.task_name = to_name("task_name", task_name)
        self.prompt_uid = optional(to_name, "prompt_uid", prompt_uid)
        self.group_uid = uuid.uuid4().hex if group_uid is None else to_name("group_uid", group_uid)
        self.priority = to_number("priority", priority, least=0.0)
        try:
            self.status = GroupStatus(status)
        except ValueError as error:
            expected = "one of " + ", ".join(GroupStatus)
            raise InvalidInputError("status", expected, repr(status)) from error
        self.tags = to_json_object("tags", tags)
        self._episodes = all_of(Episode, "episodes", episodes)
        if not self._episodes and self.status is GroupStatus.COMPLETED:
            raise InvalidInputError("episodes", "at least one in a completed group", "none")
        if expected_episodes is not None:
            low = max(1, len(self._episodes))
            expected_episodes = to_int("expected_episodes", expected_episodes, low)
        self.expected_episodes = expected_episodes

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """The episodes, in the order they were given or arrived."""
        return self._episodes

    @property
    def num_episodes(self) -> int:
        """Episodes there are now."""
        return len(self.episodes)

    @property
    def num_tokens(self) -> int:
        """Tokens of all episodes, prompts included."""
        return sum(episode.num_tokens for episode in self.episodes)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens the loss masks let through."""
        return sum(episode.num_loss_tokens for episode in self.episodes)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """float64 [episodes]; NaN where an episode has none."""
        return np.array([episode.reward for episode in self.episodes], np.float64)

    @property
    def reward_mean(self) -> float | None:
        """Mean over the episodes that have a reward; None if none has."""
        rewards = self._known_rewards()
        return float(rewards.mean()) if rewards.size else None

    @property
    def reward_std(self) -> float | None:
        """Population standard deviation; exactly 0.0 where all rewards are equal."""
        rewards = self._known_rewards()
        if not rewards.size:
            return None
        # np.std of equal numbers can come out as rounding noise, which would pass a `> 0` filter.
        return float(rewards.std()) if (rewards != rewards[0]).any() else 0.0

    @property
    def reward_min(self) -> float | None:
        """Lowest reward; None if no episode has one."""
        rewards = self._known_rewards()
        return float(rewards.min()) if rewards.size else None

    @property
    def reward_max(self) -> float | None:
        """Highest reward; None if no episode has one."""
        rewards = self._known_rewards()
        return float(rewards.max()) if rewards.size else None

    @property
    def min_policy_version(self) -> int | None:
        """Oldest version in the group; None as soon as one episode's is unknown."""
        versions = [episode.min_policy_version for episode in self.episodes]
        known = [version for version in versions if version is not None]
        return min(known) if known and len(known) == len(versions) else None

    @property
    def max_policy_version(self) -> int | None:
        """Newest version in the group; None as soon as one episode's is unknown."""
        versions = [episode.max_policy_version for episode in self.episodes]
        known = [version for version in versions if version is not None]
        return max(known) if known and len(known) == len(versions) else None

    def _known_rewards(self) -> NDArray[np.float64]:
        rewards = self.rewards
        return rewards[~np.isnan(rewards)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EpisodeGroup):
            return NotImplemented
        return (
            (self.task_name, self.prompt_uid, self.group_uid)
            == (other.task_name, other.prompt_uid, other.group_uid)
            and (self.priority, self.status, self.expected_episodes)
            == (other.priority, other.status, other.expected_episodes)
            and same(self.tags, other.tags)
            and self.episodes == other.episodes
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.task_name!r}, {self.num_episodes} episodes, "
            f"group_uid={self.group_uid!r}, status={self.status.value!r})"
        )


def _logprobs(value: ArrayLike, total: int, response: int | None) -> Array | None:
    if value is None:
        return None
    return spread("logprobs", to_float32("logprobs", value), total, response)


def _named_arrays(
    field: str, arrays: Mapping[str, ArrayLike] | None, taken: Mapping[str, Array]
) -> dict[str, Array]:
    if arrays is None:
        return {}
    if not isinstance(arrays, Mapping):
        raise InvalidInputError(field, "a mapping of names to arrays", type(arrays).__name__)
    for name in arrays:
        if name in CORE_FIELDS or name in taken:
            raise InvalidInputError(field, "a name that is not taken", repr(name))
    return {
        to_name(f"{field} name", name): own(to_array(f"{field}[{name!r}]", array))
        for name, array in arrays.items()
    }
