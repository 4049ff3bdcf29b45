"""`replaydb doctor`: what is wrong with a store, and what mends it."""

from __future__ import annotations

import asyncio

import typer

from replaydb.cli.console import Json, Url, print_json, print_table


def doctor(url: Url, as_json: Json = False) -> None:
    """Look for what is wrong with the engine, its settings, disk, tables and payload place."""
    from replaydb.operations import examine

    findings = asyncio.run(examine(url))
    if as_json:
        print_json(findings)
    else:
        print_table(
            ("", "of", "finding", "what mends it"),
            [(one.level, one.subject, one.text, one.mend or "") for one in findings],
        )
    if any(one.level == "bad" for one in findings):
        raise typer.Exit(1)
