"""Candidates of a draw: reads from one end of the index of each sampling strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, assert_never

from sqlalchemy import (
    Column,
    ColumnElement,
    Select,
    Update,
    bindparam,
    func,
    literal,
    select,
    true,
    tuple_,
    update,
)

from replaydb.database.runtime.prepared import Bound
from replaydb.database.tables.expressions import among, comes_after
from replaydb.database.tables.schema import IDLE, IS_IDLE, episode_group, group
from replaydb.database.tables.staleness import staleness_if_drawn
from replaydb.domain.policies import (
    Fifo,
    FreshestFirst,
    LeastSampled,
    Lifo,
    Prioritized,
    SimplePolicy,
    StalestFirst,
    TopPriority,
    Uniform,
)

Clock = Literal["uniform", "priority"]
#: Columns of the exponential keys of each clock.
_KEYS: dict[Clock, Column[Any]] = {"uniform": group.uniform_key, "priority": group.priority_key}


@dataclass(frozen=True, slots=True)
class Order:
    """Sort order of groups.

    Attributes:
        column: The sort column; NULLs come last.
        descending: Largest first.
        newest_first: Newest first among equal values; otherwise oldest first.
        clock: The clock of the exponential keys in the column, for random sampling strategies.
    """

    column: Column[Any]
    descending: bool = False
    newest_first: bool = False
    clock: Clock | None = None


def order_of(policy: SimplePolicy) -> Order:
    """Return the order in which a sampling strategy takes groups."""
    match policy:
        case Fifo():
            return Order(group.id)
        case Lifo():
            return Order(group.id, descending=True, newest_first=True)
        case StalestFirst():
            return Order(group.comparable_version)
        case FreshestFirst():
            return Order(group.comparable_version, descending=True, newest_first=True)
        case TopPriority():
            return Order(group.priority, descending=True)
        case LeastSampled():
            return Order(group.times_sampled)
        case Uniform():
            return Order(_KEYS["uniform"], clock="uniform")
        case Prioritized():
            return Order(_KEYS["priority"], clock="priority")
        case _:
            assert_never(policy)


@dataclass(frozen=True, slots=True)
class Partition:
    """The groups of one task and status, which are adjacent in an index.

    Idle groups are in the index of every order. Groups of other statuses are sorted by the query.
    """

    buffer_id: int
    task_name: str
    status: str

    @property
    def values(self) -> dict[str, Any]:
        """Values of the parameters of the conditions below."""
        return {
            "partition_buffer_id": self.buffer_id,
            "partition_task_name": self.task_name,
            "partition_status": self.status,
        }

    @property
    def is_idle(self) -> bool:
        """Whether the groups are in every index."""
        return self.status in IDLE


_OF_TASK = (group.buffer_id == bindparam("partition_buffer_id")) & (
    group.task_name == bindparam("partition_task_name")
)
_MEMBERS = _OF_TASK & (group.group_status == bindparam("partition_status"))
# Sorted by id alone, PostgreSQL may scan the primary key past all groups of other tasks and
# statuses. Only `ix_episode_group_arrival` has the order of a range of statuses.
_MEMBERS_BY_AGE = _OF_TASK & group.group_status.between(
    bindparam("partition_status"), bindparam("partition_status")
)
_CANDIDATE = (
    group.id,
    group.weight,
    staleness_if_drawn(bindparam("partition_buffer_id")).label("staleness"),
    group.num_bytes,
    group.times_replaced,
    group.has_transcript,
)
_ID = group.id.type


def select_first(
    partition: Partition,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None = None,
    *,
    unknown: bool = False,
) -> Bound[Select[Any]]:
    """Select the first groups of a partition in an order.

    The columns are those of `_CANDIDATE`, `key`, `num_tokens` and `created_at`. An index read in
    descending order returns the newest of equal keys first, whatever `order` says about them.

    Args:
        partition: The groups.
        order: Sort order.
        limit: Maximum number of rows.
        eligible: Only groups that meet this condition.
        unknown: Select the groups whose sort column is NULL instead of the others. NULLs take a
            second read of the index, since engines sort them differently.
    """
    build = _all_in_order if eligible is None else _in_order
    statement = build(order, eligible, unknown, partition.is_idle, False)
    return Bound(statement, partition.values | {"most": limit}, eligible is None)


def select_oldest_equals(
    partition: Partition, order: Order, key: Any, limit: int, eligible: ColumnElement[bool] | None
) -> Bound[Select[Any]]:
    """Select the oldest groups of a partition with one value of the sort column.

    The columns are those of `select_first`.
    """
    build = _all_in_order if eligible is None else _in_order
    values = partition.values | {"most": limit, "key": key}
    return Bound(build(order, eligible, False, partition.is_idle, True), values, eligible is None)


def _in_order(
    order: Order, eligible: ColumnElement[bool] | None, unknown: bool, idle: bool, equals: bool
) -> Select[Any]:
    key = order.column
    more = (group.num_tokens, group.created_at)
    statement = select(*_CANDIDATE, key.label("key"), *more)
    # Groups that were never drawn are not in the index of last draws. `first` reads them after all
    # groups that were drawn, if these were too few: so the read by age passes over few rows.
    if key is group.id or (unknown and key is group.last_sampled_at):
        statement = statement.where(_MEMBERS_BY_AGE)
        columns = [group.group_status, group.id]
    else:
        statement = statement.where(_MEMBERS & IS_IDLE if idle else _MEMBERS)
        columns = [key, group.id]
    if key.nullable:
        statement = statement.where(key.is_(None) if unknown else key.is_not(None))
    if equals:  # as a range: for a single value PostgreSQL may use an index of ids alone
        value = bindparam("key", type_=key.type)
        statement = statement.where(key.between(value, value))
    if eligible is not None:
        statement = statement.where(_verdict(eligible))
    backwards = order.descending and not equals
    return statement.order_by(
        *(column.desc() if backwards else column for column in columns)
    ).limit(bindparam("most"))


_all_in_order = cache(_in_order)


def select_by_key(
    partition: Partition,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None,
    after: tuple[float, int] | None,
) -> Bound[Select[Any]]:
    """Select a page of an idle partition by key: columns of `_CANDIDATE`, `key` and others."""
    values = partition.values | {"most": limit}
    if after is not None:
        values |= {"after_key": after[0], "after_id": after[1]}
    build = _all_by_key if eligible is None else _by_key
    return Bound(build(order, eligible, after is not None), values, eligible is None)


def _by_key(order: Order, eligible: ColumnElement[bool] | None, later: bool) -> Select[Any]:
    key = order.column
    verdict = true() if eligible is None else _verdict(eligible)
    more = (verdict.label("eligible"), group.task_name)
    statement = select(*_CANDIDATE, key.label("key"), *more)
    statement = statement.where(_MEMBERS & IS_IDLE)
    if later:
        after = tuple_(bindparam("after_key", type_=key.type), bindparam("after_id", type_=_ID))
        statement = statement.where(tuple_(key, group.id) > after)
    return statement.order_by(key, group.id).limit(bindparam("most"))


_all_by_key = cache(_by_key)


def _verdict(eligible: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return a filter that is never NULL, and that does not make a planner use another index."""
    return func.coalesce(eligible, literal(False))


def select_eligible(
    partition: Partition, eligible: ColumnElement[bool] | None
) -> Bound[Select[Any]]:
    """Select every eligible group of a partition: `_CANDIDATE`, in order of ids."""
    statement = select(*_CANDIDATE).where(_MEMBERS)
    if eligible is not None:
        statement = statement.where(eligible)
    return Bound(statement.order_by(group.id), partition.values, is_cached=False)


def select_among(
    partition: Partition, order: Order, ids: Sequence[int], eligible: ColumnElement[bool] | None
) -> Select[Any]:
    """Select eligible groups of a partition by id: columns of `_CANDIDATE`, and `key`."""
    condition = (
        (group.buffer_id == partition.buffer_id)
        & (group.task_name == partition.task_name)
        & (group.group_status == partition.status)
    )
    if eligible is not None:
        condition &= eligible
    statement = select(*_CANDIDATE, order.column.label("key"))
    statement = statement.where(among(group.id, ids), _verdict(condition)).order_by(group.id)
    return statement.params(partition_buffer_id=partition.buffer_id)


def select_candidates(condition: ColumnElement[bool], most: int) -> Select[Any]:
    """Select the ids and tasks of up to `most` groups, in any order."""
    return select(group.id, group.task_name).where(condition).limit(most)


def select_page_of_eligible(
    partition: Partition, eligible: ColumnElement[bool] | None, after: int, limit: int
) -> Bound[Select[Any]]:
    """Select up to `limit` eligible groups of a partition, in order of ids after an id."""
    # Not by id alone, for the same reason as in `_MEMBERS_BY_AGE`.
    status = bindparam("partition_status", type_=group.group_status.type)
    later = comes_after(group.group_status, status, group.id, bindparam("after_id"))
    condition = _OF_TASK & later
    statement = select(*_CANDIDATE).where(condition)
    if eligible is not None:
        statement = statement.where(_verdict(eligible))
    statement = statement.order_by(group.group_status, group.id).limit(bindparam("most"))
    return Bound(statement, partition.values | {"after_id": after, "most": limit}, is_cached=False)


def shift_keys(partition: Partition, clock: Clock, time: float) -> Bound[Update]:
    """Shift all keys of a partition as its clock is set back from `time` to 0."""
    key = _KEYS[clock]
    statement = update(episode_group).where(_MEMBERS).values({key: key - time})
    return Bound(statement, partition.values, is_cached=False)
