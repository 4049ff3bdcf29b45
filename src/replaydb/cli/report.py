"""`replaydb report`: a page about a buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replaydb import extras
from replaydb.cli.console import BufferName, Url, progress


def report(
    url: Url,
    buffer: BufferName,
    output: Annotated[
        Path, typer.Option("--output", "-o", dir_okay=False, help="The file to write.")
    ] = Path("report.html"),
) -> None:
    """Write a page of plots, tables and texts about a buffer: one file, needing no network."""
    extras.need("report", "a report")  # before the package around it names its own

    from replaydb.analysis.report import write_report

    with progress("reading") as told:
        write_report(url, buffer, output, progress=lambda rows: told(rows, None))
    typer.echo(str(output))
