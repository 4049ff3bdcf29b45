"""Groups: their rows, and how they change."""

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

from replaydb.database.expressions import among, as_stored, comes_after, total
from replaydb.database.prepared import prepared
from replaydb.database.schema import episode_group, group
from replaydb.database.staleness import IS_LIVE, LIVE, current_staleness
from replaydb.database.statements.pools import Order
from replaydb.database.statements.selections import comparable_runs, selection, too_stale
from replaydb.episodes import GroupStatus

_FACTS = (
    group.id,
    group.run_id,
    group.group_uid,
    group.prompt_uid,
    group.task_name,
    group.group_status,
    group.leased_from,
    current_staleness().label("staleness"),
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
    """Ids of the groups that the buffer already holds."""
    return select(group.group_uid, group.id).where(
        group.buffer_id == buffer_id, among(group.group_uid, uids)
    )


def select_ids(condition: ColumnElement[bool]) -> Select[int]:
    """Ids of the groups selected."""
    return select(group.id).where(condition).order_by(group.id)


@prepared
def select_facts(buffer_id: Any, ids: Any) -> Select[Any]:
    """What is known of some groups without reading their payloads."""
    return select(*_FACTS).where(selection(buffer_id, ids=ids))


def select_scalars(condition: ColumnElement[bool]) -> Select[Any]:
    """What scheduling needs to know of groups, in the order of ids."""
    return select(*SCALARS).where(condition).order_by(group.id)


@prepared
def select_scalars_by_id(buffer_id: Any, ids: Any) -> Select[Any]:
    """What scheduling needs to know of groups, by their ids, in the order of ids."""
    return select_scalars(selection(buffer_id, ids=ids))


@prepared
def select_tags(ids: Any) -> Select[Any]:
    """Tags of some groups."""
    return select(group.id, as_stored(group.tags).label("tags")).where(among(group.id, ids))


def select_kept_on_replace(condition: ColumnElement[bool]) -> Select[Any]:
    """What a group keeps when other content takes its place."""
    times = group.times_replaced + 1
    return select(group.id, group.attempts, group.created_at, times.label("times_replaced")).where(
        condition
    )


def select_sums(condition: ColumnElement[bool]) -> Select[Any]:
    """Per task and status: what groups add to an account."""
    return (
        select(
            group.task_name,
            group.group_status,
            func.count().label("num_groups"),
            func.sum(group.weight).label("weight"),
            total(group.num_tokens, "num_tokens"),
            total(group.num_bytes, "num_bytes"),
        )
        .where(condition)
        .group_by(group.task_name, group.group_status)
    )


@cache
def insert_groups() -> Insert:
    """Groups, as dicts of their columns."""
    return insert(episode_group)


def update_groups(condition: ColumnElement[bool], values: Mapping[Any, Any]) -> Update:
    """Give every group selected the values named."""
    return update(episode_group).where(condition).values(dict(values))


@cache
def update_each_group() -> Update:
    """Give groups values of their own: dicts of `group_id` and the columns that change."""
    return update(episode_group).where(group.id == bindparam("group_id"))


@prepared
def archive_groups(ids: Any, reason: Any, now: Any) -> Update:
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
    return archive_groups.build(ids, reason, now).values(gone)


@prepared
def mark_completed(ids: Any, now: Any) -> Update:
    """Enter when groups were completed that never were before."""
    missing = among(group.id, ids) & group.completed_at.is_(None)
    return update(episode_group).where(missing).values({group.completed_at: now})


_NOW = group.last_sampled_at.type


@prepared
def mark_leased(ids: Any, lease: Any, now: Any, policy_version: Any) -> Update:
    """Put groups into somebody's hands; counts as a draw until it is given back undone."""
    values = {
        # That of a group which had expired or failed was left as it was then.
        group.staleness: policy_version - group.comparable_version,
        group.leased_from: group.group_status,
        group.group_status: GroupStatus.LEASED.value,
        group.lease_id: lease,
    }
    return mark_sampled.build(ids, now).values(values)


@prepared
def claim_groups(ids: Any, lease: Any) -> Update:
    """Put groups that still arrive into somebody's hands; they stay what they are."""
    return update(episode_group).where(among(group.id, ids)).values({group.lease_id: lease})


@prepared
def mark_sampled(ids: Any, now: Any) -> Update:
    """Count one more draw of each group."""
    return (
        update(episode_group).where(among(group.id, ids)).values(_sampled(type_coerce(now, _NOW)))
    )


@cache
def mark_sampled_and_rekey(order: Order) -> Update:
    """Count one more draw of groups, with new arrivals: `group_id`, `arrival`, `now`."""
    return rekey(order).values(_sampled(bindparam("now", type_=_NOW)))


@cache
def rekey(order: Order) -> Update:
    """A new arrival for groups that were passed over: dicts of `group_id` and `arrival`."""
    return (
        update(episode_group)
        .where(group.id == bindparam("group_id"))
        .values({order.column: bindparam("arrival")})
    )


def _sampled(now: ColumnElement[Any]) -> dict[Any, Any]:
    return {
        group.times_sampled: group.times_sampled + 1,
        group.first_sampled_at: func.coalesce(group.first_sampled_at, now),
        group.last_sampled_at: now,
    }


def relate_versions(buffer_id: int, lineage: str, policy_version: int) -> tuple[Update, ...]:
    """Let only versions of one lineage compare with those of a buffer that follows it from now on.

    Those of the groups stay what they were, and so does the staleness of what ages no more.
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
    """Scalars of some idle groups of a task whose oldest version is no longer fresh."""
    condition = too_stale(buffer_id, task_name, oldest_fresh) & (group.group_status == status)
    in_order = group.comparable_version, group.id
    return select(*SCALARS).where(condition).order_by(*in_order).limit(most)


@prepared
def select_all_too_stale(
    buffer_id: Any, task_name: Any, status: Any, oldest_fresh: Any, most: Any
) -> Select[Any]:
    """The same, of those whose newest version is not fresh either."""
    some = select_too_stale.build(buffer_id, task_name, status, oldest_fresh, most)
    return some.where(group.max_policy_version < oldest_fresh)


@prepared
def expire_groups(ids: Any, reason: Any, policy_version: Any) -> Update:
    """Groups that the policy has left behind."""
    values = {
        group.group_status: GroupStatus.EXPIRED.value,
        group.status_reason: reason,
        group.staleness: policy_version - group.comparable_version,
    }
    return update(episode_group).where(among(group.id, ids)).values(values)


@prepared
def select_end_of_step(buffer_id: Any, task_name: Any, after: Any, skip: Any) -> Select[int]:
    """An id up to which a task has more live groups of some status than `skip`, after another id.

    NULL where it has not so many of any.
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
    """Bring the staleness of live groups of a task up to date, in a range of ids."""
    return _aged(policy_version).where(
        group.buffer_id == of_buffer,
        group.task_name == of_task,
        group.id > after,
        group.id <= last,
    )


@prepared
def age_groups_by_id(ids: Any, policy_version: Any) -> Update:
    """Bring the staleness of some live groups up to date."""
    return _aged(policy_version).where(among(group.id, ids))


def _aged(policy_version: ColumnElement[int]) -> Update:
    staleness = policy_version - group.comparable_version
    behind = IS_LIVE & group.staleness.is_distinct_from(staleness)
    return update(episode_group).where(behind).values({group.staleness: staleness})


def delete_groups(condition: ColumnElement[bool]) -> Delete:
    """Delete groups with everything that belongs to them."""
    return delete(episode_group).where(condition)


@prepared
def delete_groups_by_id(ids: Any) -> Delete:
    """Delete groups, by their ids, with everything that belongs to them."""
    return delete(episode_group).where(among(group.id, ids))
