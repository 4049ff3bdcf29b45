"""`replaydb copy`, `backup` and `restore`: a store made again in another database."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import Url, progress
from replaydb.display import human_size

if TYPE_CHECKING:
    from sqlalchemy import URL

    from replaydb.operations import CopyReport

Payloads = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        help="Where the payloads go: file:///FOLDER, s3://BUCKET/PREFIX, ...; else into DST.",
        show_default=False,
    ),
]

#: As shells have it for SIGINT.
_INTERRUPTED = 130


def copy(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="URL of the store; it may be in use.")
    ],
    target: Annotated[
        str, typer.Argument(metavar="DST", help="URL of a database that is new or empty.")
    ],
    payloads: Payloads = None,
    prepare: Annotated[
        bool,
        typer.Option("--prepare", help="Leave DST closed: the next copy has little left to do."),
    ] = False,
) -> None:
    """Copy a whole store, on any engine, with its payloads anywhere.

    Broken off, the same command goes on. Until it is through, nobody can open DST.
    """
    _copy(source, target, payloads, finish=not prepare)


def backup(
    url: Url,
    file: Annotated[Path, typer.Argument(help="A SQLite file that is not there yet.")],
    payloads: Payloads = None,
) -> None:
    """Copy a whole store, which may be in use, into a file: `copy` to sqlite:///FILE."""
    _copy(url, _url_of(file), payloads)


def restore(
    url: Url,
    file: Annotated[Path, typer.Argument(help="What `replaydb backup` has written.")],
    payloads: Payloads = None,
) -> None:
    """Copy a whole store from a file into a database that is new or empty: `copy` from it."""
    _copy(_url_of(file), url, payloads)


def _url_of(file: Path) -> URL:
    """Not a text, in which ?, # and % would mean something."""
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(file.absolute()))


def _copy(
    source: str | URL, target: str | URL, payloads: str | None, *, finish: bool = True
) -> None:
    from replaydb import operations

    with progress("copying") as show:

        def tell(report: CopyReport) -> None:
            if report.num_checked:  # the payloads of the target are read back
                show(report.num_checked, None)
            else:
                show(report.num_seen, report.num_groups)

        try:
            report = asyncio.run(
                operations.copy(source, target, payloads=payloads, finish=finish, progress=tell)
            )
        except KeyboardInterrupt:
            typer.echo("broken off; the same command goes on", err=True)
            raise typer.Exit(_INTERRUPTED) from None
    typer.echo(
        f"{report.num_groups} groups; {report.num_rows} rows and {report.num_payloads} payloads"
        f" ({human_size(report.num_bytes)}) were written"
    )
    if report.is_finished:
        typer.echo(
            f"every row and sequence was compared, and {report.num_checked} payloads were read back"
        )
    else:
        typer.echo("not finished: copy again, without --prepare, to open it")
