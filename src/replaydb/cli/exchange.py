"""`replaydb export` and `replaydb import`: export groups to files and import them."""

from __future__ import annotations

from typing import Annotated

import typer

from replaydb.cli.console import Url, progress, with_store
from replaydb.cli.selecting import (
    Buffers,
    Runs,
    Statuses,
    Tasks,
    Where,
    check_known,
    condition,
)
from replaydb.util.display import human_size, printable


def export(
    url: Url,
    destination: Annotated[
        str, typer.Argument(help="Folder, s3://BUCKET/PREFIX, gs://... or az://...")
    ],
    buffer: Buffers = None,
    task: Tasks = None,
    status: Statuses = None,
    run: Runs = None,
    where: Where = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Write JSON Lines instead of Parquet.")
    ] = False,
    skip_damaged: Annotated[
        bool,
        typer.Option(
            "--skip-damaged", help="Skip groups with damaged payloads instead of failing."
        ),
    ] = False,
) -> None:
    """Export groups and tokens to Parquet or JSON Lines files. Rerun to resume."""
    from replaydb.exchange import export_groups

    wanted = condition(where)
    with_store(url, lambda store: check_known(store, buffer, tasks=task, runs=run))
    with progress("groups") as bar:
        report = export_groups(
            url,
            destination,
            buffer=buffer,
            tasks=task,
            statuses=status,
            runs=run,
            where=wanted,
            format="jsonl" if jsonl else "parquet",
            damaged="skip" if skip_damaged else "raise",
            progress=bar,
        )
    typer.echo(
        f"{report.num_groups} groups, {report.num_episodes} episodes in {report.num_files} files, "
        f"{human_size(report.num_bytes)}: {printable(report.url)}"
    )
    if report.num_left_out:
        typer.echo(f"not exported: {report.num_left_out} groups without readable tokens")


def import_(
    url: Url,
    source: Annotated[
        str, typer.Argument(help="Folder, file, s3://BUCKET/PREFIX, gs://... or az://...")
    ],
    buffer: Annotated[
        str | None,
        typer.Option(help="Put all groups into this buffer (default: the buffers in the files)."),
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Create missing buffers.")] = False,
) -> None:
    """Import exported groups into a store. Skips groups whose uids exist. Rerun to resume."""
    from replaydb.exchange import import_groups

    with progress("groups") as bar:
        report = import_groups(url, source, buffer=buffer, create=create, progress=bar)
    typer.echo(
        f"put {report.num_put} of {report.num_groups} groups; read {report.num_episodes} episodes "
        f"in {report.num_files} files"
    )
