"""Groups, their episodes and payloads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Delete,
    Insert,
    Select,
    Update,
    bindparam,
    cast,
    delete,
    func,
    insert,
    literal,
    select,
    true,
    update,
)

from replaydb.database.expressions import among, as_stored
from replaydb.database.prepared import prepared
from replaydb.database.schema import (
    IDLE,
    IS_IDLE,
    episode,
    episode_group,
    group,
    payload,
    run,
    transcript,
)
from replaydb.episodes import GroupStatus
from replaydb.settings import ExpireBy

#: Statuses whose groups age as the policy advances; the others keep the staleness they ended with.
LIVE = tuple(
    status.value
    for status in (
        GroupStatus.PENDING,
        GroupStatus.COMPLETED,
        GroupStatus.LEASED,
        GroupStatus.ABORTED,
    )
)
_FACTS = (
    group.id,
    group.run_id,
    group.group_uid,
    group.prompt_uid,
    group.task_name,
    group.group_status,
    group.leased_from,
    group.staleness,
    group.priority,
    group.num_episodes,
    group.expected_episodes,
    group.num_bytes,
    group.times_sampled,
    group.attempts,
    group.has_transcript,
    as_stored(group.tags).label("tags"),  # the driver refuses text that is no UTF-8
    group.status_reason,
    group.created_at,
    group.completed_at,
    group.first_sampled_at,
    group.last_sampled_at,
    group.archived_at,
    group.times_replaced,
)
#: What scheduling needs to know of a group.
SCALARS = (
    group.id,
    group.task_name,
    group.group_status,
    group.leased_from,
    group.staleness,
    group.comparable_version,
    (group.max_policy_version - group.min_policy_version).label("version_span"),
    group.priority,
    group.weight,
    group.times_sampled,
    group.attempts,
    group.num_episodes,
    group.expected_episodes,
    group.min_episodes,
    group.num_tokens,
    group.num_bytes,
    group.has_transcript,
    group.times_replaced,
)
#: Statuses from which a group expires; what is pending or leased is in somebody's hands.
EXPIRING = tuple(status.value for status in IDLE)


@prepared
def known_uids(buffer_id: Any, uids: Any) -> Select[Any]:
    """Ids of the groups that the buffer already holds."""
    return select(group.group_uid, group.id).where(
        group.buffer_id == buffer_id, among(group.group_uid, uids)
    )


@cache
def insert_groups() -> Insert:
    """Groups, as dicts of their columns."""
    return insert(episode_group)


@cache
def insert_episodes() -> Insert:
    """Episodes, as dicts of their columns."""
    return insert(episode)


@cache
def insert_payloads() -> Insert:
    """Payload parts, as dicts of their columns."""
    return insert(payload)


@cache
def insert_transcripts() -> Insert:
    """Texts, as dicts of their columns."""
    return insert(transcript)


def selection(
    buffer_id: int,
    *,
    ids: Sequence[int] | None = None,
    uids: Sequence[str] | None = None,
    tasks: Collection[str] | None = None,
    statuses: Collection[str] | None = None,
    where: ColumnElement[bool] | None = None,
) -> ColumnElement[bool]:
    """The groups of a buffer that meet every condition given."""
    condition = group.buffer_id == buffer_id
    if ids is not None:
        # SQLite, which has no statistics, would take any index of buffers before that of ids.
        condition = (group.buffer_id + 0 == buffer_id) & among(group.id, ids)
    if uids is not None:
        condition &= among(group.group_uid, uids)
    if tasks is not None:
        condition &= of_tasks(tasks)
    if statuses is not None:
        condition &= among(group.group_status, sorted(statuses))
    return condition if where is None else condition & where


def of_tasks(names: Collection[str]) -> ColumnElement[bool]:
    """The groups of some tasks."""
    return among(group.task_name, sorted(names))


@prepared
def facts(buffer_id: Any, ids: Any) -> Select[Any]:
    """What is known of some groups without reading their payloads."""
    return select(*_FACTS).where(selection(buffer_id, ids=ids))


@prepared
def payloads(ids: Any) -> Select[Any]:
    """Parts of the payloads of some groups."""
    return select(payload).where(among(payload.c.group_id, ids))


def positions(ids: Sequence[int]) -> Select[Any]:
    """Which episodes of some groups there are."""
    return select(episode.c.group_id, episode.c.position).where(among(episode.c.group_id, ids))


def episodes_of(ids: Sequence[int]) -> Select[Any]:
    """What the scalars of groups are made from, in the order of the episodes."""
    columns = (
        episode.c.group_id,
        episode.c.reward,
        episode.c.num_tokens,
        episode.c.min_policy_version,
        episode.c.max_policy_version,
    )
    return (
        select(*columns)
        .where(among(episode.c.group_id, ids))
        .order_by(episode.c.group_id, episode.c.position)
    )


def past_deadline(buffer_id: int, tasks: Collection[str], now: datetime) -> ColumnElement[bool]:
    """Groups of some tasks that should have had all their episodes by now."""
    return (
        (group.buffer_id == buffer_id)
        & (group.deadline <= now)
        & (group.group_status == GroupStatus.PENDING.value)
        & among(group.task_name, sorted(tasks))
    )


@prepared
def transcripts(ids: Any) -> Select[Any]:
    """Texts of the episodes of some groups."""
    return select(transcript).where(among(transcript.c.group_id, ids))


def count(condition: ColumnElement[bool]) -> Select[int]:
    """How many."""
    return select(func.count()).select_from(episode_group).where(condition)


def count_up_to(condition: ColumnElement[bool], most: int) -> Select[int]:
    """How many, reading no more of them than so many."""
    some = select(group.id).where(condition).limit(most).subquery()
    return select(func.count()).select_from(some)


def count_ahead(
    buffer_id: int,
    tasks: Collection[str] | None,
    putters: ColumnElement[bool],
    max_staleness: int,
) -> Select[int]:
    """Groups that are still to be trained: arriving, leased, or never drawn."""
    in_hand = (GroupStatus.PENDING.value, GroupStatus.LEASED.value)
    unseen = (group.group_status == GroupStatus.COMPLETED.value) & (group.times_sampled == 0)
    mine = selection(buffer_id, tasks=tasks)
    fresh = group.staleness.is_(None) | (group.staleness <= max_staleness)
    return count(mine & (group.group_status.in_(in_hand) | unseen) & fresh & putters)


def of_lineage(lineage: str | None) -> ColumnElement[bool]:
    """Groups of runs whose versions compare in a buffer that follows a lineage; None: of all."""
    if lineage is None:
        return true()
    return group.run_id.is_(None) | group.run_id.in_(_comparable_runs(lineage))


def _comparable_runs(lineage: str) -> Select[int]:
    return select(run.c.id).where((run.c.lineage == lineage) | run.c.lineage.is_(None))


def totals(buffer_id: int) -> Select[Any]:
    """Sizes and staleness of every task and status."""
    return (
        select(
            group.task_name,
            group.group_status,
            func.count().label("num_groups"),
            cast(func.sum(group.num_episodes), BigInteger).label("num_episodes"),
            cast(func.sum(group.num_tokens), BigInteger).label("num_tokens"),
            cast(func.sum(group.num_bytes), BigInteger).label("num_bytes"),
            func.min(group.staleness).label("min_staleness"),
            func.avg(group.staleness).label("mean_staleness"),
            func.max(group.staleness).label("max_staleness"),
            func.avg(group.reward_mean).label("reward_mean"),
        )
        .where(group.buffer_id == buffer_id)
        .group_by(group.task_name, group.group_status)
        .order_by(group.task_name, group.group_status)
    )


def kept_on_replace(condition: ColumnElement[bool]) -> Select[Any]:
    """What a group keeps when other content takes its place."""
    times = group.times_replaced + 1
    return select(group.id, group.attempts, group.created_at, times.label("times_replaced")).where(
        condition
    )


def sums(condition: ColumnElement[bool]) -> Select[Any]:
    """Per task and status: what groups add to an account."""
    return (
        select(
            group.task_name,
            group.group_status,
            func.count().label("num_groups"),
            func.sum(group.weight).label("weight"),
            cast(func.sum(group.num_tokens), BigInteger).label("num_tokens"),
            cast(func.sum(group.num_bytes), BigInteger).label("num_bytes"),
        )
        .where(condition)
        .group_by(group.task_name, group.group_status)
    )


def set_values(condition: ColumnElement[bool], values: Mapping[Any, Any]) -> Update:
    """Give every group selected the values named."""
    return update(episode_group).where(condition).values(dict(values))


@cache
def change() -> Update:
    """Give groups values of their own: dicts of `group_id` and the columns that change."""
    return update(episode_group).where(group.id == bindparam("group_id"))


@prepared
def archive(ids: Any, reason: Any, now: Any) -> Update:
    """Take groups out of use."""
    values = {
        group.group_status: GroupStatus.ARCHIVED.value,
        group.lease_id: None,
        group.leased_from: None,
        group.status_reason: reason,
        group.archived_at: now,
        group.deadline: None,
    }
    return update(episode_group).where(among(group.id, ids)).values(values)


@prepared
def archive_scalars(ids: Any, reason: Any, now: Any) -> Update:
    """Take groups out of use whose payloads are deleted."""
    gone = {group.has_transcript: False, group.num_bytes: 0}
    return archive.build(ids, reason, now).values(gone)


def scalars(condition: ColumnElement[bool]) -> Select[Any]:
    """What scheduling needs to know of groups, in the order of ids."""
    return select(*SCALARS).where(condition).order_by(group.id)


@prepared
def scalars_of(buffer_id: Any, ids: Any) -> Select[Any]:
    """What scheduling needs to know of groups, by their ids, in the order of ids."""
    return scalars(selection(buffer_id, ids=ids))


@prepared
def tags_of(ids: Any) -> Select[Any]:
    """Tags of some groups."""
    return select(group.id, as_stored(group.tags).label("tags")).where(among(group.id, ids))


@prepared
def completed_now(ids: Any, now: Any) -> Update:
    """Enter when groups were completed that never were before."""
    missing = among(group.id, ids) & group.completed_at.is_(None)
    return update(episode_group).where(missing).values({group.completed_at: now})


def ids(condition: ColumnElement[bool]) -> Select[int]:
    """Ids of the groups selected."""
    return select(group.id).where(condition).order_by(group.id)


@prepared
def delete_payloads(ids: Any) -> Delete:
    """Delete the payloads of groups."""
    return delete(payload).where(among(payload.c.group_id, ids))


@prepared
def delete_episodes(ids: Any) -> Delete:
    """Scalars of the episodes of some groups."""
    return delete(episode).where(among(episode.c.group_id, ids))


@prepared
def delete_transcripts(ids: Any) -> Delete:
    """Delete the texts of groups."""
    return delete(transcript).where(among(transcript.c.group_id, ids))


def delete_groups(condition: ColumnElement[bool]) -> Delete:
    """Delete groups with everything that belongs to them."""
    return delete(episode_group).where(condition)


@prepared
def erase(ids: Any) -> Delete:
    """Delete groups, by their ids, with everything that belongs to them."""
    return delete(episode_group).where(among(group.id, ids))


def too_stale(
    buffer_id: int,
    task_name: str,
    policy_version: int,
    max_staleness: int,
    expire_by: ExpireBy = "oldest_token",
) -> ColumnElement[bool]:
    """Groups of a task that its tolerance no longer covers."""
    oldest_fresh = policy_version - max_staleness
    condition = (
        (group.buffer_id == buffer_id)
        & (group.task_name == task_name)
        & IS_IDLE
        & (group.comparable_version < oldest_fresh)
    )
    if expire_by == "newest_token":  # among those few that the index has found
        condition &= group.max_policy_version < oldest_fresh
    return condition


def staleness_at(policy_version: int) -> ColumnElement[int]:
    """Staleness of a group at a policy version."""
    return literal(policy_version) - group.comparable_version


TOO_STALE = "staler than max_staleness"


def relate_versions(buffer_id: int, lineage: str) -> tuple[Update, Update]:
    """Let only versions of one lineage compare with those of a buffer that follows it from now on.

    Those of the groups stay what they were.
    """
    comparable = _comparable_runs(lineage)
    mine = (group.buffer_id == buffer_id) & group.run_id.in_(comparable)
    others = (group.buffer_id == buffer_id) & group.run_id.not_in(comparable)
    unknown = {group.comparable_version: None, group.staleness: None}
    return (
        set_values(mine, {group.comparable_version: group.min_policy_version}),
        set_values(others, unknown),
    )


def refresh_staleness(buffer_id: int, tasks: Collection[str], policy_version: int) -> Update:
    """Staleness of every live group whose version is known."""
    return (
        update(episode_group)
        .where(
            group.buffer_id == buffer_id,
            group.task_name.in_(sorted(tasks)),
            group.group_status.in_(LIVE),
            group.comparable_version.is_not(None),
        )
        .values({group.staleness: staleness_at(policy_version)})
    )
