"""`replaydb vacuum`: space of rows that are gone, given back to the system."""

from __future__ import annotations

import asyncio

import typer

from replaydb.cli.console import Url, console
from replaydb.display import human_size


def vacuum(url: Url) -> None:
    """Write the database anew without the space of what is gone.

    On SQLite nobody else can write meanwhile; on PostgreSQL one table after the other is locked for
    reading and writing. Others wait, for a minute unless told otherwise.
    """
    from replaydb import operations

    with console(stderr=True).status("writing the database anew"):
        report = asyncio.run(operations.vacuum(url))
    typer.echo(
        f"{human_size(report.bytes_before)} before, {human_size(report.bytes_after)} now:"
        f" {human_size(max(report.freed_bytes, 0))} were given back"
    )
