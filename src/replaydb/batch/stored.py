"""A group as it came back from the database."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from replaydb import checks
from replaydb.episodes import EpisodeGroup, GroupStatus
from replaydb.episodes.flat import FlatEpisodes


class StoredGroup(EpisodeGroup):
    """An `EpisodeGroup` with what the buffer knows of it; views of the bytes that were stored.

    Attributes:
        id: Identity within the store, ascending in the order of arrival.
        run_id: The run that put it, if it named one.
        staleness: Policy versions behind the buffer's, when it was read; None if unknown.
        times_sampled: Draws that took it, this one included.
        attempts: Leases that ended without an ack.
        times_replaced: How often other content took the place of what was put first.
        status_reason: Why it has its status, where there is something to say.
        leased_from: The status it was leased from; None of one that is not leased.
        created_at: When it was put; also `completed_at`, `first_sampled_at`, `last_sampled_at`
            and `archived_at`, aware, in UTC.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        parts: Mapping[int, FlatEpisodes],
        texts: Mapping[int, str] | None = None,
    ) -> None:
        self._hold(
            tuple(parts.values()),
            _by_episode(parts, texts) if texts else {},
            task_name=facts["task_name"],
            prompt_uid=facts["prompt_uid"],
            group_uid=facts["group_uid"],
            priority=facts["priority"],
            status=GroupStatus(facts["group_status"]),
            tags=facts["tags"],
            expected_episodes=facts["expected_episodes"],
        )
        self.id: int = facts["id"]
        self.run_id: int | None = facts["run_id"]
        self.staleness: int | None = facts["staleness"]
        self.times_sampled: int = facts["times_sampled"]
        self.attempts: int = facts["attempts"]
        self.times_replaced: int = facts["times_replaced"]
        self.status_reason: str | None = facts["status_reason"]
        leased_from = facts["leased_from"]
        self.leased_from = None if leased_from is None else GroupStatus(leased_from)
        self.created_at: datetime = facts["created_at"]
        self.completed_at: datetime | None = facts["completed_at"]
        self.first_sampled_at: datetime | None = facts["first_sampled_at"]
        self.last_sampled_at: datetime | None = facts["last_sampled_at"]
        self.archived_at: datetime | None = facts["archived_at"]

    def without_stale_episodes(self, max_staleness: int) -> EpisodeGroup:
        """What is left to go on with when an expired group is rolled again.

        Lease it with `statuses=["expired"]`, generate what is missing from `expected_episodes`,
        and put the whole under `on_duplicate="replace"`.

        Args:
            max_staleness: Episodes at most this many policy versions behind the buffer's are
                kept; those of unknown version are not.

        Returns:
            The group under the same uid, `aborted`, expecting as many episodes as it had. It has
            its prompt, also where no episode is left of it.
        """
        limit = checks.whole_number("max_staleness", max_staleness)
        now = None
        if self.staleness is not None and self.min_policy_version is not None:
            now = self.staleness + self.min_policy_version
        return EpisodeGroup(
            self.task_name,
            [
                episode
                for episode in self.episodes
                if now is not None
                and episode.min_policy_version is not None
                and now - episode.min_policy_version <= limit
            ],
            prompt_uid=self.prompt_uid,
            group_uid=self.group_uid,
            priority=self.priority,
            status=GroupStatus.ABORTED,
            tags=self.tags,
            expected_episodes=self.expected_episodes or self.num_episodes,
            prompt=self.prompt,
            prompt_ids=self.prompt_ids,
            extras=self.extras,
        )


def id_of(group: EpisodeGroup) -> int:
    """The id of a group in its store; -1 for one that was never stored."""
    return group.id if isinstance(group, StoredGroup) else -1


def _by_episode(parts: Mapping[int, FlatEpisodes], texts: Mapping[int, str]) -> dict[int, str]:
    """Texts by the place of their episode among those that arrived, not those expected."""
    places = [start + i for start, part in parts.items() for i in range(part.num_episodes)]
    return {i: texts[place] for i, place in enumerate(places) if place in texts}
