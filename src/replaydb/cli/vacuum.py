"""`replaydb vacuum`: reclaim disk space."""

from __future__ import annotations

import asyncio

import typer

from replaydb.cli.console import Url, console
from replaydb.util.display import human_size


def vacuum(url: Url) -> None:
    """Reclaim disk space (VACUUM).

    On SQLite, other processes cannot write meanwhile. On PostgreSQL, one table after another is
    locked for reads and writes. Blocked calls fail after their time limit,
    usually one minute.
    """
    from replaydb import operations

    with console(stderr=True).status("vacuuming the database"):
        report = asyncio.run(operations.vacuum(url))
    typer.echo(
        f"freed {human_size(max(report.freed_bytes, 0))}:"
        f" {human_size(report.bytes_before)} before, {human_size(report.bytes_after)} now"
    )
