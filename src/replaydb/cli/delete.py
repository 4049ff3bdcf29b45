"""`replaydb groups|buffers|runs delete`: what is said to go, once it is known how much that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import (
    BufferName,
    Url,
    progress,
    with_buffer,
    with_store,
)
from replaydb.cli.selecting import info_of
from replaydb.display import human_size, printable

if TYPE_CHECKING:
    from replaydb import Buffer, GroupInfo
    from replaydb.operations import Removal

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def groups(
    url: Url,
    buffer: BufferName,
    group: Annotated[list[str], typer.Argument(help="Ids of the groups, or their uids.")],
    yes: Yes = False,
) -> None:
    """Delete groups, of any status, with everything that belongs to them."""

    async def find(opened: Buffer) -> list[GroupInfo]:
        named = [await info_of(opened, name) for name in group]
        return list({info.id: info for info in named}.values())

    found = with_buffer(url, buffer, find)
    held = sum(info.lease_id is not None for info in found)
    shown = f"{len(found)} groups, {human_size(sum(info.num_bytes for info in found))}"
    _confirm(f"{shown}{f'; {held} of them are leased or claimed' if held else ''}", yes)
    ids = [info.id for info in found]
    number = with_buffer(url, buffer, lambda opened: opened.delete(ids), write=True)
    typer.echo(f"{number} groups deleted")


def buffers(url: Url, buffer: BufferName, yes: Yes = False) -> None:
    """Delete a buffer: its groups, draws, leases, cursors and settings."""
    from replaydb.operations import delete_buffer

    there = with_store(url, lambda store: delete_buffer(store, buffer, dry_run=True))
    _confirm(f"buffer {printable(buffer)}: {told(there)}", yes)
    with progress("deleting") as show:
        gone = with_store(
            url, lambda store: delete_buffer(store, buffer, progress=show), write=True
        )
    typer.echo(f"deleted: {told(gone)}")


def runs(
    url: Url,
    run: Annotated[str, typer.Argument(help="Name of the run, which should be over.")],
    yes: Yes = False,
) -> None:
    """Delete a run with the groups that it put, in every buffer, and the draws that it made."""
    from replaydb.operations import delete_run

    there = with_store(url, lambda store: delete_run(store, run, dry_run=True))
    _confirm(f"run {printable(run)}: {told(there)}", yes)
    with progress("deleting") as show:
        gone = with_store(url, lambda store: delete_run(store, run, progress=show), write=True)
    typer.echo(f"deleted: {told(gone)}")


def told(removal: Removal) -> str:
    """How much goes."""
    size = human_size(removal.num_bytes)
    return f"{removal.num_groups} groups, {size}; {removal.num_draws} draws"


def _confirm(what: str, yes: bool) -> None:
    if not yes:
        typer.confirm(f"{what}\nDelete that for good?", abort=True)
