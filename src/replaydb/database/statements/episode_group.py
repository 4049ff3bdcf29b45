"""Statements on rows of groups: reads, inserts, updates and deletes."""

from __future__ import annotations

from collections.abc import Mapping
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
    case,
    cast,
    delete,
    func,
    insert,
    literal_column,
    null,
    select,
    type_coerce,
    union_all,
    update,
)

from replaydb.database.runtime.prepared import prepared
from replaydb.database.statements.candidates import Order
from replaydb.database.statements.selections import comparable_runs, selection, too_stale
from replaydb.database.tables.expressions import among, as_stored, comes_after, total
from replaydb.database.tables.schema import episode_group, group
from replaydb.database.tables.staleness import IS_LIVE, LIVE, current_staleness
from replaydb.domain.episodes import GroupStatus

_FACTS = (
    group.id,
    group.run_id,
    group.group_uid,
    group.prompt_uid,
    group.task_name,
    group.group_status,
    group.leased_from,
    current_staleness().label("staleness"),
    group.comparable_version,
    group.priority,
    group.num_episodes,
    group.expected_episodes,
    group.num_tokens,
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
#: Columns of a group that scheduling uses.
SCALARS = (
    group.id,
    group.task_name,
    group.group_status,
    group.leased_from,
    current_staleness().label("staleness"),
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


@prepared
def select_known_uids(buffer_id: Any, uids: Any) -> Select[Any]:
    """Select the ids of groups that are in the buffer, by uid."""
    return select(group.group_uid, group.id).where(
        group.buffer_id == buffer_id, among(group.group_uid, uids)
    )


def select_ids(condition: ColumnElement[bool]) -> Select[int]:
    """Select the ids of groups, in order."""
    return select(group.id).where(condition).order_by(group.id)


@prepared
def select_facts(buffer_id: Any, ids: Any) -> Select[Any]:
    """Select the rows of groups, without payloads, by id."""
    return select(*_FACTS).where(selection(buffer_id, ids=ids))


def select_scalars(condition: ColumnElement[bool]) -> Select[Any]:
    """Select the scalars of groups that scheduling uses, in order of ids."""
    return select(*SCALARS).where(condition).order_by(group.id)


@prepared
def select_scalars_by_id(buffer_id: Any, ids: Any) -> Select[Any]:
    """Select the scalars of groups that scheduling uses, by id, in order of ids."""
    return select_scalars(selection(buffer_id, ids=ids))


@prepared
def select_tags(ids: Any) -> Select[Any]:
    """Select the tags of groups by id."""
    return select(group.id, as_stored(group.tags).label("tags")).where(among(group.id, ids))


@prepared
def select_kept_on_replace(ids: Any) -> Select[Any]:
    """Select the columns that groups keep when their content is replaced.

    In addition, their task, and why they were archived: `is_consumed` or `is_evicted`.
    """
    return _select_kept().where(among(group.id, ids))


@prepared
def select_kept_by_uid(buffer_id: Any, uids: Any) -> Select[Any]:
    """As `select_kept_on_replace`, by uid."""
    return _select_kept().where(group.buffer_id == buffer_id, among(group.group_uid, uids))


def _select_kept() -> Select[Any]:
    is_archived = group.group_status == GroupStatus.ARCHIVED.value
    return select(
        group.id,
        group.group_uid,
        group.task_name,
        group.attempts,
        group.created_at,
        (group.times_replaced + 1).label("times_replaced"),
        (is_archived & ~group.is_evicted).label("is_consumed"),
        (is_archived & group.is_evicted).label("is_evicted"),
    )


def select_sums(condition: ColumnElement[bool]) -> Select[Any]:
    """Select the contribution of groups to task counters, per task and status.

    `num_drawn` is the number of groups that were ever drawn.
    """
    return (
        select(
            group.task_name,
            group.group_status,
            func.count().label("num_groups"),
            func.sum(group.weight).label("weight"),
            total(group.num_tokens, "num_tokens"),
            total(group.num_bytes, "num_bytes"),
            func.count(group.first_sampled_at).label("num_drawn"),
        )
        .where(condition)
        .group_by(group.task_name, group.group_status)
    )


@cache
def insert_groups() -> Insert:
    """Insert groups, given as dicts of their columns."""
    return insert(episode_group)


def update_groups(condition: ColumnElement[bool], values: Mapping[Any, Any]) -> Update:
    """Set the same values for all groups that meet a condition."""
    return update(episode_group).where(condition).values(dict(values))


@cache
def update_each_group() -> Update:
    """Update groups, given as dicts of `group_id` and the columns to change."""
    return update(episode_group).where(group.id == bindparam("group_id"))


@prepared
def archive_groups(ids: Any, reason: Any, now: Any) -> Update:
    """Archive groups."""
    values = {
        group.group_status: GroupStatus.ARCHIVED.value,
        group.lease_id: None,
        group.leased_from: None,
        group.status_reason: reason,
        group.archived_at: now,
        group.deadline: None,
        group.is_evicted: False,
    }
    return update(episode_group).where(among(group.id, ids)).values(values)


@prepared
def archive_scalars(ids: Any, reason: Any, now: Any, is_evicted: Any) -> Update:
    """Archive groups whose payloads are deleted."""
    values = {group.has_transcript: False, group.num_bytes: 0, group.is_evicted: is_evicted}
    return archive_groups.build(ids, reason, now).values(values)


@prepared
def mark_completed(ids: Any, now: Any) -> Update:
    """Set the time of completion of groups that do not have one."""
    missing = among(group.id, ids) & group.completed_at.is_(None)
    return update(episode_group).where(missing).values({group.completed_at: now})


_NOW = group.last_sampled_at.type


@prepared
def mark_leased(ids: Any, lease: Any, now: Any, policy_version: Any) -> Update:
    """Lease groups. This counts as a draw unless the groups are released unused."""
    values = {
        # The staleness of expired and failed groups has not been updated since they became so.
        group.staleness: policy_version - group.comparable_version,
        group.leased_from: group.group_status,
        group.group_status: GroupStatus.LEASED.value,
        group.lease_id: lease,
    }
    return mark_sampled.build(ids, now).values(values)


@prepared
def claim_groups(ids: Any, lease: Any) -> Update:
    """Claim pending groups for a lease. Their status stays pending."""
    return update(episode_group).where(among(group.id, ids)).values({group.lease_id: lease})


@prepared
def mark_sampled(ids: Any, now: Any) -> Update:
    """Count one draw of each group."""
    return (
        update(episode_group).where(among(group.id, ids)).values(_sampled(type_coerce(now, _NOW)))
    )


@cache
def mark_sampled_and_rekey(order: Order) -> Update:
    """Count one draw of groups, and set new keys: dicts of `group_id`, `new_key` and `now`."""
    return rekey(order).values(_sampled(bindparam("now", type_=_NOW)))


@cache
def rekey(order: Order) -> Update:
    """Set new keys of groups that were passed over: dicts of `group_id` and `new_key`."""
    return (
        update(episode_group)
        .where(group.id == bindparam("group_id"))
        .values({order.column: bindparam("new_key", type_=order.column.type)})
    )


def _sampled(now: ColumnElement[Any]) -> dict[Any, Any]:
    return {
        group.times_sampled: group.times_sampled + 1,
        group.first_sampled_at: func.coalesce(group.first_sampled_at, now),
        group.last_sampled_at: now,
    }


def relate_versions(buffer_id: int, lineage: str, policy_version: int) -> tuple[Update, ...]:
    """Set which groups have a comparable version when a buffer begins to follow a lineage.

    Versions of the groups themselves do not change, nor does the staleness of groups that no
    longer age.
    """
    comparable = comparable_runs(lineage)
    mine = (group.buffer_id == buffer_id) & group.run_id.in_(comparable)
    others = (group.buffer_id == buffer_id) & group.run_id.not_in(comparable)
    changed = group.comparable_version.is_distinct_from(group.min_policy_version)
    known = group.comparable_version.is_not(None)

    def related(version: ColumnElement[int]) -> dict[Any, Any]:
        staleness = case((IS_LIVE, policy_version - version), else_=group.staleness)
        return {group.comparable_version: version, group.staleness: staleness}

    return (
        update_groups(mine & changed, related(group.min_policy_version)),
        update_groups(others & known, related(cast(null(), BigInteger()))),
    )


@prepared
def select_too_stale(
    buffer_id: Any, task_name: Any, status: Any, oldest_fresh: Any, most: Any
) -> Select[Any]:
    """Select the scalars of up to `most` idle groups of a task whose oldest version is too old."""
    condition = too_stale(buffer_id, task_name, oldest_fresh) & (group.group_status == status)
    in_order = group.comparable_version, group.id
    return select(*SCALARS).where(condition).order_by(*in_order).limit(most)


@prepared
def select_all_too_stale(
    buffer_id: Any, task_name: Any, status: Any, oldest_fresh: Any, most: Any
) -> Select[Any]:
    """As `select_too_stale`, but only groups whose newest version is too old as well."""
    some = select_too_stale.build(buffer_id, task_name, status, oldest_fresh, most)
    return some.where(group.max_policy_version < oldest_fresh)


@prepared
def expire_groups(ids: Any, reason: Any, policy_version: Any) -> Update:
    """Expire groups, with their final staleness."""
    values = {
        group.group_status: GroupStatus.EXPIRED.value,
        group.status_reason: reason,
        group.staleness: policy_version - group.comparable_version,
    }
    return update(episode_group).where(among(group.id, ids)).values(values)


@prepared
def select_end_of_step(buffer_id: Any, task_name: Any, after: Any, skip: Any) -> Select[int]:
    """Select an id up to which a task has `skip + 1` live groups of some status, after another id.

    NULL if it has fewer of every status.
    """
    ends = []
    for status in LIVE:
        value: ColumnElement[str] = literal_column(repr(status))
        ends.append(
            select(group.id)
            .where(
                group.buffer_id == buffer_id,
                group.task_name == task_name,
                comes_after(group.group_status, value, group.id, after),
            )
            .order_by(group.group_status, group.id)
            .limit(1)
            .offset(skip)
            .subquery()
        )
    found = union_all(*(select(end.c.id) for end in ends)).subquery()
    return select(func.min(found.c.id))


@prepared
def age_groups(of_buffer: Any, of_task: Any, after: Any, last: Any, policy_version: Any) -> Update:
    """Update the staleness of live groups of a task, in a range of ids."""
    return _aged(policy_version).where(
        group.buffer_id == of_buffer,
        group.task_name == of_task,
        group.id > after,
        group.id <= last,
    )


@prepared
def age_groups_by_id(ids: Any, policy_version: Any) -> Update:
    """Update the staleness of live groups by id."""
    return _aged(policy_version).where(among(group.id, ids))


def _aged(policy_version: ColumnElement[int]) -> Update:
    staleness = policy_version - group.comparable_version
    behind = IS_LIVE & group.staleness.is_distinct_from(staleness)
    return update(episode_group).where(behind).values({group.staleness: staleness})


def delete_groups(condition: ColumnElement[bool]) -> Delete:
    """Delete groups and everything that belongs to them."""
    return delete(episode_group).where(condition)


@prepared
def delete_groups_by_id(ids: Any) -> Delete:
    """Delete groups, by id, and everything that belongs to them."""
    return delete(episode_group).where(among(group.id, ids))
