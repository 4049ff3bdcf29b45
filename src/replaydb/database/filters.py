"""Filters that callers write over `replaydb.group`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Boolean, Column, ColumnElement, TextClause, and_, select
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import ColumnClause

from replaydb.database.expressions import among
from replaydb.database.schema import episode_group, run
from replaydb.errors import InvalidInputError

_BETWEEN = (operators.between_op, operators.not_between_op)
_EXPECTED = "an expression over replaydb.group, such as replaydb.group.reward_std > 0.1"


def checked(where: Any) -> ColumnElement[bool] | None:
    """A boolean expression over the columns of `episode_group`, and nothing else.

    Raises:
        InvalidInputError: It is not; in particular text is refused.
    """
    if where is None:
        return None
    if not isinstance(where, ColumnElement):
        raise InvalidInputError("where", _EXPECTED, repr(where))
    # SQLAlchemy gives BETWEEN no type.
    if not (isinstance(where.type, Boolean) or getattr(where, "operator", None) in _BETWEEN):
        raise InvalidInputError("where", _EXPECTED, f"{str(where)!r}, which is not a condition")
    for element in visitors.iterate(where):
        if isinstance(element, TextClause) or (
            isinstance(element, ColumnClause)
            and not (isinstance(element, Column) and element.table is episode_group)
        ):
            raise InvalidInputError("where", _EXPECTED, f"{str(element)!r} in it")
    return where


def at_most_stale(limit: int) -> ColumnElement[bool]:
    """Groups at most this many policy versions behind; not those of unknown version."""
    return episode_group.c.staleness <= limit


def of_runs(names: Sequence[str]) -> ColumnElement[bool]:
    """Groups that some runs put."""
    return episode_group.c.run_id.in_(select(run.c.id).where(among(run.c.name, names)))


def all_of(conditions: Iterable[ColumnElement[bool] | None]) -> ColumnElement[bool] | None:
    """Conditions that are there as one; None where there is none."""
    given = [condition for condition in conditions if condition is not None]
    return and_(*given) if given else None
