"""Consistency checks in SQL: the engine compares the tables, only differences are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Select,
    and_,
    case,
    cast,
    exists,
    func,
    or_,
    select,
)

from replaydb.database.runtime.prepared import prepared
from replaydb.database.statements.selections import selection
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import (
    IS_IDLE,
    episode,
    episode_group,
    group,
    lease,
    metadata,
    payload,
    task,
    transcript,
)
from replaydb.database.tables.staleness import IS_LIVE
from replaydb.domain.episodes import GroupStatus


def recount_tasks(buffer_id: int) -> Select[Any]:
    """Compute the counters of the tasks of a buffer, except tasks without groups."""
    status = group.group_status
    is_stored = status != GroupStatus.ARCHIVED.value
    weight = case((status == GroupStatus.COMPLETED.value, group.weight), else_=0.0)
    return (
        select(
            group.task_name,
            _number(status == GroupStatus.COMPLETED.value).label("num_available"),
            func.sum(weight).label("total_weight"),
            _number(status == GroupStatus.PENDING.value).label("num_pending"),
            _number(status == GroupStatus.LEASED.value).label("num_leased"),
            _number(is_stored).label("stored_groups"),
            _total(case((is_stored, group.num_tokens), else_=0)).label("stored_tokens"),
            _total(case((is_stored, group.num_bytes), else_=0)).label("stored_bytes"),
        )
        .where(group.buffer_id == buffer_id)
        .group_by(group.task_name)
    )


def count_outdated(buffer_id: int, policy_version: int, by_newest: bool) -> Select[Any]:
    """Count the groups of each task whose stored staleness is wrong, or that should have expired.

    Groups that a step is still to update are not counted. Tasks without such groups are omitted.
    """
    staleness = policy_version - group.comparable_version
    is_wrong = IS_LIVE & group.staleness.is_distinct_from(staleness) & task.c.aged_to.is_(None)
    newest = group.max_policy_version if by_newest else group.comparable_version
    # An unknown version is NULL, and its group does not expire.
    is_late = IS_IDLE & ~task.c.is_expiring & (staleness > task.c.max_staleness)
    is_late &= policy_version - newest > task.c.max_staleness
    mine = (task.c.buffer_id == group.buffer_id) & (task.c.task_name == group.task_name)
    return (
        select(group.task_name, func.count().label("number"))
        .join_from(episode_group, task, mine)
        .where(group.buffer_id == buffer_id, is_wrong | is_late)
        .group_by(group.task_name)
    )


@prepared
def select_derived(ids: Any) -> Select[Any]:
    """Select the columns of groups that follow from others, by id."""
    columns = (
        group.id,
        group.buffer_id,
        group.task_name,
        group.priority,
        group.weight,
        group.reward_mean,
        group.reward_std,
        group.reward_min,
        group.reward_max,
        group.min_policy_version,
        group.max_policy_version,
        group.comparable_version,
    )
    return select(*columns).where(among(group.id, ids))


def orphans() -> Iterator[tuple[str, str, Select[int]]]:
    """Yield, for every foreign key, the names of both tables and a count of rows without parent."""
    for table in metadata.sorted_tables:
        for key in sorted(table.foreign_key_constraints, key=lambda one: str(one.name)):
            parent = key.referred_table.alias()
            pairs = [(one.parent, parent.c[one.column.name]) for one in key.elements]
            known = and_(*(mine.is_not(None) for mine, _ in pairs))
            has_parent = exists().where(*(mine == theirs for mine, theirs in pairs))
            count = select(func.count()).select_from(table).where(known, ~has_parent)
            yield table.name, key.referred_table.name, count


def select_miscounted_groups(most: int) -> Select[Any]:
    """Select groups whose scalars differ from the totals of their episodes, payloads and texts."""
    episodes = select(
        episode.c.group_id, func.count().label("number"), _total(episode.c.num_tokens).label("size")
    )
    length = func.coalesce(payload.c.pack_length, func.length(payload.c.data))
    parts = select(payload.c.group_id, func.count().label("number"), _total(length).label("size"))
    members = episodes.group_by(episode.c.group_id).subquery()
    stored = parts.group_by(payload.c.group_id).subquery()
    texts = exists().where(transcript.c.group_id == group.id)
    found = (
        func.coalesce(members.c.number, 0).label("episodes"),
        func.coalesce(members.c.size, 0).label("tokens"),
        func.coalesce(stored.c.size, 0).label("bytes"),
        texts.label("has_text"),
    )
    recorded = (group.num_episodes, group.num_tokens, group.num_bytes, group.has_transcript)
    is_lost = (
        (group.group_status != GroupStatus.ARCHIVED.value)
        & (group.num_episodes > 0)
        & stored.c.number.is_(None)
    )
    wrong = is_lost
    for one, other in zip(recorded, found, strict=True):
        wrong |= one != other.element
    return (
        select(group.id, *recorded, *found)
        .select_from(episode_group)
        .outerjoin(members, members.c.group_id == group.id)
        .outerjoin(stored, stored.c.group_id == group.id)
        .where(wrong)
        .order_by(group.id)
        .limit(most)
    )


def select_mismatched_leases(most: int) -> Select[int]:
    """Select groups whose status, lease and `leased_from` contradict each other."""
    is_leased = group.group_status == GroupStatus.LEASED.value
    is_pending = group.group_status == GroupStatus.PENDING.value  # may be claimed by a lease
    wrong = (is_leased != group.lease_id.is_not(None)) & ~is_pending
    wrong |= is_leased != group.leased_from.is_not(None)
    wrong |= lease.c.buffer_id != group.buffer_id
    return (
        select(group.id)
        .outerjoin_from(episode_group, lease, lease.c.id == group.lease_id)
        .where(wrong)
        .order_by(group.id)
        .limit(most)
    )


def select_groups_of_stray_texts(most: int) -> Select[int]:
    """Select groups with texts of episodes that do not exist."""
    text = transcript.c
    mine = (episode.c.group_id == text.group_id) & (episode.c.position == text.position)
    stray = exists().where(text.group_id == group.id, ~exists().where(mine))
    return select(group.id).where(stray).order_by(group.id).limit(most)


def select_failed_as_damaged(buffer_id: int, ids: Sequence[int] | None = None) -> Select[Any]:
    """Select failed groups of a buffer, all or by id, whose reason may be damage."""
    reason = group.status_reason
    begins = (
        reason.startswith(text, autoescape=True) for text in ("damaged (", "checksum ", "pack ")
    )
    return (
        select(group.id, reason, group.completed_at, group.num_bytes)
        .where(
            selection(buffer_id, ids=ids),
            group.group_status == GroupStatus.FAILED.value,
            or_(*begins),
        )
        .order_by(group.id)
    )


def _number(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.count(case((condition, 1)))


def _total(column: Any) -> Any:
    return cast(func.coalesce(func.sum(column), 0), BigInteger)
