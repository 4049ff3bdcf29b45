"""StoredGroup: a group as read from the database."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from replaydb.codec.sharing import repeated_bytes
from replaydb.domain import checks
from replaydb.domain.episodes import Episode, EpisodeGroup, GroupStatus
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.results import etag_of
from replaydb.errors import InvalidInputError


class StoredGroup(EpisodeGroup):
    """An `EpisodeGroup` with its metadata in the buffer. Its arrays are views of the stored bytes.

    Attributes:
        positions: Position of each episode among the expected ones. They are consecutive unless
            episodes are added out of order.
        id: Id in the store. Later groups have higher ids.
        run_id: Id of the run that put it, or None.
        staleness: Policy versions behind the buffer's version when it was read; None if unknown.
        times_sampled: Number of draws that took it, including this one.
        attempts: Number of leases that ended without an ack.
        times_replaced: Number of times its content was replaced.
        times_annotated: Number of calls of `Buffer.annotate` that changed it.
        status_reason: Why it has its status, if recorded.
        leased_from: Status it had before it was leased; None if it is not leased.
        created_at: When it was put; also `completed_at`, `first_sampled_at`, `last_sampled_at` and
            `archived_at`; timezone-aware, in UTC.
        fields: Names of the extras that were read; None: all. With a name, the group may be stored
            with other extras, too, so it cannot be put.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        episodes: Mapping[int, Episode],
        context: GroupContext,
        fields: frozenset[str] | None = None,
    ) -> None:
        """Set the fields from the row of the group, and from its episodes by position."""
        self.task_name = facts["task_name"]
        self.prompt_uid = facts["prompt_uid"]
        self.group_uid = facts["group_uid"]
        self.priority = facts["priority"]
        self.status = GroupStatus(facts["group_status"])
        self.tags = facts["tags"]
        self.expected_episodes = facts["expected_episodes"]
        self.episodes = tuple(episodes.values())
        self.context = context
        self.positions = tuple(episodes)
        self.fields = fields
        self.id: int = facts["id"]
        self.run_id: int | None = facts["run_id"]
        self.staleness: int | None = facts["staleness"]
        self.times_sampled: int = facts["times_sampled"]
        self.attempts: int = facts["attempts"]
        self.times_replaced: int = facts["times_replaced"]
        self.times_annotated: int = facts["times_annotated"]
        self.status_reason: str | None = facts["status_reason"]
        leased_from = facts["leased_from"]
        self.leased_from = None if leased_from is None else GroupStatus(leased_from)
        self.created_at: datetime = facts["created_at"]
        self.completed_at: datetime | None = facts["completed_at"]
        self.first_sampled_at: datetime | None = facts["first_sampled_at"]
        self.last_sampled_at: datetime | None = facts["last_sampled_at"]
        self.archived_at: datetime | None = facts["archived_at"]

    @property
    def etag(self) -> str:
        """Text that changes with the content of the group: see `Buffer.annotate`."""
        return etag_of(self.id, self.times_replaced, self.times_annotated, len(self.episodes))

    @property
    def repeated_bytes(self) -> dict[str, int]:
        """Bytes by name of token extras that are stored again for tokens that segments share.

        A token that turns or episodes share has one value of an extra if their values are equal,
        bit for bit. Otherwise each has its own. Only extras that were read are counted. Bytes are
        those in memory, before compression. Groups in payload format 1 share no tokens.
        """
        return repeated_bytes(self.episodes)

    def without_stale_episodes(self, max_staleness: int) -> EpisodeGroup:
        """Return a copy without stale episodes, to complete an expired group with new ones.

        Lease the group with `statuses=["expired"]`, generate the episodes that are missing from
        `expected_episodes`, and put the complete group with `on_duplicate="replace"`.

        Args:
            max_staleness: Maximum staleness of the episodes to keep, in policy versions. Episodes
                of unknown version are removed.

        Returns:
            A group with the same uid, prompt and expected number of episodes, and status `aborted`.
            It can have no episodes.

        Raises:
            InvalidInputError: `max_staleness` is invalid, or only some extras of the group were
                read.
        """
        check_whole(self)
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


def check_whole(group: EpisodeGroup) -> None:
    """Check that all extras of a group were read.

    Raises:
        InvalidInputError: Others may be stored.
    """
    fields = group.fields if isinstance(group, StoredGroup) else None
    if fields is not None or not all(episode.is_whole for episode in group.episodes):
        expected = "None, so that all extras of the group are read before it is put again"
        raise InvalidInputError("fields", expected, "some" if fields is None else sorted(fields))


def id_of(group: EpisodeGroup) -> int:
    """Return the id of a group in its store; -1 if it was never stored."""
    return group.id if isinstance(group, StoredGroup) else -1
