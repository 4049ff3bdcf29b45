"""`replaydb export` and `replaydb import`: groups in files, and back."""

from __future__ import annotations

from typing import Annotated

import typer

from replaydb.cli.console import Url, progress, with_store
from replaydb.cli.selecting import check_known
from replaydb.display import human_size, printable

Several = list[str] | None


def export(
    url: Url,
    destination: Annotated[
        str, typer.Argument(help="A folder, s3://BUCKET/PREFIX, gs://... or az://...")
    ],
    buffer: Annotated[Several, typer.Option(help="Only of this buffer.")] = None,
    task: Annotated[Several, typer.Option(help="Only of this task.")] = None,
    status: Annotated[Several, typer.Option(help="Only of this status.")] = None,
    run: Annotated[Several, typer.Option(help="Only what this run put.")] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="JSON lines, not Parquet.")] = False,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out groups whose bytes are damaged.")
    ] = False,
) -> None:
    """Write groups with their tokens into files; run again, it goes on where it was broken off."""
    from replaydb.exchange import export_groups

    with_store(url, lambda store: check_known(store, buffer, tasks=task, runs=run))
    with progress("groups") as bar:
        report = export_groups(
            url,
            destination,
            buffer=buffer,
            tasks=task,
            statuses=status,
            runs=run,
            format="jsonl" if jsonl else "parquet",
            damaged="skip" if skip_damaged else "raise",
            progress=bar,
        )
    typer.echo(
        f"{report.num_groups} groups, {report.num_episodes} episodes in {report.num_files} files, "
        f"{human_size(report.num_bytes)}: {printable(report.url)}"
    )
    if report.num_left_out:
        typer.echo(f"{report.num_left_out} groups have lost their tokens, and are in none")


def import_(
    url: Url,
    source: Annotated[
        str, typer.Argument(help="A folder, a file, s3://BUCKET/PREFIX, gs://... or az://...")
    ],
    buffer: Annotated[str | None, typer.Option(help="Put everything into this buffer.")] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Make buffers that are not there.")
    ] = False,
) -> None:
    """Put the groups of an export into a store; those that it has already stay as they are."""
    from replaydb.exchange import import_groups

    with progress("groups") as bar:
        report = import_groups(url, source, buffer=buffer, create=create, progress=bar)
    typer.echo(
        f"{report.num_put} of {report.num_groups} groups put, {report.num_episodes} episodes in "
        f"{report.num_files} files"
    )
