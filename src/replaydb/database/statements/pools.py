"""Sampling policies as statements: each reads one end of the index that is its order."""

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

from replaydb.database.expressions import among, comes_after
from replaydb.database.prepared import Bound
from replaydb.database.schema import IDLE, IS_IDLE, episode_group, group
from replaydb.database.staleness import current_staleness
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
#: Where the arrivals of each clock are.
_KEYS: dict[Clock, Column[Any]] = {"uniform": group.uniform_key, "priority": group.priority_key}


@dataclass(frozen=True, slots=True)
class Order:
    """What a policy sorts by.

    Attributes:
        column: The sort column; where it can be NULL, NULLs come last.
        descending: Largest first.
        newest_first: Among equals. Otherwise it is the oldest one.
        clock: The clock whose arrivals the column holds, where the policy is a random one.
    """

    column: Column[Any]
    descending: bool = False
    newest_first: bool = False
    clock: Clock | None = None


def order_of(policy: SimplePolicy) -> Order:
    """The order in which a policy takes groups."""
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
class Pool:
    """The groups of one task and status: what an index has side by side.

    Only idle ones are in the index of every order; of others, those of a task are sorted.
    """

    buffer_id: int
    task_name: str
    status: str

    @property
    def values(self) -> dict[str, Any]:
        """What the conditions below are run with."""
        return {
            "pool_buffer_id": self.buffer_id,
            "pool_task_name": self.task_name,
            "pool_status": self.status,
        }

    @property
    def is_idle(self) -> bool:
        """Whether the groups are in every index."""
        return self.status in IDLE


_OF_TASK = (group.buffer_id == bindparam("pool_buffer_id")) & (
    group.task_name == bindparam("pool_task_name")
)
_MEMBERS = _OF_TASK & (group.group_status == bindparam("pool_status"))
# By id alone, PostgreSQL may walk the primary key past all groups of other tasks and statuses.
# Only the index of arrivals has the order of a range of statuses.
_MEMBERS_BY_AGE = _OF_TASK & group.group_status.between(
    bindparam("pool_status"), bindparam("pool_status")
)
_CANDIDATE = (
    group.id,
    group.weight,
    current_staleness(bindparam("pool_buffer_id")).label("staleness"),
)
_ID = group.id.type


def select_first(
    pool: Pool,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None = None,
    *,
    unknown: bool = False,
) -> Bound[Select[Any]]:
    """The first groups of a pool in an order, as (id, weight, staleness, key, sizes, age).

    An index has the newest of equals first where it has the largest key first: whatever the order
    says of equals, that is how they come.

    Args:
        pool: Of which groups.
        order: Sort order.
        limit: Rows at most.
        eligible: Only these.
        unknown: Take the groups whose sort column is NULL, instead of those where it is not: two
            reads of one index, because engines disagree about where NULLs sort.
    """
    build = _all_in_order if eligible is None else _in_order
    statement = build(order, eligible, unknown, pool.is_idle, False)
    return Bound(statement, pool.values | {"most": limit}, eligible is None)


def select_oldest_equals(
    pool: Pool, order: Order, key: Any, limit: int, eligible: ColumnElement[bool] | None
) -> Bound[Select[Any]]:
    """The oldest groups of a pool whose sort column has a value, as `first_in_order` has them."""
    build = _all_in_order if eligible is None else _in_order
    values = pool.values | {"most": limit, "key": key}
    return Bound(build(order, eligible, False, pool.is_idle, True), values, eligible is None)


def _in_order(
    order: Order, eligible: ColumnElement[bool] | None, unknown: bool, idle: bool, equals: bool
) -> Select[Any]:
    key = order.column
    more = (group.num_tokens, group.num_bytes, group.created_at)
    statement = select(*_CANDIDATE, key.label("key"), *more)
    # What was never drawn is not in the index of last draws. `first` asks for it when it has read
    # all that were drawn, and had fewer than it wanted: so many does the walk by age pass at most.
    if key is group.id or (unknown and key is group.last_sampled_at):
        statement = statement.where(_MEMBERS_BY_AGE)
        columns = [group.group_status, group.id]
    else:
        statement = statement.where(_MEMBERS & IS_IDLE if idle else _MEMBERS)
        columns = [key, group.id]
    if key.nullable:
        statement = statement.where(key.is_(None) if unknown else key.is_not(None))
    if equals:  # as a range: where it is one value, PostgreSQL may take the order of ids alone
        value = bindparam("key", type_=key.type)
        statement = statement.where(key.between(value, value))
    if eligible is not None:
        statement = statement.where(_verdict(eligible))
    backwards = order.descending and not equals
    return statement.order_by(
        *(column.desc() if backwards else column for column in columns)
    ).limit(bindparam("most"))


_all_in_order = cache(_in_order)


def select_arrivals(
    pool: Pool,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None,
    after: tuple[float, int] | None,
) -> Bound[Select[Any]]:
    """A page of an idle pool's arrivals by clock, as (id, weight, staleness, key, eligible)."""
    values = pool.values | {"most": limit}
    if after is not None:
        values |= {"after_key": after[0], "after_id": after[1]}
    build = _all_arrivals if eligible is None else _arrivals
    return Bound(build(order, eligible, after is not None), values, eligible is None)


def _arrivals(order: Order, eligible: ColumnElement[bool] | None, later: bool) -> Select[Any]:
    key = order.column
    verdict = true() if eligible is None else _verdict(eligible)
    statement = select(*_CANDIDATE, key.label("key"), verdict.label("eligible"))
    statement = statement.where(_MEMBERS & IS_IDLE)
    if later:
        after = tuple_(bindparam("after_key", type_=key.type), bindparam("after_id", type_=_ID))
        statement = statement.where(tuple_(key, group.id) > after)
    return statement.order_by(key, group.id).limit(bindparam("most"))


_all_arrivals = cache(_arrivals)


def _verdict(eligible: ColumnElement[bool]) -> ColumnElement[bool]:
    """A filter that is never NULL, and from which no planner takes a reason for another index."""
    return func.coalesce(eligible, literal(False))


def select_eligible(pool: Pool, eligible: ColumnElement[bool] | None) -> Bound[Select[Any]]:
    """Every eligible group of a pool, as (id, weight, staleness), in the order of ids."""
    statement = select(*_CANDIDATE).where(_MEMBERS)
    if eligible is not None:
        statement = statement.where(eligible)
    return Bound(statement.order_by(group.id), pool.values, is_kept=False)


def select_among(
    pool: Pool, order: Order, ids: Sequence[int], eligible: ColumnElement[bool] | None
) -> Select[Any]:
    """The eligible ones of some groups of a pool, as (id, weight, staleness, key), by id."""
    condition = (
        (group.buffer_id == pool.buffer_id)
        & (group.task_name == pool.task_name)
        & (group.group_status == pool.status)
    )
    if eligible is not None:
        condition &= eligible
    statement = select(*_CANDIDATE, order.column.label("key"))
    statement = statement.where(among(group.id, ids), _verdict(condition)).order_by(group.id)
    return statement.params(pool_buffer_id=pool.buffer_id)


def select_page_of_eligible(
    pool: Pool, eligible: ColumnElement[bool] | None, after: int, limit: int
) -> Bound[Select[Any]]:
    """A page of the eligible groups of a pool: those after an id, so many at most."""
    # Not by id alone, for the reason that `_MEMBERS_BY_AGE` has.
    status = bindparam("pool_status", type_=group.group_status.type)
    later = comes_after(group.group_status, status, group.id, bindparam("after_id"))
    condition = _OF_TASK & later
    statement = select(*_CANDIDATE).where(condition)
    if eligible is not None:
        statement = statement.where(_verdict(eligible))
    statement = statement.order_by(group.group_status, group.id).limit(bindparam("most"))
    return Bound(statement, pool.values | {"after_id": after, "most": limit}, is_kept=False)


def set_arrivals_back(pool: Pool, clock: Clock, time: float) -> Bound[Update]:
    """Move all arrivals of a pool as its clock is moved: from `time` to 0."""
    key = _KEYS[clock]
    statement = update(episode_group).where(_MEMBERS).values({key: key - time})
    return Bound(statement, pool.values, is_kept=False)
