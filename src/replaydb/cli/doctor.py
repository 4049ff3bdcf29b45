"""`replaydb doctor`: health checks of a store, with fixes."""

from __future__ import annotations

import asyncio

import typer

from replaydb.cli.console import Json, Url, print_json, print_table


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
