"""Compilation of XTuner's queries to expressions over `replaydb.col` with bound values."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from enum import Enum
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import ColumnElement

import replaydb as rdb

#: The tag that holds an XTuner status without a counterpart here.
STATUS_TAG = "xtuner_status"
#: XTuner statuses without a counterpart, and the status used instead; it is not drawn by default.
STANDS_FOR = {"init": "aborted", "archived": "filtered"}
#: Statuses of groups that XTuner sees. Taken groups are leased or archived.
LIVE = ("completed", "aborted", "expired", "failed", "filtered")

_TAG: ColumnElement[str] = rdb.col.tags[STATUS_TAG].as_string()
_COLUMNS: dict[str, ColumnElement[Any]] = {
    "uid": rdb.col.id,
    "timestamp_id": rdb.col.id,
    "task_name": rdb.col.task_name,
    "status": sa.case(
        (rdb.col.group_status.in_(list(STANDS_FOR.values())) & _TAG.in_(list(STANDS_FOR)), _TAG),
        else_=rdb.col.group_status,
    ),
    "staleness": rdb.col.staleness,
}
_OPERATORS: dict[str, Any] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$in": lambda column, values: column.in_(values),
    "$not_in": lambda column, values: column.not_in(values),
    "$between": lambda column, bounds: column.between(*bounds),
}


class Selection(NamedTuple):
    """A compiled query, as arguments of `Buffer.find` and `Buffer.count`.

    Attributes:
        tasks: Names of tasks; None for all.
        statuses: Statuses.
        where: The remaining conditions; None if there are none.
    """

    tasks: list[str] | None
    statuses: list[str]
    where: ColumnElement[bool] | None


def selection(query: Any) -> Selection:
    """Compile a query, which is a dict or a tree of XTuner's nodes.

    Conditions on tasks and statuses are separated from the rest, because they use an index.

    Raises:
        InvalidInputError: A field or an operator is unknown, or its value cannot be compared.
    """
    tasks, statuses, others = None, list(LIVE), []
    for field, name, value in _conjuncts(query):
        condition = _condition(field, name, value)
        values = {"$eq": [_plain(value)], "$in": _plain(value)}.get(name)
        if field == "task_name" and values is not None:
            tasks = values if tasks is None else [one for one in tasks if one in values]
        elif field == "status" and values is not None and STANDS_FOR.keys().isdisjoint(values):
            statuses = [one for one in statuses if one in values]
            if "aborted" in statuses or "filtered" in statuses:
                others.append(condition)
        else:
            others.append(condition)
    return Selection(tasks, statuses, sa.and_(*others) if others else None)


def _conjuncts(query: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the conditions of a conjunction: field, operator, value. "$or" has no field."""
    for key, value in _dict_of(query).items():
        if key in ("$and", "$or") and not isinstance(value, list):
            raise rdb.InvalidInputError(key, "a list", repr(value))
        if key == "$and":
            for each in value:
                yield from _conjuncts(each)
        elif key == "$or":
            yield "", "$or", value
        elif isinstance(value, dict):
            yield from ((key, name, operand) for name, operand in value.items())
        else:
            yield key, "$eq", value


def _dict_of(query: Any) -> dict[str, Any]:
    """Return a query as a dict; it can be a dict or a node of XTuner's query tree."""
    if isinstance(query, dict):
        return query
    if hasattr(query, "relation"):  # a LogicNode
        return {query.relation: list(query.conditions)}
    if hasattr(query, "field"):
        is_between = hasattr(query, "lower")  # a BetweenNode
        value = [query.lower, query.upper] if is_between else query.value
        return {query.field: {query.op: value}}
    raise rdb.InvalidInputError("query", "a dict or a query node of XTuner", repr(query))


def _condition(field: str, name: str, value: Any) -> ColumnElement[bool]:
    if name == "$or":
        return sa.or_(sa.false(), *map(_all_of, value))
    if field not in _COLUMNS:
        raise rdb.InvalidInputError(
            "query", f"one of the fields {', '.join(_COLUMNS)}", repr(field)
        )
    if name not in _OPERATORS:
        raise rdb.InvalidInputError(field, f"one of {', '.join(_OPERATORS)}", repr(name))
    takes_several = name in ("$in", "$not_in", "$between")
    if takes_several and not isinstance(value, list | tuple):
        raise rdb.InvalidInputError(field, f"a list after {name}", repr(value))
    several = value if takes_several else [value]
    if any(isinstance(one, Collection) and not isinstance(one, str) for one in several):
        raise rdb.InvalidInputError(field, "numbers or text to compare with", repr(value))
    try:
        if name == "$between" and (len(value) != 2 or value[0] > value[1]):
            raise rdb.InvalidInputError(field, "two bounds in ascending order", repr(value))
        condition: ColumnElement[bool] = _OPERATORS[name](_COLUMNS[field], _plain(value))
    except (TypeError, sa.exc.ArgumentError) as error:
        raise rdb.InvalidInputError(
            field, f"a value that {name} can compare", repr(value)
        ) from error
    return condition


def _all_of(query: Any) -> ColumnElement[bool]:
    return sa.and_(sa.true(), *(_condition(*each) for each in _conjuncts(query)))


def _plain(value: Any) -> Any:
    """Replace members of enumerations by their values."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value
