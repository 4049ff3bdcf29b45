"""`replaydb prune`: what a folder or object store holds for nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import Url

if TYPE_CHECKING:
    from replaydb import PruneReport

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def prune(
    url: Url,
    remove: Annotated[
        bool, typer.Option("--remove", help="Do it; without this it only says what it would do.")
    ] = False,
    min_hours: Annotated[
        float, typer.Option(min=2.0, help="Leave alone what was written more recently.")
    ] = 24.0,
) -> None:
    """Find, and remove, payloads outside the database that belong to nothing."""
    report = asyncio.run(_prune(url, remove=remove, min_age=3600.0 * min_hours))
    removed, written = ("removed", "written anew") if remove else ("to remove", "to write anew")
    typer.echo(f"{report.num_packs} packs, {_size(report.num_bytes)}")
    lines = (
        (report.num_orphans, f"belong to nothing: {removed},", report.orphan_bytes),
        (report.num_condemned, f"are used up: {removed},", report.condemned_bytes),
        (report.num_compacted, f"are mostly dead: {written} without", report.compacted_bytes),
    )
    for count, what, num_bytes in lines:
        typer.echo(f"  {count} {what} {_size(num_bytes)}")
    if report.num_damaged:
        typer.echo(f"  {report.num_damaged} are damaged, and stay as they are")
    if not remove and report.freed_bytes:
        typer.echo(f"nothing was changed; --remove frees {_size(report.freed_bytes)}")


async def _prune(url: str, *, remove: bool, min_age: float) -> PruneReport:
    from rich.console import Console

    from replaydb import Store

    console = Console(stderr=True)
    with console.status("looking") as status:

        def show(report: PruneReport) -> None:
            status.update(f"{report.num_packs} packs, {_size(report.freed_bytes)} for nothing")

        async with Store.open(url, migrate=False) as store:
            return await store.prune(dry_run=not remove, min_age=min_age, progress=show)


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"
