"""Statements on rows of groups."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Select, Update, bindparam, func, select, update

from replaydb.database.filters.group_columns import COLUMNS
from replaydb.database.runtime.prepared import prepared
from replaydb.database.statements.selections import selection
from replaydb.database.tables.expressions import among, as_stored, total
from replaydb.database.tables.schema import episode_group, group, run
from replaydb.database.tables.staleness import IS_LIVE, current_staleness, staleness_of

_COMPUTED = {
    "staleness": current_staleness().label("staleness"),
    "tags": as_stored(group.tags).label("tags"),  # the driver refuses text that is no UTF-8
}
#: Columns of a group that scheduling uses.
SCALARS = (
    group.id,
    group.task_name,
    group.group_status,
    group.leased_from,
    _COMPUTED["staleness"],
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
    group.times_annotated,
)

#: Columns of a group that users can see: those of `replaydb.col`, and the name of the run.
SHOWN: tuple[ColumnElement[Any], ...] = (
    *(_COMPUTED.get(name, column) for name, column in COLUMNS.items()),
    run.c.name.label("run_name"),
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


def select_scalars(condition: ColumnElement[bool]) -> Select[Any]:
    """Select the scalars of groups that scheduling uses, in order of ids."""
    return select(*SCALARS).where(condition).order_by(group.id)


@prepared
def select_scalars_by_id(buffer_id: Any, ids: Any) -> Select[Any]:
    """Select the scalars of groups that scheduling uses, by id, in order of ids."""
    return select_scalars(selection(buffer_id, ids=ids))


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
def update_each_group() -> Update:
    """Update groups, given as dicts of `group_id` and the columns to change."""
    return update(episode_group).where(group.id == bindparam("group_id"))


def update_staleness(policy_version: ColumnElement[int]) -> Update:
    """Update the staleness of all live groups for which it has changed."""
    staleness = staleness_of(group.comparable_version, policy_version)
    behind = IS_LIVE & group.staleness.is_distinct_from(staleness)
    return update(episode_group).where(behind).values({group.staleness: staleness})


def count_groups(condition: ColumnElement[bool]) -> Select[int]:
    """Count the groups that meet a condition."""
    return select(func.count()).select_from(episode_group).where(condition)
