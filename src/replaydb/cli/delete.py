"""`replaydb groups|buffers|runs delete`: report what will be deleted, confirm, and delete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaydb.cli.console import BufferName, Url, Yes, progress, with_buffer, with_store
from replaydb.cli.selecting import Where, condition, info_of
from replaydb.database.filters import compiling
from replaydb.database.filters.group_columns import col
from replaydb.util.display import human_size, printable

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

    from replaydb import Buffer
    from replaydb.operations import Removal

#: Number of groups that are read at once.
PAGE = 1000


def groups(
    url: Url,
    buffer: BufferName,
    group: Annotated[
        list[str] | None, typer.Argument(help="Ids or uids of the groups; none with --where: all.")
    ] = None,
    where: Where = None,
    yes: Yes = False,
) -> None:
    """Delete groups of any status, with their episodes and payloads."""
    wanted = condition(where)
    if wanted is None and not group:
        raise typer.BadParameter("one of these is required", param_hint="GROUP, --where")

    async def find(opened: Buffer) -> tuple[ColumnElement[bool] | None, Counter[str]]:
        ids = [(await info_of(opened, name)).id for name in group or ()]
        which = compiling.all_of([wanted, col.id.in_(ids) if group else None])
        total: Counter[str] = Counter()
        page = await opened.find(where=which, limit=PAGE)
        while page:
            total["groups"] += len(page)
            total["bytes"] += sum(info.num_bytes for info in page)
            total["leased"] += sum(info.lease_id is not None for info in page)
            page = await opened.find(where=which, limit=PAGE, after=page[-1])
        return which, total

    which, total = with_buffer(url, buffer, find)
    shown = f"{total['groups']} groups, {human_size(total['bytes'])}"
    leased = total["leased"]
    _confirm(f"{shown}{f'; {leased} of them are leased or claimed' if leased else ''}", yes)
    number = with_buffer(url, buffer, lambda opened: opened.delete(where=which), write=True)
    typer.echo(f"deleted {number} groups")


def buffers(url: Url, buffer: BufferName, yes: Yes = False) -> None:
    """Delete a buffer: its groups, draws, leases, cursors and settings."""
    from replaydb.operations import delete_buffer

    _delete(url, f"buffer {printable(buffer)}", partial(delete_buffer, name=buffer), yes)


def runs(
    url: Url,
    run: Annotated[str, typer.Argument(help="Name of the run; it must have ended.")],
    yes: Yes = False,
) -> None:
    """Delete a run with the groups that it put, in every buffer, and its draws."""
    from replaydb.operations import delete_run

    _delete(url, f"run {printable(run)}", partial(delete_run, name=run), yes)


def _delete(
    url: str, what: str, delete: Callable[..., Coroutine[Any, Any, Removal]], yes: bool
) -> None:
    expected = with_store(url, lambda store: delete(store, dry_run=True))
    _confirm(f"{what}: {described(expected)}", yes)
    with progress("deleting") as show:
        done = with_store(url, lambda store: delete(store, progress=show), write=True)
    typer.echo(f"deleted: {described(done)}")


def described(removal: Removal) -> str:
    """Return the counts and sizes of a removal as text."""
    size = human_size(removal.num_bytes)
    return f"{removal.num_groups} groups, {size}; {removal.num_draws} draws"


def _confirm(what: str, yes: bool) -> None:
    if not yes:
        typer.confirm(f"{what}\nDelete permanently?", abort=True)
