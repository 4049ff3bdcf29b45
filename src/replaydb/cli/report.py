"""`replaydb report`: HTML report of a buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replaydb.cli.console import BufferName, Url, progress
from replaydb.util import extras


def report(
    url: Url,
    buffer: BufferName,
    output: Annotated[
        Path, typer.Option("--output", "-o", dir_okay=False, help="File to write.")
    ] = Path("report.html"),
) -> None:
    """Write a self-contained HTML report of a buffer, with plots, tables and texts."""
    extras.need("report", "a report")  # before `replaydb.analysis` names its own extra

    from replaydb.analysis.report import write_report

    with progress("reading") as update:
        write_report(url, buffer, output, progress=lambda rows: update(rows, None))
    typer.echo(str(output))
