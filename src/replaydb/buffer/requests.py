"""Arguments of buffer calls, checked and converted to requests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from math import isfinite
from typing import Any

from sqlalchemy import Boolean, Column, ColumnElement, Integer, String, UnaryExpression
from sqlalchemy.sql import operators

from replaydb.database.filters import compiling
from replaydb.database.filters.group_columns import COLUMNS
from replaydb.database.filters.terms import shown
from replaydb.database.repository.draw_request import DrawRequest, Quota
from replaydb.database.statements.candidates import Order
from replaydb.database.tables.column_types import Tags, UtcDateTime
from replaydb.domain import checks
from replaydb.domain.policies import Mix, SamplingPolicy, checked_policy
from replaydb.domain.results import GroupInfo
from replaydb.errors import InvalidInputError

Conditions = Mapping[str, ColumnElement[bool]]


def draw_request(
    n: int | Mapping[str, int],
    policy: SamplingPolicy,
    tasks: str | Iterable[str] | None,
    where: ColumnElement[bool] | None,
    max_staleness: int | None,
    runs: str | Iterable[str] | None,
    at_least: int | None,
    step: int | None = None,
    fields: str | Iterable[str] | None = None,
) -> DrawRequest:
    """Return the request for the arguments that `sample`, `peek` and `lease` share.

    Raises:
        InvalidInputError: An argument is invalid.
    """
    parts = _quotas(n, policy, tasks, eligible(where, max_staleness, runs))
    count = sum(part.count for part in parts)
    return DrawRequest(
        parts,
        _described(policy),
        count if at_least is None else checks.whole_number("at_least", at_least, most=count),
        checks.optional(checks.whole_number, "step", step),
        fields=checks.names("fields", fields),
    )


def _described(policy: SamplingPolicy) -> str:
    """Return the name of a sampling strategy for the record of the draw."""
    if not isinstance(policy, Mix):
        return repr(policy)
    shares = ", ".join(f"{share.weight:g} {_described(share.policy)}" for share in policy.shares)
    return f"Mix({shares})"[:255]


def eligible(
    where: ColumnElement[bool] | None,
    max_staleness: int | None,
    runs: str | Iterable[str] | None,
) -> Conditions:
    """Return the filters of a call, by the attribute of `NotEnoughGroupsError` that counts them."""
    conditions = {}
    if (names := checks.names("runs", runs)) is not None:
        conditions["of_other_runs"] = compiling.of_runs(sorted(names))
    if max_staleness is not None:
        limit = checks.whole_number("max_staleness", max_staleness)
        conditions["too_stale"] = compiling.at_most_stale(limit)
    if (condition := compiling.checked(where)) is not None:
        conditions["filtered_out"] = condition
    return conditions


def _quotas(
    n: int | Mapping[str, int],
    policy: SamplingPolicy,
    tasks: str | Iterable[str] | None,
    conditions: Conditions,
) -> tuple[Quota, ...]:
    """Return the non-empty quotas of a batch: one in all, one per task, or one per share."""
    checked = checked_policy(policy)
    count, quotas = checks.quotas("n", n)
    names = checks.names("tasks", tasks)
    if quotas is not None and names is not None:
        raise InvalidInputError("tasks", "None if n has a number per task", repr(tasks))
    if isinstance(checked, Mix):
        if quotas is not None:
            raise InvalidInputError("n", "a number, because a Mix divides it", repr(n))
        parts = list(_shares(checked, count, names, conditions))
    else:
        condition = compiling.all_of(conditions.values())
        if quotas is None:
            parts = [Quota(checked, count, names, condition, None, conditions)]
        else:
            parts = [
                Quota(checked, quota, frozenset((task_name,)), condition, task_name, conditions)
                for task_name, quota in quotas.items()
            ]
    return tuple(part for part in parts if part.count)


def named(
    ids: Iterable[int] | None, uids: str | Iterable[str] | None
) -> list[int] | list[str] | None:
    """Return the ids or the uids that a call gives; None if it gives neither."""
    if uids is None:
        return checks.optional(checks.ids, "ids", ids)
    if ids is not None:
        raise InvalidInputError("uids", "None if ids are given", repr(uids))
    return checks.uids("uids", uids)


def tagged(text: str) -> ColumnElement[bool]:
    """Return the condition for a NAME=VALUE text. The value is JSON, or else text.

    Raises:
        InvalidInputError: The name or the value is missing.
    """
    name, equals, given = text.partition("=")
    if not (name and equals):
        raise InvalidInputError("tag", "NAME=VALUE", repr(text))
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        value = given
    if isinstance(value, dict | list):
        raise InvalidInputError("tag", "text, a number, true, false or null", repr(given))
    if isinstance(value, float) and not isfinite(value):
        value = given
    tag = COLUMNS["tags"][name]
    met: ColumnElement[bool] = tag.is_(None) if value is None else tag == value
    return met


def order(order_by: Any) -> Order:
    """Return the sort order: a column of `replaydb.col` or its `desc()`."""
    column, descending = order_by, False
    if type(order_by) is UnaryExpression and order_by.modifier in _DIRECTIONS:
        column, descending = order_by.element, order_by.modifier is operators.desc_op
    if (
        not isinstance(column, Column)
        or COLUMNS.get(column.key) is not column
        or isinstance(column.type, String | Boolean | Tags)
    ):
        expected = "a column of replaydb.col that holds numbers or times, or its desc()"
        raise InvalidInputError("order_by", expected, shown(order_by))
    return Order(column, descending, newest_first=descending)


_DIRECTIONS = (operators.asc_op, operators.desc_op)


def page_start(after: GroupInfo | tuple[Any, int], order: Order) -> tuple[Any, int]:
    """Return the value of the sort column and the id after which a page begins."""
    if isinstance(after, GroupInfo):
        return getattr(after, order.column.key), after.id
    if not isinstance(after, tuple) or len(after) != 2:
        raise InvalidInputError("after", "a GroupInfo or a tuple (value, id)", f"{after!r:.200}")
    value, id_ = after
    return _value_of(order.column, "after[0]", value), checks.whole_number("after[1]", id_)


def _value_of(column: Column[Any], field: str, value: Any) -> Any:
    if value is None and column.nullable:
        return None
    if isinstance(column.type, UtcDateTime):
        if not isinstance(value, datetime) or value.utcoffset() is None:
            raise InvalidInputError(field, "a datetime with a time zone", f"{value!r:.200}")
        return value
    if isinstance(column.type, Integer):
        return checks.whole_number(field, value, *checks.INT64)
    return checks.number(field, value)


def _shares(
    mix: Mix, count: int, names: frozenset[str] | None, conditions: Conditions
) -> Iterable[Quota]:
    for share, quota in zip(mix.shares, mix.quotas(count), strict=True):
        own = checks.names("tasks", share.tasks)
        if names is not None:
            own = names if own is None else own & names
        mine = dict(conditions)
        own_filter = compiling.all_of([mine.get("filtered_out"), compiling.checked(share.where)])
        if own_filter is not None:
            mine["filtered_out"] = own_filter
        condition = compiling.all_of(mine.values())
        only = next(iter(own)) if own is not None and len(own) == 1 else None
        yield Quota(share.policy, quota, own, condition, only, mine)
