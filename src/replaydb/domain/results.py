"""Results of read calls: frozen dataclasses with metadata, statistics and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from replaydb.domain.episodes import GroupStatus
from replaydb.domain.settings import BufferSettings


class DrawOutcome(StrEnum):
    """Outcome of one group of one draw.

    Attributes:
        SAMPLED: Drawn by `sample`, which needs no acknowledgement. The buffer does not know whether
            the trainer step was completed.
        LEASED: Still leased. The outcome is not known yet.
        ACKED: Acknowledged as used by its holder.
        NACKED: Released unused by its holder, revoked, or never delivered to a holder.
        EXPIRED: The lease expired.
        REJECTED: Rejected as unusable by its holder.
        LOST: Deleted or replaced while it was leased, or its stored bytes were damaged.
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
        id: Id of the draw. `Buffer.redraw` returns its batch again.
        run_name: Name of the run that drew.
        step: Trainer step that it was drawn for; None if none was given.
        policy: Sampling strategy, as text.
        created_at: When the groups were drawn.
        group_ids: Ids of the groups.
        probabilities: Probability of each group, see `Batch`.
        weights: Importance weight of each group, see `Batch`.
        staleness: Staleness of each group at the draw; None if it was unknown.
        outcomes: Outcome of each group; None for draws of replaydb versions that did not record it.
        outcome_reasons: Why each group was nacked, rejected or lost; None if no reason was given.
        outcome_times: When each group was sampled, acked, nacked, ...; None while it is leased.
        times_replaced: How often each group had been replaced before the draw; None if it is only
            known that it was replaced after the draw.
        task_names: Task of each group, as drawn. This and the following are None if the group was
            deleted since, or replaced by a version of replaydb that kept no copy of them.
        prompt_uids: Prompt of each group.
        reward_means: Mean reward of each group.
        group_run_names: Name of the run that put each group.
        min_policy_versions: Lowest policy version of each group.
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
    task_names: tuple[str | None, ...]
    prompt_uids: tuple[str | None, ...]
    reward_means: tuple[float | None, ...]
    group_run_names: tuple[str | None, ...]
    min_policy_versions: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class AckReport:
    """Result of an ack.

    Attributes:
        settled: Ids of the groups that this ack acknowledged, in ascending order.
        gone: Ids of the groups that the lease has lost, because another process deleted them or
            replaced their content, in ascending order. They were not acknowledged, although a
            trainer may have used them. Changes by the holder itself are not included.
    """

    settled: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """Metadata of a group, without its episodes, as `Buffer.find` returns it.

    Times are timezone-aware, in UTC. Values that do not apply or are unknown are None.

    Attributes:
        id: Id in the store. Later groups have higher ids.
        group_uid: Its uid, unique in the buffer.
        prompt_uid: Id of its prompt in the dataset.
        task_name: Its task.
        status: Its status.
        status_reason: Why it has this status, if recorded.
        run_id: Id of the run that put it.
        run_name: Name of that run.
        priority: Sampling priority.
        staleness: Policy versions behind the buffer's version. It is constant once the group is
            expired, failed, filtered or archived.
        min_policy_version: Lowest policy version that generated a token.
        max_policy_version: Highest policy version that generated a token.
        comparable_version: `min_policy_version` if its run is of the lineage that the buffer
            follows.
        num_episodes: Number of episodes stored so far.
        expected_episodes: Number of episodes that complete it.
        min_episodes: Number of episodes that is enough at the deadline.
        deadline: When it stops to accept episodes.
        num_tokens: Number of tokens of all episodes, prompts included.
        num_bytes: Stored size of the episodes in bytes; 0 if they were dropped.
        has_transcript: Whether an episode has text.
        reward_mean: Mean of the rewards of the episodes.
        reward_std: Population standard deviation of the rewards.
        reward_min: Lowest reward of an episode.
        reward_max: Highest reward of an episode.
        times_sampled: Number of draws, except leases that were released without an ack.
        times_replaced: Number of times its content was replaced.
        times_annotated: Number of calls of `Buffer.annotate` that changed it.
        attempts: Number of leases that ended without an ack.
        lease_id: Id of its lease.
        leased_from: Status it had before the lease, and gets back if it is released.
        tags: JSON values by name.
        created_at: When it was put or opened.
        completed_at: When its last episode was stored.
        first_sampled_at: When it was first drawn.
        last_sampled_at: When it was last drawn.
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
    times_annotated: int
    attempts: int
    lease_id: int | None
    leased_from: GroupStatus | None
    tags: Mapping[str, Any]
    created_at: datetime
    completed_at: datetime | None
    first_sampled_at: datetime | None
    last_sampled_at: datetime | None
    archived_at: datetime | None

    @property
    def etag(self) -> str:
        """Text that changes with the content of the group: see `Buffer.annotate`."""
        return etag_of(self.id, self.times_replaced, self.times_annotated, self.num_episodes)


def etag_of(group_id: int, times_replaced: int, times_annotated: int, num_episodes: int) -> str:
    """Return text that identifies the content of a group."""
    return f"{group_id}.{times_replaced}.{times_annotated}.{num_episodes}"


@dataclass(frozen=True, slots=True)
class EpisodeInfo:
    """Metadata of an episode, without its tokens. It stays if the tokens are dropped.

    Attributes:
        group_id: Id of its group.
        position: Index in its group, from 0.
        reward: Its reward, or None.
        advantage: The advantage that was put with it, or None.
        num_tokens: Number of tokens of its training rows, prompts included.
        longest_row: Number of tokens of the longest of these rows. None if the episode was stored
            before revision 0014; `num_tokens` is then that of all turns.
        num_loss_tokens: Number of tokens in the loss, in turns that are trained on.
        num_turns: Number of turns; 1 if it was not built from turns.
        min_policy_version: Lowest policy version that generated a token; None if unknown.
        max_policy_version: Highest policy version that generated a token; None if unknown.
        finish_reason: Why generation ended, as reported by the inference engine.
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
    longest_row: int | None


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """Statistics of the stored groups of one prompt in one task.

    Groups that were deleted, or renewed by a put, are not counted, nor are their draws.

    Attributes:
        prompt_uid: Id of the prompt.
        task_name: Its task.
        num_groups: Number of groups generated from it.
        num_episodes: Number of episodes of these groups.
        times_sampled: Number of draws of its groups, except released leases.
        num_groups_sampled: Number of groups drawn at least once.
        num_expired: Number of groups that became too stale.
        num_filtered: Number of groups that were filtered or rejected.
        num_failed: Number of groups that failed.
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
    """An active lease, or, if requested, an expired lease with groups that are not released yet.

    Attributes:
        id: Id of the lease.
        owner: Name of its holder.
        acquired_at: When it was taken.
        expires_at: When it expires unless it is extended. Equal to `acquired_at` if it expired at
            an unknown time and some of its groups are already released.
        group_ids: Ids of the groups still leased, in the order of their draw.
        draw_id: Id of the draw; None if the draw was not recorded or no group is left.
        step: Trainer step of the draw; None if none was given, or if `draw_id` is None.
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
        """Number of groups still leased."""
        return len(self.group_ids)


@dataclass(frozen=True, slots=True)
class TrajectoryInfo:
    """A position of a group without an episode, or whose episode lacks a value.

    Attributes:
        group_id: Id of the group; also its `group_uid` and its `task_name`.
        position: Position in the group, from 0.
        missing: "episode", or the name of the value, such as "reward".
        num_turns: Number of turns that were appended.
        attempts: Number of claims that ended without what is missing and not on purpose.
        claim_uid: Uid of the claim that has it; None: it is not claimed.
        claimed_by: Owner of the claim.
        claimed_at: When it was claimed.
        expires_at: When the claim expires unless it is extended. If this has passed, the next claim
            or put of the task ends it.
        unusable_reason: Why it stays missing; None: it is open.
    """

    group_id: int
    group_uid: str
    task_name: str
    position: int
    missing: str
    num_turns: int
    attempts: int
    claim_uid: str | None
    claimed_by: str | None
    claimed_at: datetime | None
    expires_at: datetime | None
    unusable_reason: str | None


def has_expired(lease: Any, now: Any) -> Any:
    """Return whether a lease (a row, a `LeaseInfo`, or the columns of the table) has expired."""
    return lease.expires_at <= now


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """Summary of a buffer, as `Store.buffers` returns it.

    Attributes:
        name: Name of the buffer.
        policy_version: Its policy version.
        settings: Its settings.
        created_at: When it was created; timezone-aware, in UTC.
        num_groups: Number of groups of all statuses.
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
        lineage: Name of the run whose policy versions it continues, or its own name; None for a run
            without a given name.
        started_at: When it first wrote to the store; timezone-aware, in UTC.
        metadata: JSON object that was stored with it.
    """

    id: int
    name: str
    lineage: str | None
    started_at: datetime
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VersionTotals:
    """Statistics of the sampled groups of one run, task and policy version.

    Attributes:
        buffer_name: Name of the buffer.
        task_name: The task.
        policy_version: Lowest version that generated a token of the groups; None if unknown.
        num_groups: Number of groups.
        num_episodes: Number of episodes in these groups.
        num_tokens: Number of tokens in these episodes.
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
    """Statistics of a run: groups that are still stored, and draws that are recorded.

    If there are many, a sample is read that is spread evenly over the time of the run. Counts are
    those of the sample; `share` and `draw_share` are its approximate share of the total.

    Attributes:
        run: The run.
        share: Share of its groups that was read; 1.0: all.
        versions: Statistics of these groups by buffer, task and policy version.
        first_put_at: When the first of them was put; None if there is none.
        last_put_at: When the last of them was put.
        draw_share: Share of its draws that was read.
        num_draws: Number of draws read.
        first_step: Lowest trainer step of these draws; None if none has a step.
        last_step: Highest trainer step of these draws.
        first_draw_at: When the first of them was made.
        last_draw_at: When the last of them was made.
        drawn: Number of groups in these draws, by `(staleness, outcome)`.
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
    """Totals of the groups of one task and status.

    Attributes:
        task_name: The task.
        status: The status.
        num_groups: Number of groups.
        num_episodes: Number of episodes in these groups.
        num_tokens: Number of tokens in these episodes.
        num_bytes: Size of their payloads in bytes.
        min_staleness: Lowest staleness of the groups with a known policy version.
        mean_staleness: Mean staleness of these groups.
        max_staleness: Highest staleness of these groups.
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
    """Counters of one task.

    Attributes:
        task_name: The task.
        max_staleness: Staleness above which groups expire; None: no limit.
        num_available: Number of groups that can be drawn now.
        num_pending: Number of incremental groups that are not complete.
        num_leased: Number of leased groups.
        num_inserted: Number of groups ever put, including those that replaced a stored group.
        num_replaced: Number of groups that replaced the content of a stored group
            (`on_duplicate="replace"`).
        num_sampled: Number of groups ever drawn; a group counts once per draw.
        num_groups: Number of groups that count against capacity: all statuses except archived.
        num_tokens: Number of tokens of these groups.
        num_bytes: Size of their payloads in bytes.
        freshest: Lowest staleness of the completed groups; None if none is known.
        stalest: Highest staleness of the completed groups; None if none is known.
    """

    task_name: str
    max_staleness: int | None
    num_available: int
    num_pending: int
    num_leased: int
    num_inserted: int
    num_replaced: int
    num_sampled: int
    num_groups: int
    num_tokens: int
    num_bytes: int
    freshest: int | None
    stalest: int | None


@dataclass(frozen=True, slots=True)
class BufferStats:
    """A consistent snapshot of the counters and totals of a buffer.

    Attributes:
        name: Name of the buffer.
        policy_version: Its policy version.
        settings: Its settings.
        tasks: Counters of every task.
        totals: Totals of every task and status with groups; empty if they were not requested.
        limited_inserts: Groups put since the rate limit was set; 0 without a rate limit.
        limited_samples: Groups drawn since the rate limit was set; 0 without a rate limit.
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
        """Number of groups of all tasks and statuses, from `totals`."""
        return sum(total.num_groups for total in self.totals)


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Packs that `Store.prune` found, and deleted or rewrote unless it was a dry run.

    Attributes:
        dry_run: Whether nothing was changed.
        num_packs: Number of packs in the payload store, including those of killed puts.
        num_bytes: Their size in bytes.
        num_orphans: Number of packs that the database does not know and that are older than
            `min_age`.
        orphan_bytes: Their size in bytes.
        num_marked: Unreferenced packs that were marked for deletion longer ago than the grace
            period.
        marked_bytes: Their size in bytes.
        num_unmarked: Unreferenced packs that were not marked for deletion, as earlier versions left
            them. They are marked now. A run after the grace period deletes them.
        unmarked_bytes: Their size in bytes.
        num_compacted: Packs of which at most half was referenced, and whose rest is now in a new
            pack.
        compacted_bytes: Bytes saved by the new packs. The old packs stay for the grace period.
        num_damaged: Packs that were not compacted because they are damaged.
        refused: In a dry run, the text of the `PayloadsReadOnlyError` that any other run would
            raise, because another copy of the database owns the payloads; otherwise None.
    """

    dry_run: bool
    num_packs: int = 0
    num_bytes: int = 0
    num_orphans: int = 0
    orphan_bytes: int = 0
    num_marked: int = 0
    marked_bytes: int = 0
    num_unmarked: int = 0
    unmarked_bytes: int = 0
    num_compacted: int = 0
    compacted_bytes: int = 0
    num_damaged: int = 0
    refused: str | None = None

    @property
    def freed_bytes(self) -> int:
        """Bytes freed in total, now or after the grace period of compacted and marked packs."""
        now = self.orphan_bytes + self.marked_bytes
        return now + self.unmarked_bytes + self.compacted_bytes


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of `replaydb.operations.examine`.

    Attributes:
        level: "good"; "warning": a cost now or later; "bad": data or calls are at risk.
        subject: What was checked.
        text: What was found.
        fix: What to do about it. None if nothing needs to be done.
    """

    level: Literal["good", "warning", "bad"]
    subject: str
    text: str
    fix: str | None = None
