"""Options that say which groups to list, in which order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, attrgetter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from replaydb.buffer import requests
from replaydb.checks import INT64
from replaydb.cli.console import with_store
from replaydb.database.group_columns import COLUMNS, col
from replaydb.episodes import GroupStatus
from replaydb.errors import InvalidInputError, UnknownGroupError

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

    from replaydb import Buffer, GroupInfo, RunInfo, Store

T = TypeVar("T")

#: The highest id that there can be, and be one after.
MAX_ID = INT64[1] - 1

#: Rows that a list has unless more are asked for.
DEFAULT_LIMIT = 20

Limit = Annotated[int, typer.Option(min=1, max=MAX_ID, help="How many at most.")]
Tasks = Annotated[
    list[str] | None, typer.Option("--task", help="Only of this task; several: of any of them.")
]
Statuses = Annotated[
    list[GroupStatus] | None, typer.Option("--status", help="Only of this status, or these.")
]
Runs = Annotated[list[str] | None, typer.Option("--run", help="Only of this run, or these.")]
PromptUid = Annotated[str | None, typer.Option("--prompt", help="Only of this prompt_uid.")]
MinReward = Annotated[float | None, typer.Option(help="Only of this reward, or a higher one.")]
MaxReward = Annotated[float | None, typer.Option(help="Only of this reward, or a lower one.")]
TagValues = Annotated[
    list[str] | None,
    typer.Option(
        "--tag",
        metavar="NAME=VALUE",
        help="Only with this tag: a number, true, false, null, or text; all of them if several.",
    ),
]


def _columns(incomplete: str) -> list[str]:
    return [name for name in sorted(COLUMNS) if name.startswith(incomplete) and _is_sorted_by(name)]


def _is_sorted_by(name: str) -> bool:
    try:
        requests.order(COLUMNS[name])
    except InvalidInputError:
        return False
    return True


Sort = Annotated[
    str,
    typer.Option(
        metavar="COLUMN",
        autocompletion=_columns,
        help="A column of groups that holds numbers or times; the highest come first.",
    ),
]
Ascending = Annotated[bool, typer.Option("--ascending", help="The lowest first.")]
SORTED_BY = "What they are sorted by; the highest come first."
AfterGroup = Annotated[
    int | None,
    typer.Option(
        "--after",
        metavar="ID",
        min=0,
        max=MAX_ID,
        help="Go on after the group of this id (not uid), the last of a page.",
    ),
]
GroupName = Annotated[
    str,
    typer.Argument(help="Id of the group; or else its uid, which uid:UID is in any case."),
]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which groups are asked for, and how they are sorted.

    Attributes:
        tasks: Only of these tasks.
        statuses: Only of these statuses.
        runs: Only of these runs.
        where: Only those that meet this condition.
        order_by: A column, or its `desc()`.
        after: Id of the group after which to begin.
    """

    tasks: Sequence[str] | None
    statuses: Sequence[GroupStatus] | None
    runs: Sequence[str] | None
    where: ColumnElement[bool] | None
    order_by: ColumnElement[Any]
    after: int | None

    async def page(self, buffer: Buffer, limit: int) -> list[GroupInfo]:
        """The first groups.

        Raises:
            UnknownGroupError: The one after which to begin is not in the buffer.
        """
        if self.after is None:
            return await self.page_after(buffer, limit, None)
        if not (found := await buffer.find([self.after])):
            raise UnknownGroupError([self.after])
        return await self.page_after(buffer, limit, found[0])

    async def page_after(
        self, buffer: Buffer, limit: int, last: GroupInfo | None
    ) -> list[GroupInfo]:
        """Those after a group."""
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
    """What `--sort` asks for.

    Raises:
        BadParameter: There is no such column, or it holds no numbers or times.
    """
    try:
        column: ColumnElement[Any] = getattr(col, sort)
    except AttributeError as error:
        raise typer.BadParameter(str(error), param_hint="--sort") from None
    if not _is_sorted_by(sort):
        raise typer.BadParameter(f"{sort!r} holds no numbers or times", param_hint="--sort")
    return column if ascending else column.desc()


def in_order(rows: Sequence[T], name: str, *, ascending: bool) -> list[T]:
    """Rows by an attribute, the highest first unless they ascend; what has none comes last."""
    known = [row for row in rows if getattr(row, name) is not None]
    without = [row for row in rows if getattr(row, name) is None]
    return [*sorted(known, key=attrgetter(name), reverse=not ascending), *without]


def condition(
    prompt: str | None, tag_values: Sequence[str] | None, *more: ColumnElement[bool] | None
) -> ColumnElement[bool] | None:
    """What `--prompt`, `--tag` and others ask for, together.

    Raises:
        BadParameter: A tag without a name or a value.
    """
    given = [one for one in more if one is not None]
    if prompt is not None:
        given.append(col.prompt_uid == prompt)
    given += [_tagged(text) for text in tag_values or ()]
    return reduce(and_, given) if given else None


def _tagged(text: str) -> ColumnElement[bool]:
    try:
        return requests.tagged(text)
    except InvalidInputError as error:
        reason = f"expected {error.expected}, got {error.actual}"
        raise typer.BadParameter(reason, param_hint="--tag") from None


async def info_of(buffer: Buffer, name: str) -> GroupInfo:
    """What is known of a group, by its id, or else by its uid; by that alone after `uid:`.

    Raises:
        UnknownGroupError: It is not in the buffer.
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
    """What a coroutine function makes of a buffer, which must have these tasks.

    Raises:
        InvalidInputError: The buffer has no such task, or the store no such run.
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
    """See that what is named is there.

    Args:
        store: Where.
        buffers: Names of buffers; None: all of them.
        tasks: Names of tasks, each of which one of these buffers has.
        runs: Names of runs.

    Raises:
        UnknownBufferError: There is no such buffer.
        InvalidInputError: No such task, or no such run.
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
                said = ", ".join(map(repr, known)) or "none"
                expected = f"a task of {where} (there are: {said})"
                raise InvalidInputError("task", expected, repr(name))


def run_of(known: Sequence[RunInfo], name: str) -> RunInfo:
    """The run of a name.

    Raises:
        InvalidInputError: There is none.
    """
    for info in known:
        if info.name == name:
            return info
    last = ", ".join(repr(info.name) for info in known[:-6:-1]) or "none"
    raise InvalidInputError("run", f"a run of this store (the last are: {last})", repr(name))
