"""`replaydb copy`, `backup` and `restore`: copy a whole store to another database."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import Url, progress
from replaydb.util.display import human_size

if TYPE_CHECKING:
    from sqlalchemy import URL

    from replaydb.operations import CopyReport

Payloads = Annotated[
    str | None,
    typer.Option(
        metavar="LOCATION",
        help="Payload location of the copy: file:///FOLDER, s3://BUCKET/PREFIX, ..."
        " (default: in the database).",
        show_default=False,
    ),
]

#: Exit code after SIGINT, as shells report it.
_INTERRUPTED = 130


def copy(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="URL of the store to copy; it may be in use.")
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="URL of a new or empty database.")],
    payloads: Payloads = None,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare",
            help="Copy most data now and leave DST incomplete; rerun without --prepare to finish.",
        ),
    ] = False,
) -> None:
    """Copy a whole store to another database on either engine, with payloads at any location.

    Rerun to resume an interrupted copy. DST cannot be opened until the copy is complete.
    """
    _copy(source, target, payloads, finish=not prepare)


def backup(
    url: Url,
    file: Annotated[Path, typer.Argument(help="SQLite file to create.")],
    payloads: Payloads = None,
) -> None:
    """Back up a store, even in use, to a new SQLite file. Same as `copy` to sqlite:///FILE."""
    _copy(url, _url_of(file), payloads)


def restore(
    url: Url,
    file: Annotated[Path, typer.Argument(help="Backup file written by `replaydb backup`.")],
    payloads: Payloads = None,
) -> None:
    """Restore a backup into a new or empty database. Same as `copy` from sqlite:///FILE."""
    _copy(_url_of(file), url, payloads)


def _url_of(file: Path) -> URL:
    """Return the URL of a file; in a string, ?, # and % would have a meaning."""
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(file.absolute()))


def _copy(
    source: str | URL, target: str | URL, payloads: str | None, *, finish: bool = True
) -> None:
    from replaydb import operations

    with progress("copying") as show:

        def update(report: CopyReport) -> None:
            if report.num_checked:  # reading back the payloads of the target
                show(report.num_checked, None)
            else:
                show(report.num_seen, report.num_groups)

        try:
            report = asyncio.run(
                operations.copy(source, target, payloads=payloads, finish=finish, progress=update)
            )
        except KeyboardInterrupt:
            typer.echo("interrupted; rerun the same command to resume", err=True)
            raise typer.Exit(_INTERRUPTED) from None
    typer.echo(
        f"{report.num_groups} groups: wrote {report.num_rows} rows and {report.num_payloads}"
        f" payloads ({human_size(report.num_bytes)})"
    )
    if report.is_finished:
        typer.echo(
            f"verified: compared all rows and sequences, read back {report.num_checked} payloads"
        )
    else:
        typer.echo("not finished: rerun without --prepare to finish")
