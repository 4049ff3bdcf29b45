"""Sampling policies as statements: each reads one end of the index that is its order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
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

from replaydb.database.expressions import among
from replaydb.database.schema import episode_group, group
from replaydb.episodes import GroupStatus
from replaydb.policies import (
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


@dataclass(frozen=True, slots=True)
class Order:
    """What a policy sorts by. Ties are broken by id, in the same direction.

    Attributes:
        column: The sort column; where it can be NULL, NULLs come last.
        descending: Largest first.
        clock: The clock whose arrivals the column holds, where the policy is a random one.
    """

    column: Column[Any]
    descending: bool = False
    clock: Clock | None = None


def order_of(policy: SimplePolicy) -> Order:
    """The order in which a policy takes groups."""
    match policy:
        case Fifo():
            return Order(group.id)
        case Lifo():
            return Order(group.id, descending=True)
        case StalestFirst():
            return Order(group.min_policy_version)
        case FreshestFirst():
            return Order(group.min_policy_version, descending=True)
        case TopPriority():
            return Order(group.priority, descending=True)
        case LeastSampled():
            return Order(group.times_sampled)
        case Uniform():
            return Order(group.uniform_key, clock="uniform")
        case Prioritized():
            return Order(group.priority_key, clock="priority")
        case _:
            assert_never(policy)


@dataclass(frozen=True, slots=True)
class Pool:
    """The groups of one task and status: what an index has side by side."""

    buffer_id: int
    task_name: str
    status: str

    @property
    def members(self) -> ColumnElement[bool]:
        """Condition that selects them."""
        return self._of_task & (group.group_status == self.status)

    @property
    def members_by_age(self) -> ColumnElement[bool]:
        """The same for reading in the order of (status, id).

        By id alone, PostgreSQL may walk the primary key past all groups of other tasks and
        statuses. Only the index of arrivals has the order of a range of statuses.
        """
        return self._of_task & group.group_status.between(self.status, self.status)

    @property
    def _of_task(self) -> ColumnElement[bool]:
        return (group.buffer_id == self.buffer_id) & (group.task_name == self.task_name)


def first_in_order(
    pool: Pool,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None = None,
    *,
    unknown: bool = False,
) -> Select[Any]:
    """The first groups of a pool in an order, as (id, weight, staleness, key, sizes, age).

    Args:
        pool: Of which groups.
        order: Sort order.
        limit: Rows at most.
        eligible: Only these.
        unknown: Take the groups whose sort column is NULL, instead of those where it is not: two
            reads of one index, because engines disagree about where NULLs sort.
    """
    key = order.column
    more = (group.num_tokens, group.num_bytes, group.created_at)
    statement = select(*_FACTS, key.label("key"), *more)
    if key is group.id:
        statement = statement.where(pool.members_by_age)
        columns = [group.group_status, group.id]
    else:
        statement = statement.where(pool.members)
        columns = [key, group.id]
    if key.nullable:
        statement = statement.where(key.is_(None) if unknown else key.is_not(None))
    if eligible is not None:
        statement = statement.where(_verdict(eligible))
    return statement.order_by(
        *(column.desc() if order.descending else column for column in columns)
    ).limit(limit)


def arrivals(
    pool: Pool,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None,
    after: tuple[float, int] | None,
) -> Select[Any]:
    """A page of a pool's arrivals in clock order, as (id, weight, staleness, key, eligible)."""
    key = order.column
    verdict = true() if eligible is None else _verdict(eligible)
    statement = select(*_FACTS, key.label("key"), verdict.label("eligible")).where(pool.members)
    if after is not None:
        statement = statement.where(tuple_(key, group.id) > tuple_(*after))
    return statement.order_by(key, group.id).limit(limit)


def _verdict(eligible: ColumnElement[bool]) -> ColumnElement[bool]:
    """A filter that is never NULL, and from which no planner takes a reason for another index."""
    return func.coalesce(eligible, literal(False))


def all_eligible(pool: Pool, eligible: ColumnElement[bool] | None) -> Select[Any]:
    """Every eligible group of a pool, as (id, weight, staleness), in the order of ids."""
    statement = select(*_FACTS).where(pool.members)
    if eligible is not None:
        statement = statement.where(eligible)
    return statement.order_by(group.id)


def set_back(pool: Pool, order: Order, time: float) -> Update:
    """Move all arrivals of a pool as its clock is moved: from `time` to 0."""
    return update(episode_group).where(pool.members).values({order.column: order.column - time})


def mark_leased(ids: Sequence[int], lease_id: int, now: datetime, policy_version: int) -> Update:
    """Put groups into somebody's hands; counts as a draw until it is given back undone."""
    values = {
        # That of a group which had expired or failed was left as it was then.
        group.staleness: literal(policy_version) - group.min_policy_version,
        group.leased_from: group.group_status,
        group.group_status: GroupStatus.LEASED.value,
        group.lease_id: lease_id,
    }
    return mark_sampled(ids, now).values(values)


def mark_sampled(ids: Sequence[int], now: datetime) -> Update:
    """Count one more draw of each group."""
    return update(episode_group).where(among(group.id, ids)).values(_sampled(literal(now, _NOW)))


@cache
def mark_sampled_and_rekey(order: Order) -> Update:
    """The same, with a new arrival: dicts of `group_id`, `arrival` and `now`."""
    return rekey(order).values(_sampled(bindparam("now", type_=_NOW)))


@cache
def rekey(order: Order) -> Update:
    """A new arrival for groups that were passed over: dicts of `group_id` and `arrival`."""
    return (
        update(episode_group)
        .where(group.id == bindparam("group_id"))
        .values({order.column: bindparam("arrival")})
    )


_FACTS = (group.id, group.weight, group.staleness)
_NOW = group.last_sampled_at.type


def _sampled(now: ColumnElement[Any]) -> dict[Any, Any]:
    return {
        group.times_sampled: group.times_sampled + 1,
        group.first_sampled_at: func.coalesce(group.first_sampled_at, now),
        group.last_sampled_at: now,
    }
