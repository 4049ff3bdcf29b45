"""`replaydb doctor`, `verify` and `vacuum`: check a store, repair it, and reclaim disk space."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import (
    Json,
    Url,
    console,
    print_json,
    print_table,
    progress,
    with_store,
)
from replaydb.util.display import human_size

if TYPE_CHECKING:
    from replaydb import Store
    from replaydb.operations import VerifyReport


def doctor(url: Url, as_json: Json = False) -> None:
    """Check the database engine, its settings, disk, tables and payload store; suggest fixes.

    Reads only. Exits with 1 if any result is bad.
    """
    from replaydb.operations import examine

    findings = asyncio.run(examine(url))
    if as_json:
        print_json(findings)
    else:
        print_table(
            ("", "check", "result", "fix"),
            [(one.level, one.subject, one.text, one.fix or "") for one in findings],
        )
    if any(one.level == "bad" for one in findings):
        raise typer.Exit(1)


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
        _print_report(report)
    if not report.is_sound:
        raise typer.Exit(1)


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


def _print_report(report: VerifyReport) -> None:
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
