"""Candidates of a draw: reads from one end of the index of each sampling strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, assert_never

from sqlalchemy import Column, ColumnElement, Select, bindparam, func, literal, select, true

from replaydb.database.runtime.prepared import Bound
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import IDLE, IS_IDLE, group
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
KEYS: dict[Clock, Column[Any]] = {"uniform": group.uniform_key, "priority": group.priority_key}


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
            return Order(KEYS["uniform"], clock="uniform")
        case Prioritized():
            return Order(KEYS["priority"], clock="priority")
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


#: Conditions for the groups of a partition: of its task, and of its status as well.
OF_TASK = (group.buffer_id == bindparam("partition_buffer_id")) & (
    group.task_name == bindparam("partition_task_name")
)
MEMBERS = OF_TASK & (group.group_status == bindparam("partition_status"))
# Sorted by id alone, PostgreSQL may scan the primary key past all groups of other tasks and
# statuses. Only `ix_episode_group_arrival` has the order of a range of statuses.
_MEMBERS_BY_AGE = OF_TASK & group.group_status.between(
    bindparam("partition_status"), bindparam("partition_status")
)
#: Columns of a candidate.
CANDIDATE = (
    group.id,
    group.weight,
    staleness_if_drawn(bindparam("partition_buffer_id")).label("staleness"),
    group.num_bytes,
    group.times_replaced,
    group.has_transcript,
)


def select_first(
    partition: Partition,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None = None,
    *,
    unknown: bool = False,
    key: Any = None,
) -> Bound[Select[Any]]:
    """Select the first groups of a partition in an order.

    The columns are those of `CANDIDATE`, `key`, `num_tokens` and `created_at`. An index read in
    descending order returns the newest of equal keys first, whatever `order` says about them.

    Args:
        partition: The groups.
        order: Sort order.
        limit: Maximum number of rows.
        eligible: Only groups that meet this condition.
        unknown: Select the groups whose sort column is NULL instead of the others. NULLs take a
            second read of the index, since engines sort them differently.
        key: Select only groups with this key, the oldest first.
    """
    build = _all_in_order if eligible is None else _in_order
    values = partition.values | {"most": limit}
    if key is not None:
        values["key"] = key
    statement = build(order, eligible, unknown, partition.is_idle, key is not None)
    return Bound(statement, values, eligible is None)


def _in_order(
    order: Order, eligible: ColumnElement[bool] | None, unknown: bool, idle: bool, equals: bool
) -> Select[Any]:
    """Select the first groups in an order, or those with one key, with bound parameters."""
    key = order.column
    more = (group.num_tokens, group.created_at)
    statement = select(*CANDIDATE, key.label("key"), *more)
    # Groups that were never drawn are not in the index of last draws. `first` reads them after all
    # groups that were drawn, if these were too few: so the read by age passes over few rows.
    if key is group.id or (unknown and key is group.last_sampled_at):
        statement = statement.where(_MEMBERS_BY_AGE)
        columns = [group.group_status, group.id]
    else:
        statement = statement.where(MEMBERS & IS_IDLE if idle else MEMBERS)
        columns = [key, group.id]
    if key.nullable:
        statement = statement.where(key.is_(None) if unknown else key.is_not(None))
    if equals:  # as a range: for a single value PostgreSQL may use an index of ids alone
        value = bindparam("key", type_=key.type)
        statement = statement.where(key.between(value, value))
    statement = statement.where(verdict(eligible))
    backwards = order.descending and not equals
    return statement.order_by(
        *(column.desc() if backwards else column for column in columns)
    ).limit(bindparam("most"))


_all_in_order = cache(_in_order)


def verdict(eligible: ColumnElement[bool] | None) -> ColumnElement[bool]:
    """Return a filter that is never NULL, and that does not make a planner use another index."""
    return true() if eligible is None else func.coalesce(eligible, literal(False))


def select_among(
    partition: Partition, order: Order, ids: Sequence[int], eligible: ColumnElement[bool] | None
) -> Select[Any]:
    """Select eligible groups of a partition by id: columns of `CANDIDATE`, and `key`."""
    condition = (
        (group.buffer_id == partition.buffer_id)
        & (group.task_name == partition.task_name)
        & (group.group_status == partition.status)
    )
    if eligible is not None:
        condition &= eligible
    statement = select(*CANDIDATE, order.column.label("key"))
    statement = statement.where(among(group.id, ids), verdict(condition)).order_by(group.id)
    return statement.params(partition_buffer_id=partition.buffer_id)
