"""EpisodeGroup: all episodes of one prompt."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replaydb.domain import checks
from replaydb.domain.episodes.arrays import Array, ArrayLike, same
from replaydb.domain.episodes.columnar import flat_from_arrays, texts_of
from replaydb.domain.episodes.context import GroupContext, Prompt
from replaydb.domain.episodes.episode import Episode
from replaydb.domain.episodes.segments import common_tokens
from replaydb.domain.episodes.turns import check_uids
from replaydb.errors import InvalidInputError


class GroupStatus(StrEnum):
    """Status of a group.

    Attributes:
        PENDING: Incremental group that is not complete.
        COMPLETED: Can be sampled.
        LEASED: Leased to one consumer until it is acked or released, or the lease expires.
        ABORTED: Generation was interrupted and can be resumed.
        EXPIRED: Too stale to train on. The prompt can be generated again.
        FAILED: Generation or scoring failed.
        FILTERED: Rejected on purpose, for example because all rewards are equal.
        ARCHIVED: Not drawn any more, kept for analysis.
    """

    PENDING = "pending"
    COMPLETED = "completed"
    LEASED = "leased"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


class RewardStats(NamedTuple):
    """Statistics of the known rewards; all None if there are none.

    Attributes:
        mean: Mean.
        std: Population standard deviation.
        min: Lowest reward.
        max: Highest reward.
    """

    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None


class EpisodeGroup:
    """The episodes of one prompt. They are stored, sampled, leased and evicted together.

    Attributes:
        episodes: The episodes, in the order in which they were given or added.
        task_name: Name of its task or environment, at most 255 characters.
        prompt_uid: Id of the prompt in its dataset, or None.
        group_uid: Unique id in a buffer and idempotency key of a put. Default: generated.
        priority: Weight of prioritized sampling, finite and >= 0.
        status: A `GroupStatus` or its value.
        tags: JSON object, to filter by.
        expected_episodes: Number of episodes that complete it, or None.
        prompt: The prompt as text or chat messages (JSON objects), kept so that it can be generated
            again.
        prompt_ids: Token ids of the prompt, int32 [P]. Default: the prompt tokens that all episodes
            have in common; None if they differ or there are no episodes.
        extras: Arrays of any shape by name that belong to the whole group, such as images, as
            pixels or as bytes of their files (uint8).
        context: The given prompt, prompt ids and extras.

    Raises:
        InvalidInputError: An argument has the wrong type or value, two turns have the same uid, or
            a completed group has no episodes.
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
        prompt: str | Iterable[Mapping[str, Any]] | None = None,
        prompt_ids: ArrayLike | None = None,
        extras: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        several = checks.instances("episodes", episodes, Episode)
        if len(several) > 1:  # an episode has checked its own turns
            check_uids((f"episodes[{i}].turns", one.turns) for i, one in enumerate(several))
        context = GroupContext.of(prompt, prompt_ids, extras)
        self._assign(
            several,
            context,
            task_name=task_name,
            prompt_uid=prompt_uid,
            group_uid=group_uid,
            priority=priority,
            status=status,
            tags=tags,
            expected_episodes=expected_episodes,
        )
        if not several and self.status is GroupStatus.COMPLETED:
            raise InvalidInputError("episodes", "at least one in a completed group", "none")

    @staticmethod
    def from_arrays(
        task_name: str,
        *,
        token_ids: ArrayLike,
        lengths: ArrayLike | None = None,
        attention_mask: ArrayLike | None = None,
        prompt_lengths: ArrayLike | None = None,
        loss_mask: ArrayLike | None = None,
        logprobs: ArrayLike | None = None,
        rewards: ArrayLike | None = None,
        advantages: ArrayLike | None = None,
        policy_versions: ArrayLike | None = None,
        token_versions: ArrayLike | None = None,
        finish_reasons: Iterable[str | None] | None = None,
        token_extras: Mapping[str, ArrayLike] | None = None,
        episode_extras: Mapping[str, ArrayLike] | None = None,
        metadata: Iterable[Mapping[str, Any] | None] | None = None,
        texts: Iterable[str | None] | None = None,
        prompt_uid: str | None = None,
        group_uid: str | None = None,
        priority: float = 1.0,
        status: GroupStatus | str = GroupStatus.COMPLETED,
        tags: Mapping[str, Any] | None = None,
        expected_episodes: int | None = None,
        prompt: str | Iterable[Mapping[str, Any]] | None = None,
        prompt_ids: ArrayLike | None = None,
        extras: Mapping[str, ArrayLike] | None = None,
    ) -> EpisodeGroup:
        """Create a group of E episodes from flat or padded arrays, without `Episode` objects.

        The group equals one that is created from episodes with the same values. Arrays are lists,
        numpy arrays or torch tensors (of any device; they are detached), and are copied.

        Arrays with a value per token have the shape of `token_ids`: flat [T], all episodes after
        one another, or padded [E, L]. They can have the values of response tokens only: flat [R],
        or padded [E, R] if the last R columns of `token_ids` are the responses. Prompts then get
        zeros, and the lowest version of their response.

        Args:
            task_name: Name of its task or environment, at most 255 characters.
            token_ids: Integers [T] or [E, L].
            lengths: Number of tokens of each episode, prompt included, [E]. Required if arrays are
                flat. Padded arrays then have their padding on the right.
            attention_mask: Which positions of padded arrays have a token, bools or integers 0 and
                1, [E, L]. Pass this or `lengths`. Padding can be anywhere.
            prompt_lengths: Number of tokens before the (first) response, [E]. Default: the number
                of leading False in `loss_mask`.
            loss_mask: Which tokens to train on, bools or integers 0 and 1. Default: all response
                tokens.
            logprobs: Behaviour logprobs, floats. NaN is allowed.
            rewards: Numbers [E] in the range of float32, or bools; NaN if there is none.
            advantages: Numbers [E] in the range of float32; NaN if there is none.
            policy_versions: Policy version that generated the episodes: an integer, or integers
                [E].
            token_versions: Policy version of each token, integers, instead of `policy_versions`.
            finish_reasons: Why generation ended, E strings or None.
            token_extras: Arrays with values per token by name, [T, ...] or [E, L, ...]; if they are
                flat, also `Ragged`.
            episode_extras: Arrays [E, ...] by name.
            metadata: E JSON objects or None.
            texts: Transcripts, E strings or None.
            prompt_uid: As for `EpisodeGroup`, like all arguments below.
            group_uid: Idempotency key of a put. Default: generated.
            priority: Weight of prioritized sampling.
            status: A `GroupStatus` or its value.
            tags: JSON object, to filter by.
            expected_episodes: Number of episodes that complete it, or None.
            prompt: The prompt as text or chat messages.
            prompt_ids: Token ids of the prompt.
            extras: Arrays that belong to the whole group.

        Raises:
            InvalidInputError: An argument has the wrong shape, dtype or value.
        """
        flat = flat_from_arrays(
            token_ids=token_ids,
            lengths=lengths,
            attention_mask=attention_mask,
            prompt_lengths=prompt_lengths,
            loss_mask=loss_mask,
            logprobs=logprobs,
            rewards=rewards,
            advantages=advantages,
            policy_versions=policy_versions,
            token_versions=token_versions,
            finish_reasons=finish_reasons,
            token_extras=token_extras,
            episode_extras=episode_extras,
            metadata=metadata,
        )
        group = EpisodeGroup.__new__(EpisodeGroup)
        group._assign(
            tuple(flat.episodes(texts_of(texts, flat.num_episodes))),
            GroupContext.of(prompt, prompt_ids, extras),
            task_name=task_name,
            prompt_uid=prompt_uid,
            group_uid=group_uid,
            priority=priority,
            status=status,
            tags=tags,
            expected_episodes=expected_episodes,
        )
        return group

    def _assign(
        self,
        episodes: tuple[Episode, ...],
        context: GroupContext,
        *,
        task_name: str,
        prompt_uid: str | None,
        group_uid: str | None,
        priority: float,
        status: GroupStatus | str,
        tags: Mapping[str, Any] | None,
        expected_episodes: int | None,
    ) -> None:
        """Set the fields, and check them."""
        least = max(1, len(episodes))
        uid = uuid.uuid4().hex if group_uid is None else group_uid
        self.task_name = checks.name("task_name", task_name)
        self.prompt_uid = checks.optional(checks.name, "prompt_uid", prompt_uid)
        self.group_uid = checks.name("group_uid", uid)
        self.priority = checks.priority("priority", priority)
        self.status = checks.one_of("status", status, GroupStatus)
        self.tags = checks.json_object("tags", tags)
        self.expected_episodes = checks.optional(
            checks.whole_number, "expected_episodes", expected_episodes, least, checks.INT32[1]
        )
        self.episodes = episodes
        self.context = context

    @property
    def texts(self) -> list[str | None]:
        """Transcripts of the episodes, in order; None for episodes without one."""
        return [episode.text for episode in self.episodes]

    @property
    def prompt(self) -> Prompt | None:
        """The prompt as text or chat messages, or None."""
        return self.context.prompt

    @property
    def prompt_ids(self) -> NDArray[np.int32] | None:
        """Token ids of the prompt, int32 [P], as given or common to all episodes; or None."""
        if self.context.prompt_ids is not None:
            return self.context.prompt_ids
        firsts = [episode.segments[0] for episode in self.episodes]
        if not firsts or len({first.prompt_length for first in firsts}) > 1:
            return None
        prompt = self.episodes[0].prompt_ids
        alike = all(common_tokens(first, prompt) == len(prompt) for first in firsts[1:])
        return prompt if alike else None

    @property
    def extras(self) -> dict[str, Array]:
        """Arrays of any shape by name."""
        return self.context.extras

    @property
    def num_episodes(self) -> int:
        """Number of episodes stored so far."""
        return len(self.episodes)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the training rows of all episodes, prompts included."""
        return sum(episode.num_tokens for episode in self.episodes)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens with a loss mask of True."""
        return sum(episode.num_loss_tokens for episode in self.episodes)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Rewards, float64 [episodes]; NaN if an episode has none."""
        # numpy converts None to NaN in a float array
        return np.array([episode.reward for episode in self.episodes], np.float64)

    @property
    def advantages(self) -> NDArray[np.float64]:
        """Advantages, float64 [episodes]; NaN if an episode has none."""
        return np.array([episode.advantage for episode in self.episodes], np.float64)

    @property
    def reward_mean(self) -> float | None:
        """Mean over the episodes that have a reward; None if none has."""
        return self._reward_stats.mean

    @property
    def reward_std(self) -> float | None:
        """Population standard deviation of the rewards; exactly 0.0 if all are equal."""
        return self._reward_stats.std

    @property
    def reward_min(self) -> float | None:
        """Lowest reward; None if no episode has one."""
        return self._reward_stats.min

    @property
    def reward_max(self) -> float | None:
        """Highest reward; None if no episode has one."""
        return self._reward_stats.max

    @cached_property
    def _reward_stats(self) -> RewardStats:
        return reward_stats(self.rewards)

    @property
    def min_policy_version(self) -> int | None:
        """Lowest policy version in the group; None if that of any episode is unknown."""
        return _extreme([episode.min_policy_version for episode in self.episodes], min)

    @property
    def max_policy_version(self) -> int | None:
        """Highest policy version in the group; None if that of any episode is unknown."""
        return _extreme([episode.max_policy_version for episode in self.episodes], max)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EpisodeGroup):
            return NotImplemented
        return (
            (self.task_name, self.prompt_uid, self.group_uid)
            == (other.task_name, other.prompt_uid, other.group_uid)
            and (self.priority, self.status, self.expected_episodes)
            == (other.priority, other.status, other.expected_episodes)
            and same(self.tags, other.tags)
            and self.context == other.context
            and self.episodes == other.episodes
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.task_name!r}, {self.num_episodes} episodes, "
            f"group_uid={self.group_uid!r}, status={self.status.value!r})"
        )


def _extreme(versions: list[int | None], choose: Callable[[list[int]], int]) -> int | None:
    known = [version for version in versions if version is not None]
    return choose(known) if known and len(known) == len(versions) else None


def reward_stats(rewards: NDArray[np.float64]) -> RewardStats:
    """Return statistics of rewards [E], NaN where there is none.

    Equal rewards have a std of exactly 0.0 and are their own mean. With rounding errors, such
    groups would pass a filter for `reward_std > 0`.
    """
    # Groups are small: calling numpy takes longer than adding up in Python.
    known = [reward for reward in rewards.tolist() if reward == reward]
    if not known:
        return RewardStats()
    low, high = min(known), max(known)
    if low == high:
        return RewardStats(low, 0.0, low, high)
    mean = sum(known) / len(known)
    squares = [(reward - mean) * (reward - mean) for reward in known]
    return RewardStats(mean, math.sqrt(sum(squares) / len(known)), low, high)
