"""`replaydb verify`: integrity check of rows, counters and payloads."""

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
from replaydb.util.display import human_size

if TYPE_CHECKING:
    from replaydb import Store
    from replaydb.operations import VerifyReport


def verify(
    url: Url,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Rebuild tag indexes, recompute the staleness of groups and the counters of tasks"
            " and packs, fix id sequences, and restore groups that were marked failed because of"
            " damage but can be read now.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check the integrity of a store: read every payload, cross-check all rows and counters.

    Exits with 1 if a problem was found and not repaired.
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
            ("kind", "where", "problem", "repaired"),
            [
                (one.kind, one.where, one.what, "yes" if one.is_repaired else "no")
                for one in report.problems
            ],
        )
    read = f"{report.num_payloads} payloads ({human_size(report.num_bytes)})"
    result = f"{report.num_problems} problems" if report.num_problems else "no problems"
    if report.num_repaired:
        result += f", {report.num_repaired} repaired"
    typer.echo(f"checked {report.num_groups} groups, {read}: {result}")
    if report.num_problems > len(report.problems):
        typer.echo(f"showing the first {len(report.problems)}")
