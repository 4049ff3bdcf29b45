"""What the calls that look into a store return: plain frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from replaydb.episodes import GroupStatus
from replaydb.settings import BufferSettings


class DrawOutcome(StrEnum):
    """What became of one group of one draw.

    Attributes:
        SAMPLED: It was handed out by `sample`, which asks nothing back: whether the step it was
            for survived is not known to the buffer.
        LEASED: Somebody holds it; the outcome is still to come.
        ACKED: Its holder said that it was used.
        NACKED: Its holder gave it back, it never reached a holder, or it was revoked.
        EXPIRED: Its lease ran out.
        REJECTED: Its holder refused it for good.
        LOST: It was deleted or replaced while it was held, or its stored bytes were damaged.
    """

    SAMPLED = "sampled"
    LEASED = "leased"
    ACKED = "acked"
    NACKED = "nacked"
    EXPIRED = "expired"
    REJECTED = "rejected"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class DrawInfo:
    """One draw: which groups trained which step. All sequences are in the order of the batch.

    Attributes:
        id: Id of the draw; `Buffer.redraw` makes its batch again.
        run_name: Name of the run that drew.
        step: The trainer step it was drawn for; None where none was given.
        policy: The sampling policy, as text.
        created_at: When the groups were drawn.
        group_ids: Ids of the groups.
        probabilities: Probability of each group, see `Batch`.
        weights: Importance weight of each group, see `Batch`.
        staleness: Staleness of each group at the draw; None where it was unknown.
        outcomes: What became of each group; None for draws of replaydb versions that did not
            record it.
        outcome_reasons: Why each was nacked, rejected or lost; None where no reason was given.
        outcome_times: When each was sampled, acked, nacked, ...; None while it is leased.
        times_replaced: How often each group had been replaced before the draw; None where it is
            known only that it was replaced since.
    """

    id: int
    run_name: str | None
    step: int | None
    policy: str
    created_at: datetime
    group_ids: tuple[int, ...]
    probabilities: tuple[float, ...]
    weights: tuple[float, ...]
    staleness: tuple[int | None, ...]
    outcomes: tuple[DrawOutcome | None, ...]
    outcome_reasons: tuple[str | None, ...]
    outcome_times: tuple[datetime | None, ...]
    times_replaced: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What is known of a group without reading its episodes, as `Buffer.find` returns it.

    Times are aware, in UTC. What does not apply to a group, or is not known of it, is None.

    Attributes:
        id: Identity within the store, ascending in the order of arrival.
        group_uid: Its uid, unique in the buffer.
        prompt_uid: Its prompt.
        task_name: Its task.
        status: Where it is in its life.
        status_reason: Why, where there is something to say.
        run_id: The run that put it.
        run_name: Name of that run.
        priority: Weight of prioritized sampling.
        staleness: Policy versions behind the buffer's; of groups that do not age any more, when
            they ceased to.
        min_policy_version: Oldest policy version that made a token.
        max_policy_version: Newest policy version that made a token.
        comparable_version: `min_policy_version`, where the run is of the lineage that the buffer
            follows.
        num_episodes: Episodes that have arrived.
        expected_episodes: Episodes that complete it.
        min_episodes: Episodes that are enough when the deadline has passed.
        deadline: When its episodes are no longer waited for.
        num_tokens: Tokens of all episodes, prompts included.
        num_bytes: Stored size of the episodes; 0 where they are gone.
        has_transcript: Whether an episode has text.
        reward_mean: Mean of the rewards of the episodes.
        reward_std: Population standard deviation of the rewards.
        reward_min: Lowest reward of an episode.
        reward_max: Highest reward of an episode.
        times_sampled: Draws that took it and did not give it back.
        times_replaced: How often other content took its place.
        attempts: Leases that ended without an ack.
        lease_id: The lease that holds it.
        leased_from: The status it had before, which a nack gives back to it.
        tags: JSON that it was put with.
        created_at: When it was put, or opened.
        completed_at: When the last of its episodes arrived.
        first_sampled_at: When it was drawn for the first time.
        last_sampled_at: When it was drawn for the last time.
        archived_at: When it was archived.
    """

    id: int
    group_uid: str
    prompt_uid: str | None
    task_name: str
    status: GroupStatus
    status_reason: str | None
    run_id: int | None
    run_name: str | None
    priority: float
    staleness: int | None
    min_policy_version: int | None
    max_policy_version: int | None
    comparable_version: int | None
    num_episodes: int
    expected_episodes: int | None
    min_episodes: int | None
    deadline: datetime | None
    num_tokens: int
    num_bytes: int
    has_transcript: bool
    reward_mean: float | None
    reward_std: float | None
    reward_min: float | None
    reward_max: float | None
    times_sampled: int
    times_replaced: int
    attempts: int
    lease_id: int | None
    leased_from: GroupStatus | None
    tags: Mapping[str, Any]
    created_at: datetime
    completed_at: datetime | None
    first_sampled_at: datetime | None
    last_sampled_at: datetime | None
    archived_at: datetime | None


@dataclass(frozen=True, slots=True)
class EpisodeInfo:
    """What is known of an episode without reading its tokens, also where these were dropped.

    Attributes:
        group_id: Its group.
        position: Its place in that group, from 0.
        reward: Its reward; None where it has none.
        advantage: The advantage that it was put with; None where there was none.
        num_tokens: Its tokens, prompts included.
        num_loss_tokens: Tokens that the loss mask lets through.
        num_turns: Its turns; 1 where it was not built from turns.
        min_policy_version: Oldest policy version that made a token; None where unknown.
        max_policy_version: Newest policy version that made a token; None where unknown.
        finish_reason: Why it ended, in the words of the inference engine.
    """

    group_id: int
    position: int
    reward: float | None
    advantage: float | None
    num_tokens: int
    num_loss_tokens: int
    num_turns: int
    min_policy_version: int | None
    max_policy_version: int | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """What became of the groups of one prompt of one task; deleted groups are not counted.

    Attributes:
        prompt_uid: The prompt.
        task_name: Its task.
        num_groups: Groups generated from it.
        num_episodes: Episodes of these groups.
        times_sampled: Draws of its groups that were not given back.
        num_groups_sampled: Groups that were drawn at least once.
        num_expired: Groups that became too stale.
        num_filtered: Groups that were rejected.
        num_failed: Groups that failed.
        reward_mean: Mean over groups of the mean reward.
        reward_min: Lowest reward of an episode.
        reward_max: Highest reward of an episode.
        last_put_at: When the newest group was put.
    """

    prompt_uid: str
    task_name: str
    num_groups: int
    num_episodes: int
    times_sampled: int
    num_groups_sampled: int
    num_expired: int
    num_filtered: int
    num_failed: int
    reward_mean: float | None
    reward_min: float | None
    reward_max: float | None
    last_put_at: datetime


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease that has not expired, or, where that was asked for, whose groups are not back yet.

    Attributes:
        id: Id of the lease.
        owner: Who holds it.
        acquired_at: When it was taken.
        expires_at: When it ends, unless it is extended; `acquired_at` where it ended at some time
            and some of its groups are back.
        group_ids: The groups it still holds, in the order of their draw.
        draw_id: The draw that took them; None where it was not recorded, or no group is left.
        step: The trainer step of that draw; None where none was given.
    """

    id: int
    owner: str
    acquired_at: datetime
    expires_at: datetime
    group_ids: tuple[int, ...]
    draw_id: int | None
    step: int | None

    @property
    def num_groups(self) -> int:
        """How many groups it still holds."""
        return len(self.group_ids)


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """A buffer as `Store.buffers` lists it.

    Attributes:
        name: Name of the buffer.
        policy_version: Its policy version.
        settings: Its settings.
        created_at: When it was made; aware, in UTC.
        num_groups: Groups of every status.
    """

    name: str
    policy_version: int
    settings: BufferSettings
    created_at: datetime
    num_groups: int


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A training or generation job.

    Attributes:
        id: Id of the run in its store.
        name: Name of the run.
        lineage: The run whose policy versions its own continue, or its own name; None where it was
            not named.
        started_at: When it first wrote something; aware, in UTC.
        metadata: JSON that came with it.
    """

    id: int
    name: str
    lineage: str | None
    started_at: datetime
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VersionTotals:
    """Groups that a run put, of one task and one policy version, as far as they were looked at.

    Attributes:
        buffer_name: The buffer they are in.
        task_name: Their task.
        policy_version: The oldest version that made a token of them; None where unknown.
        num_groups: How many groups.
        num_episodes: How many episodes they hold.
        num_tokens: How many tokens those hold.
        reward_mean: Mean over groups of the mean reward of their episodes.
    """

    buffer_name: str
    task_name: str
    policy_version: int | None
    num_groups: int
    num_episodes: int
    num_tokens: int
    reward_mean: float | None


@dataclass(frozen=True, slots=True)
class RunStats:
    """What a run put and drew, of groups that are still there and draws that are recorded.

    Of many groups or draws a part is looked at, spread evenly over the time of the run: counts are
    of that part, and `share` and `draw_share` say how much of all it is, about.

    Attributes:
        run: The run.
        share: Part of its groups that was looked at; 1.0: all of them.
        versions: These, by buffer, task and policy version.
        first_put_at: When the first of them was put; None where there is none.
        last_put_at: When the last of them was put.
        draw_share: Part of its draws that was looked at.
        num_draws: How many these are.
        first_step: The lowest step that one of them was for; None where none was for one.
        last_step: The highest.
        first_draw_at: When the first of them was made.
        last_draw_at: When the last of them was made.
        drawn: How many of their groups were how stale, and what became of them.
    """

    run: RunInfo
    share: float
    versions: tuple[VersionTotals, ...]
    first_put_at: datetime | None
    last_put_at: datetime | None
    draw_share: float
    num_draws: int
    first_step: int | None
    last_step: int | None
    first_draw_at: datetime | None
    last_draw_at: datetime | None
    drawn: Mapping[tuple[int | None, DrawOutcome | None], int]


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """The groups of one task and status.

    Attributes:
        task_name: The task.
        status: The status.
        num_groups: How many groups.
        num_episodes: How many episodes they hold.
        num_tokens: How many tokens those hold.
        num_bytes: Bytes of their payloads.
        min_staleness: Lowest staleness, of the groups whose policy version is known.
        mean_staleness: Mean staleness of those groups.
        max_staleness: Highest staleness of those groups.
        reward_mean: Mean over groups of the mean reward of their episodes.
    """

    task_name: str
    status: GroupStatus
    num_groups: int
    num_episodes: int
    num_tokens: int
    num_bytes: int
    min_staleness: int | None
    mean_staleness: float | None
    max_staleness: int | None
    reward_mean: float | None


@dataclass(frozen=True, slots=True)
class TaskCounters:
    """What happened to one task since the buffer was made.

    Attributes:
        task_name: The task.
        max_staleness: Groups staler than this expire.
        num_available: Groups that can be drawn now.
        num_pending: Groups whose episodes still arrive.
        num_leased: Groups that somebody holds.
        num_inserted: Groups ever put.
        num_sampled: How often its groups were drawn; a group counts once for each draw.
        num_groups: Groups that count against capacity: of every status but archived.
        num_tokens: Tokens of these.
        num_bytes: Bytes of their payloads.
        freshest: Lowest staleness of the completed groups; None where none is known.
        stalest: Highest staleness of these.
    """

    task_name: str
    max_staleness: int | None
    num_available: int
    num_pending: int
    num_leased: int
    num_inserted: int
    num_sampled: int
    num_groups: int
    num_tokens: int
    num_bytes: int
    freshest: int | None
    stalest: int | None


@dataclass(frozen=True, slots=True)
class BufferStats:
    """A buffer at one moment.

    Attributes:
        name: The buffer.
        policy_version: Its policy version.
        settings: Its settings.
        tasks: Counters of every task.
        totals: Sizes of every task and status that has groups; none where they were not asked for.
        limited_inserts: Groups put since the rate limit was set; 0 where there is none.
        limited_samples: Groups drawn since the rate limit was set; 0 where there is none.
    """

    name: str
    policy_version: int
    settings: BufferSettings
    tasks: tuple[TaskCounters, ...]
    totals: tuple[GroupTotals, ...]
    limited_inserts: int
    limited_samples: int

    @property
    def num_groups(self) -> int:
        """Groups of any task and status, by `totals`."""
        return sum(total.num_groups for total in self.totals)


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What `Store.prune` has found outside the database, and removed unless it was a dry run.

    Attributes:
        dry_run: Whether nothing was removed or written.
        num_packs: Packs that are there, with what killed writes have left.
        num_bytes: Bytes of these.
        num_orphans: Those of them that belong to nothing, and are old enough to be sure.
        orphan_bytes: Bytes of these.
        num_condemned: Packs to which nothing refers any more, and whose grace is over.
        condemned_bytes: Bytes of these.
        num_unmarked: Packs to which nothing refers, but which were not marked for deletion, as
            earlier versions left them. They are marked now; a run after their grace removes them.
        unmarked_bytes: Bytes of these.
        num_compacted: Packs of which at most half was of use, and whose rest is in a new pack.
        compacted_bytes: Bytes less in the new ones. The old ones stay for their grace.
        num_damaged: Packs that were to be compacted, but are damaged: they stay as they are.
    """

    dry_run: bool
    num_packs: int = 0
    num_bytes: int = 0
    num_orphans: int = 0
    orphan_bytes: int = 0
    num_condemned: int = 0
    condemned_bytes: int = 0
    num_unmarked: int = 0
    unmarked_bytes: int = 0
    num_compacted: int = 0
    compacted_bytes: int = 0
    num_damaged: int = 0

    @property
    def freed_bytes(self) -> int:
        """Bytes that go, at once or after the grace of what was compacted or marked."""
        now = self.orphan_bytes + self.condemned_bytes
        return now + self.unmarked_bytes + self.compacted_bytes


@dataclass(frozen=True, slots=True)
class Finding:
    """What `replaydb.operations.examine` has found out about one thing.

    Attributes:
        level: "good"; "warning": it costs something, or will; "bad": data or calls are at risk.
        subject: What it is about.
        text: What was found.
        mend: What mends it; None where nothing is to be mended.
    """

    level: Literal["good", "warning", "bad"]
    subject: str
    text: str
    mend: str | None = None
