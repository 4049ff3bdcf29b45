"""Query parameters of the groups page: filters, sort order and page position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from typing import Any, TypeVar

from sqlalchemy import Column, ColumnElement, Integer
from starlette.datastructures import QueryParams

from replaydb.buffer.requests import tagged
from replaydb.database.filters import compiling
from replaydb.database.filters.group_columns import COLUMNS, col
from replaydb.database.filters.parsing import parsed
from replaydb.database.tables import schema
from replaydb.database.tables.column_types import UtcDateTime
from replaydb.domain import checks
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import GroupInfo
from replaydb.errors import InvalidInputError

T = TypeVar("T")

#: Indexed columns. Reading a page in their order takes constant time.
INDEXED = ("id", *(one.name for one in schema.episode_group.c if one in schema.INDEXED))
#: Columns that groups can be sorted by.
SORTS = (*INDEXED, "num_episodes", "num_tokens", "reward_mean", "reward_std")
#: Orders of sorting.
ORDERS = ("ascending", "descending")
#: Query parameters with a bound of a number, and their labels.
BOUNDS = {
    "min_reward": "mean reward at least",
    "max_reward": "mean reward at most",
    "min_staleness": "staleness at least",
    "max_staleness": "staleness at most",
    "min_priority": "priority at least",
    "max_priority": "priority at most",
}
_BOUNDED: dict[str, Column[Any]] = {
    "reward": col.reward_mean,
    "staleness": col.staleness,
    "priority": col.priority,
}
#: Attributes that are query parameters of the same name.
_PARAMETERS = ("task", "status", "run", "prompt", "tag", "where", "text", "after", "before", "at")
#: Value of `at` if the group has no value in the sort column.
_NO_VALUE = "none"


@dataclass(frozen=True, slots=True)
class GroupQuery:
    """A query for groups, parsed from a URL. All conditions must hold.

    Attributes:
        task: Match one of these tasks.
        status: Match one of these statuses.
        run: Match groups added by one of these runs.
        prompt: Match the `prompt_uid`.
        bounds: Bounds of numbers, by the name of their query parameter.
        tag: Match all of these tags, each as NAME=VALUE.
        where: A filter as text: see `database.filters.parsing`.
        text: Match groups with a completion that contains this text.
        sort: The column to sort by.
        ascending: Whether to sort in ascending order.
        after: Id of the group after which the page begins.
        before: Id of the group before which the page ends.
        at: The value that this group had in the sort column when it was displayed. The group may
            have changed or been deleted since. Unused if the groups are sorted by id.
    """

    task: tuple[str, ...] = ()
    status: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    prompt: str | None = None
    bounds: tuple[tuple[str, float], ...] = ()
    tag: tuple[str, ...] = ()
    where: str | None = None
    text: str | None = None
    sort: str = "id"
    ascending: bool = False
    after: int | None = None
    before: int | None = None
    at: str | None = None

    @classmethod
    def of(cls, params: QueryParams) -> GroupQuery:
        """Parse query parameters. Empty ones, which forms send, are ignored.

        Raises:
            InvalidInputError: A parameter is invalid.
        """
        order = checks.one_of("order", params.get("order") or "descending", ORDERS)
        return cls(
            task=_several(params, "task"),
            status=tuple(
                checks.one_of("status", status, sorted(GroupStatus))
                for status in _several(params, "status")
            ),
            run=_several(params, "run"),
            prompt=params.get("prompt") or None,
            bounds=tuple(
                (name, parse(params[name], float, name, "a number"))
                for name in BOUNDS
                if params.get(name)
            ),
            tag=_several(params, "tag"),
            where=params.get("where") or None,
            text=params.get("text") or None,
            sort=checks.one_of("sort", params.get("sort") or "id", SORTS),
            ascending=order == "ascending",
            after=_id(params, "after"),
            before=_id(params, "before"),
            at=params.get("at") or None,
        )

    def parameters(self, **changes: Any) -> dict[str, Any]:
        """Return the query parameters of this query.

        Args:
            changes: Attributes to replace. Without `after`, `before` and `at` the parameters are
                those of the first page.
        """
        query = replace(self, **{"after": None, "before": None, "at": None, **changes})
        parameters: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value
            for name in _PARAMETERS
            if (value := getattr(query, name)) not in (None, ())
        }
        parameters |= {name: plain(value) for name, value in query.bounds}
        if query.sort != "id":
            parameters["sort"] = query.sort
        if query.ascending:
            parameters["order"] = "ascending"
        return parameters

    def cursor(self, group: GroupInfo, which: str) -> dict[str, Any]:
        """Return the changes for `parameters` that give the page "after" or "before" a group."""
        if self.sort == "id":
            return {which: group.id}
        return {which: group.id, "at": _format_value(getattr(group, self.sort))}

    @property
    def position(self) -> tuple[Any, int] | None:
        """Sort value and id of the group that the page begins after or ends before.

        None for the first page.

        Raises:
            InvalidInputError: The value is missing, or is not a value of the sort column.
        """
        group_id = self.before if self.after is None else self.after
        if group_id is None or self.sort == "id":
            return None if group_id is None else (group_id, group_id)
        if self.at == _NO_VALUE and self.column.nullable:
            return None, group_id
        kind: Callable[[str], Any] = float
        if isinstance(self.column.type, UtcDateTime):
            kind = _time
        elif isinstance(self.column.type, Integer):
            kind = _whole_number
        return parse(self.at or "", kind, "at", f"a value of {self.sort}"), group_id

    @property
    def column(self) -> Column[Any]:
        """The sort column."""
        return COLUMNS[self.sort]

    @property
    def may_read_all(self) -> bool:
        """Whether a page may have to read every group, because no index covers the query."""
        has_filters = self.run or self.bounds or self.tag or self.where or self.text
        return self.sort not in INDEXED or bool(has_filters)

    @property
    def condition(self) -> ColumnElement[bool] | None:
        """The SQL condition of the query, without tasks, statuses, runs and text.

        Raises:
            InvalidInputError: The filter or a tag is invalid.
        """
        given: list[ColumnElement[bool]] = []
        if self.prompt is not None:
            given.append(col.prompt_uid == self.prompt)
        for name, value in self.bounds:
            which, _, column = name.partition("_")
            bounded = _BOUNDED[column]
            given.append(bounded >= value if which == "min" else bounded <= value)
        given += [tagged(text) for text in self.tag]
        if self.where is not None:
            given.append(parsed(self.where).where)
        return compiling.all_of(given)

    @property
    def description(self) -> list[str]:
        """The conditions of the query as text.

        Raises:
            InvalidInputError: The filter is invalid.
        """
        conditions = [
            f"{name} is {' or '.join(values)}"
            for name, values in (("task", self.task), ("status", self.status), ("run", self.run))
            if values
        ]
        if self.prompt is not None:
            conditions.append(f"prompt is {self.prompt}")
        conditions += [f"{BOUNDS[name]} {plain(value)}" for name, value in self.bounds]
        conditions += [f"tag {text}" for text in self.tag]
        if self.where is not None:
            conditions.append(parsed(self.where).text)
        if self.text is not None:
            conditions.append(f"a completion contains {self.text!r}")
        return conditions


def plain(number: float) -> str:
    """Format a number in the short form if that parses to the same number, else exactly."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _format_value(value: float | datetime | None) -> str:
    if value is None:
        return _NO_VALUE
    return value.isoformat() if isinstance(value, datetime) else repr(value)


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).astimezone(UTC)


def _whole_number(text: str) -> int:
    return checks.whole_number("at", int(text), *checks.INT64)


def _several(params: QueryParams, name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in params.getlist(name) if value))


def _id(params: QueryParams, name: str) -> int | None:
    value = params.get(name)
    if not value:
        return None
    number = parse(value, int, name, "the id of a group")
    return checks.whole_number(name, number, 0, checks.INT64[1] - 1)


def parse(value: str, kind: Callable[[str], T], name: str, expected: str) -> T:
    """Convert the value of a query parameter.

    Raises:
        InvalidInputError: It cannot be converted, or is infinite or NaN.
    """
    try:
        parsed_value = kind(value)
    except (ValueError, OverflowError):
        parsed_value = None
    if parsed_value is None or (isinstance(parsed_value, float) and not isfinite(parsed_value)):
        raise InvalidInputError(name, expected, repr(value[:100]))
    return parsed_value
