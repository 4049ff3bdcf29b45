"""Groups: the episodes of one prompt."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replaydb.episodes.arrays import same
from replaydb.episodes.episode import Episode
from replaydb.errors import InvalidInputError
from replaydb.inputs import all_of, optional, to_int, to_json_object, to_name, to_number


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
