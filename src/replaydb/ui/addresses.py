"""What an address asks of the groups of a buffer, and how that is said back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from typing import Any, TypeVar

from sqlalchemy import Column, ColumnElement, Integer
from starlette.datastructures import QueryParams

from replaydb import checks
from replaydb.buffer.requests import tagged
from replaydb.database import filters
from replaydb.database.column_types import UtcDateTime
from replaydb.database.group_columns import COLUMNS, col
from replaydb.episodes import GroupStatus
from replaydb.errors import InvalidInputError
from replaydb.results import GroupInfo
from replaydb.ui.expressions import parsed

T = TypeVar("T")

#: Columns with an index: in their order a page is read as quickly of a million groups.
INDEXED = ("id", "priority", "comparable_version", "times_sampled", "last_sampled_at")
#: Columns that groups are sorted by.
SORTS = (*INDEXED, "num_episodes", "num_tokens", "reward_mean", "reward_std")
#: The fields that are bounds of numbers, and what they mean.
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
#: What goes into an address as it is.
_PARTS = ("task", "status", "run", "prompt", "tag", "where", "text", "after", "before", "at")
#: Said of a group without a value in the column they are sorted by.
_NO_VALUE = "none"


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups that an address asks for.

    Attributes:
        task: Of one of these tasks.
        status: Of one of these statuses.
        run: Put by one of these runs.
        prompt: Of this prompt.
        bounds: Numbers that are bounds, by the name of their field.
        tag: With these tags, as NAME=VALUE.
        where: A filter as text: see `expressions`.
        text: Said by one of the completions.
        sort: The column they are sorted by.
        ascending: The lowest first.
        after: Id of the group after which to begin.
        before: Id of the group before which to end.
        at: What that group had in the column they are sorted by when it was looked at; it may be
            elsewhere, or gone, by now. Sorted by id that is the id.
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
    def of(cls, said: QueryParams) -> Groups:
        """What an address says. Fields that are empty say nothing, as forms send them.

        Raises:
            InvalidInputError: A field holds what it cannot.
        """
        sort = said.get("sort") or "id"
        if sort not in SORTS:
            raise InvalidInputError("sort", f"one of {', '.join(SORTS)}", repr(sort))
        order = said.get("order") or "descending"
        if order not in ("ascending", "descending"):
            raise InvalidInputError("order", "ascending or descending", repr(order))
        return cls(
            task=_several(said, "task"),
            status=tuple(
                checks.one_of("status", status, sorted(GroupStatus))
                for status in _several(said, "status")
            ),
            run=_several(said, "run"),
            prompt=said.get("prompt") or None,
            bounds=tuple(
                (name, _read(said[name], float, name, "a number"))
                for name in BOUNDS
                if said.get(name)
            ),
            tag=_several(said, "tag"),
            where=said.get("where") or None,
            text=said.get("text") or None,
            sort=sort,
            ascending=order == "ascending",
            after=_id(said, "after"),
            before=_id(said, "before"),
            at=said.get("at") or None,
        )

    def query(self, **changes: Any) -> dict[str, Any]:
        """The same as the parts of an address; of the first page, unless another is given.

        Args:
            changes: What is to be otherwise.
        """
        asked = replace(self, **{"after": None, "before": None, "at": None, **changes})
        query: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value
            for name in _PARTS
            if (value := getattr(asked, name)) not in (None, ())
        }
        query |= {name: plain(value) for name, value in asked.bounds}
        if asked.sort != "id":
            query["sort"] = asked.sort
        if asked.ascending:
            query["order"] = "ascending"
        return query

    def beyond(self, group: GroupInfo, which: str) -> dict[str, Any]:
        """The changes of `query` that lead to the page "after" a group, or "before" it."""
        if self.sort == "id":
            return {which: group.id}
        return {which: group.id, "at": _said(getattr(group, self.sort))}

    @property
    def place(self) -> tuple[Any, int] | None:
        """Value and id of the group after or before which the page is; None for the first page.

        Raises:
            InvalidInputError: The value is not said, or none of the column.
        """
        mark = self.before if self.after is None else self.after
        if mark is None or self.sort == "id":
            return None if mark is None else (mark, mark)
        if self.at == _NO_VALUE and self.column.nullable:
            return None, mark
        kind: Callable[[str], Any] = float
        if isinstance(self.column.type, UtcDateTime):
            kind = _time
        elif isinstance(self.column.type, Integer):
            kind = _whole_number
        return _read(self.at or "", kind, "at", f"a value of {self.sort}"), mark

    @property
    def column(self) -> Column[Any]:
        """The column they are sorted by."""
        return COLUMNS[self.sort]

    @property
    def may_read_all(self) -> bool:
        """Whether a page may have to read every group, as no index leads to those on it."""
        has_filters = self.run or self.bounds or self.tag or self.where or self.text
        return self.sort not in INDEXED or bool(has_filters)

    @property
    def condition(self) -> ColumnElement[bool] | None:
        """What has to be true of a group, but for tasks, statuses, runs and text.

        Raises:
            InvalidInputError: The filter, or a tag, is none.
        """
        given: list[ColumnElement[bool]] = []
        if self.prompt is not None:
            given.append(col.prompt_uid == self.prompt)
        for name, value in self.bounds:
            which, _, column = name.partition("_")
            of = _BOUNDED[column]
            given.append(of >= value if which == "min" else of <= value)
        given += [tagged(text) for text in self.tag]
        if self.where is not None:
            given.append(parsed(self.where).where)
        return filters.all_of(given)

    @property
    def meaning(self) -> list[str]:
        """What has to be true of a group, each a sentence for people.

        Raises:
            InvalidInputError: The filter is none.
        """
        said = [
            f"{name} is {_or(values)}"
            for name, values in (("task", self.task), ("status", self.status), ("run", self.run))
            if values
        ]
        if self.prompt is not None:
            said.append(f"prompt is {self.prompt}")
        said += [f"{BOUNDS[name]} {plain(value)}" for name, value in self.bounds]
        said += [f"tag {text}" for text in self.tag]
        if self.where is not None:
            said.append(parsed(self.where).text)
        if self.text is not None:
            said.append(f"a completion says {self.text!r}")
        return said


def plain(number: float) -> str:
    """A number as people write it, and as it is read again."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _said(value: float | datetime | None) -> str:
    if value is None:
        return _NO_VALUE
    return value.isoformat() if isinstance(value, datetime) else repr(value)


def _time(said: str) -> datetime:
    time = datetime.fromisoformat(said)
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).astimezone(UTC)


def _whole_number(said: str) -> int:
    return checks.whole_number("at", int(said), *checks.INT64)


def _several(said: QueryParams, name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in said.getlist(name) if value))


def _id(said: QueryParams, name: str) -> int | None:
    value = said.get(name)
    if not value:
        return None
    number = _read(value, int, name, "the id of a group")
    return checks.whole_number(name, number, 0, checks.INT64[1] - 1)


def _read(value: str, kind: Callable[[str], T], name: str, expected: str) -> T:
    try:
        read = kind(value)
    except (ValueError, OverflowError):
        read = None
    if read is None or (isinstance(read, float) and not isfinite(read)):
        raise InvalidInputError(name, expected, repr(value[:100]))
    return read


def _or(names: Sequence[str]) -> str:
    return " or ".join(names)
