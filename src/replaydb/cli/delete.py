"""`replaydb groups|buffers|runs delete`: report what will be deleted, confirm, and delete."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaydb.cli.console import BufferName, Url, Yes, progress, with_buffer, with_store
from replaydb.cli.selecting import info_of
from replaydb.util.display import human_size, printable

if TYPE_CHECKING:
    from replaydb import Buffer, GroupInfo
    from replaydb.operations import Removal


def groups(
    url: Url,
    buffer: BufferName,
    group: Annotated[list[str], typer.Argument(help="Ids or uids of the groups.")],
    yes: Yes = False,
) -> None:
    """Delete groups of any status, with their episodes and payloads."""

    async def find(opened: Buffer) -> list[GroupInfo]:
        named = [await info_of(opened, name) for name in group]
        return list({info.id: info for info in named}.values())

    found = with_buffer(url, buffer, find)
    leased = sum(info.lease_id is not None for info in found)
    shown = f"{len(found)} groups, {human_size(sum(info.num_bytes for info in found))}"
    _confirm(f"{shown}{f'; {leased} of them are leased or claimed' if leased else ''}", yes)
    ids = [info.id for info in found]
    number = with_buffer(url, buffer, lambda opened: opened.delete(ids), write=True)
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
