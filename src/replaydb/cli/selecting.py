"""Options that say which groups to list, in which order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from replaydb.database.group_columns import COLUMNS, col
from replaydb.episodes import GroupStatus
from replaydb.errors import UnknownGroupError

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

    from replaydb import Buffer, GroupInfo

#: Rows that a list has unless more are asked for.
DEFAULT_LIMIT = 20

Limit = Annotated[int, typer.Option(min=1, help="How many at most.")]
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
GroupId: TypeAlias = int


def _columns(incomplete: str) -> list[str]:
    return [name for name in sorted(COLUMNS) if name.startswith(incomplete)]


Sort = Annotated[
    str,
    typer.Option(
        metavar="COLUMN",
        autocompletion=_columns,
        help="A column of groups that holds numbers or times; the highest come first.",
    ),
]
Ascending = Annotated[bool, typer.Option("--ascending", help="The lowest first.")]
AfterGroup = Annotated[
    int | None,
    typer.Option("--after", metavar="ID", help="Go on after this group, the last of a page."),
]
GroupName = Annotated[str, typer.Argument(help="Id of the group, or its uid.")]


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
        last = None if self.after is None else await info_of(buffer, str(self.after))
        return await self.page_after(buffer, limit, last)

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
        BadParameter: There is no such column.
    """
    try:
        column: ColumnElement[Any] = getattr(col, sort)
    except AttributeError as error:
        raise typer.BadParameter(str(error), param_hint="--sort") from None
    return column if ascending else column.desc()


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
    name, equals, said = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"expected NAME=VALUE, got {text!r}", param_hint="--tag")
    try:
        value = json.loads(said)
    except ValueError:
        value = said
    if isinstance(value, dict | list):
        raise typer.BadParameter("objects and lists do not compare", param_hint="--tag")
    tag = col.tags[name]
    met: ColumnElement[bool] = tag.is_(None) if value is None else tag == value
    return met


async def info_of(buffer: Buffer, name: str) -> GroupInfo:
    """What is known of a group, by its id, or else by its uid.

    Raises:
        UnknownGroupError: It is not in the buffer.
    """
    found = await buffer.find([int(name)]) if name.isdecimal() and len(name) < 19 else []
    found = found or await buffer.find(uids=[name])
    if not found:
        raise UnknownGroupError([name])
    return found[0]
