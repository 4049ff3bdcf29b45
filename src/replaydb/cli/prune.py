"""`replaydb prune`: what a folder or object store holds for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import Url, console, human_size, with_store

if TYPE_CHECKING:
    from replaydb import PruneReport


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
    with console(stderr=True).status("looking") as status:

        def show(report: PruneReport) -> None:
            status.update(f"{report.num_packs} packs, {human_size(report.freed_bytes)} for nothing")

        report = with_store(
            url,
            lambda store: store.prune(
                dry_run=not remove, min_age=3600.0 * min_hours, progress=show
            ),
            write=True,
        )
    removed, written = ("removed", "written anew") if remove else ("to remove", "to write anew")
    typer.echo(f"{report.num_packs} packs, {human_size(report.num_bytes)}")
    lines = (
        (report.num_orphans, f"belong to nothing: {removed},", report.orphan_bytes),
        (report.num_condemned, f"are used up: {removed},", report.condemned_bytes),
        (report.num_compacted, f"are mostly dead: {written} without", report.compacted_bytes),
    )
    for count, what, num_bytes in lines:
        typer.echo(f"  {count} {what} {human_size(num_bytes)}")
    if report.num_damaged:
        typer.echo(f"  {report.num_damaged} are damaged, and stay as they are")
    if not remove and report.freed_bytes:
        typer.echo(f"nothing was changed; --remove frees {human_size(report.freed_bytes)}")
