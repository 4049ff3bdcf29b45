"""Shared options that filter and sort groups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

import replaydb as rdb
from replaydb.cli.console import with_store
from replaydb.domain.checks import INT64
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import InvalidInputError, UnknownGroupError

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

    from replaydb import Buffer, GroupInfo, RunInfo, Store

T = TypeVar("T")

#: The largest id that the options accept: `MAX_ID + 1` fits the column, too.
MAX_ID = INT64[1] - 1

#: Default number of rows of a list.
DEFAULT_LIMIT = 20

Limit = Annotated[int, typer.Option(min=1, max=MAX_ID, help="Maximum number of rows.")]
Buffers = Annotated[
    list[str] | None, typer.Option("--buffer", help="Filter by buffer (repeatable).")
]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="Filter by task (repeatable).")]
Statuses = Annotated[
    list[GroupStatus] | None, typer.Option("--status", help="Filter by status (repeatable).")
]
Runs = Annotated[list[str] | None, typer.Option("--run", help="Filter by run (repeatable).")]
Where = Annotated[
    str | None,
    typer.Option(
        metavar="FILTER",
        help="Filter by an expression over columns, as in the web UI:"
        ' \'reward_mean > 0.5 and tags["level"] == "hard"\'.',
    ),
]


def _columns(incomplete: str) -> list[str]:
    return [name for name in dir(rdb.col) if name.startswith(incomplete) and _is_sorted_by(name)]


def _is_sorted_by(name: str) -> bool:
    from replaydb.buffer import requests

    try:
        requests.order(getattr(rdb.col, name))
    except InvalidInputError:
        return False
    return True


Sort = Annotated[
    str,
    typer.Option(
        metavar="COLUMN",
        autocompletion=_columns,
        help="Sort by this numeric or time column, descending.",
    ),
]
Ascending = Annotated[bool, typer.Option("--ascending", help="Sort in ascending order.")]
SORTED_BY = "Sort by this column, descending."
AfterGroup = Annotated[
    int | None,
    typer.Option(
        "--after",
        metavar="ID",
        min=0,
        max=MAX_ID,
        help="Show the next page: the id of the last group on the previous page.",
    ),
]
GroupName = Annotated[
    str,
    typer.Argument(help="Id or uid of the group; write uid:UID if a uid looks like an id."),
]


@dataclass(frozen=True, slots=True)
class Selection:
    """Filters and sort order of a list of groups.

    Attributes:
        tasks: Names of tasks; None or empty for all.
        statuses: Statuses; None or empty for all.
        runs: Names of the runs that put the groups; None or empty for all.
        where: A condition that the groups meet, or None.
        order_by: A column, or its `desc()`.
        after: Id of the last group of the page before; None for the first page.
    """

    tasks: Sequence[str] | None
    statuses: Sequence[GroupStatus] | None
    runs: Sequence[str] | None
    where: ColumnElement[bool] | None
    order_by: ColumnElement[Any]
    after: int | None

    async def page(
        self, buffer: Buffer, limit: int, last: GroupInfo | None = None
    ) -> list[GroupInfo]:
        """Return the groups after `last`; None for the first page.

        Raises:
            UnknownGroupError: The group `after` is not in the buffer.
        """
        if last is None and self.after is not None:
            found = await buffer.find([self.after])
            if not found:
                raise UnknownGroupError([self.after])
            last = found[0]
        return await buffer.find(
            tasks=self.tasks or None,
            statuses=self.statuses or None,
            runs=self.runs or None,
            where=self.where,
            order_by=self.order_by,
            limit=limit,
            after=last,
        )


def ordered(sort: str, ascending: bool) -> ColumnElement[Any]:
    """Return the sort order of `--sort` and `--ascending`.

    Raises:
        BadParameter: The column does not exist, or does not hold numbers or times.
    """
    try:
        column: ColumnElement[Any] = getattr(rdb.col, sort)
    except AttributeError as error:
        raise typer.BadParameter(str(error), param_hint="--sort") from None
    if not _is_sorted_by(sort):
        raise typer.BadParameter(f"{sort!r} is not numeric or a time", param_hint="--sort")
    return column if ascending else column.desc()


def in_order(rows: Sequence[T], name: str, *, ascending: bool) -> list[T]:
    """Sort rows by an attribute, descending by default; rows without a value come last."""
    known = [row for row in rows if getattr(row, name) is not None]
    without = [row for row in rows if getattr(row, name) is None]
    return [*sorted(known, key=attrgetter(name), reverse=not ascending), *without]


def condition(where: str | None) -> ColumnElement[bool] | None:
    """Return the condition of `--where`; None without one.

    Raises:
        BadParameter: The filter is invalid.
    """
    from replaydb.database.filters.parsing import parsed

    try:
        return None if where is None else parsed(where).where
    except InvalidInputError as error:
        reason = f"expected {error.expected}, got {error.actual}"
        raise typer.BadParameter(reason, param_hint="--where") from None


async def info_of(buffer: Buffer, name: str) -> GroupInfo:
    """Return a group by its id, else by its uid; `uid:UID` is always a uid.

    Raises:
        UnknownGroupError: The group is not in the buffer.
    """
    found: list[GroupInfo] = []
    if name.startswith("uid:") and name != "uid:":
        found = await buffer.find(uids=[name.removeprefix("uid:")])
    elif name.isascii() and name.isdecimal() and len(name) < 20 and int(name) <= MAX_ID:
        found = await buffer.find([int(name)])
    found = found or await buffer.find(uids=[name])
    if not found:
        raise UnknownGroupError([name])
    return found[0]


def with_known(
    url: str,
    buffer: str,
    work: Callable[[Buffer], Awaitable[T]],
    *,
    tasks: Sequence[str] | None = None,
    runs: Sequence[str] | None = None,
) -> T:
    """Open a buffer, check that its tasks and runs exist, and return the result of `work`.

    Raises:
        UnknownBufferError: The buffer does not exist.
        InvalidInputError: A task of `tasks` or a run of `runs` does not exist.
    """

    async def found(store: Store) -> T:
        await check_known(store, [buffer], tasks=tasks, runs=runs)
        return await work(await store.buffer(buffer, create=False))

    return with_store(url, found)


async def check_known(
    store: Store,
    buffers: Sequence[str] | None = None,
    *,
    tasks: Sequence[str] | None = None,
    runs: Sequence[str] | None = None,
) -> None:
    """Check that buffers, tasks and runs exist.

    Args:
        store: The store.
        buffers: Names of buffers; None for all.
        tasks: Names of tasks; each must be in one of these buffers.
        runs: Names of runs.

    Raises:
        UnknownBufferError: A buffer does not exist.
        InvalidInputError: A task or a run does not exist.
    """
    names = buffers or ([info.name for info in await store.buffers()] if tasks else [])
    opened = [await store.buffer(name, create=False) for name in names]
    known_runs = await store.runs() if runs else []
    for name in runs or ():
        run_of(known_runs, name)
    if tasks:
        stats = [await buffer.stats() for buffer in opened]
        known = sorted({task.task_name for one in stats for task in one.tasks})
        for name in tasks:
            if name not in known:
                where = "this buffer" if len(names) == 1 else "these buffers"
                names_shown = ", ".join(map(repr, known)) or "none"
                expected = f"a task of {where} (existing: {names_shown})"
                raise InvalidInputError("task", expected, repr(name))


def run_of(known: Sequence[RunInfo], name: str) -> RunInfo:
    """Return the run with a name.

    Raises:
        InvalidInputError: There is no such run.
    """
    for info in known:
        if info.name == name:
            return info
    last = ", ".join(repr(info.name) for info in known[:-6:-1]) or "none"
    raise InvalidInputError("run", f"a run of this store (last runs: {last})", repr(name))
