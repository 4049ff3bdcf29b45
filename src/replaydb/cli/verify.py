"""`replaydb verify`: everything that a store says of itself, compared with what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import (
    Json,
    Url,
    print_json,
    print_table,
    progress,
    with_store,
)
from replaydb.display import human_size

if TYPE_CHECKING:
    from replaydb import Store
    from replaydb.operations import VerifyReport


def verify(
    url: Url,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Correct accounts of tasks and packs, and sequences of ids; restore groups that"
            " failed because they were damaged, if they are intact now.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Read every payload, and compare all rows and accounts with each other.

    Exits with 1 where something is wrong, and was not repaired.
    """
    with progress("reading payloads") as show:

        async def work(store: Store) -> VerifyReport:
            from replaydb import operations

            return await operations.verify(
                store,
                repair=repair,
                progress=lambda report: show(report.num_payloads, report.total_payloads),
            )

        report = with_store(url, work, write=repair)
    if as_json:
        print_json(report)
    else:
        _print(report)
    if not report.is_sound:
        raise typer.Exit(1)


def _print(report: VerifyReport) -> None:
    if report.problems:
        print_table(
            ("kind", "where", "what is wrong", "repaired"),
            [
                (one.kind, one.where, one.what, "yes" if one.is_repaired else "no")
                for one in report.problems
            ],
        )
    read = f"{report.num_payloads} payloads ({human_size(report.num_bytes)})"
    wrong = f"{report.num_problems} problems" if report.num_problems else "nothing is wrong"
    if report.num_repaired:
        wrong += f", {report.num_repaired} of them repaired"
    typer.echo(f"{report.num_groups} groups, {read} read: {wrong}")
    if report.num_problems > len(report.problems):
        typer.echo(f"the first {len(report.problems)} are shown")
