"""Calls of the command line."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from replaydb.cli import app


def run(*arguments: object, url: str, width: int = 250) -> Result:
    """Run a command on a store, on a terminal that is wide enough for the messages."""
    words = [str(one) for one in arguments]
    return CliRunner().invoke(app, words, env={"REPLAYDB_URL": url, "COLUMNS": str(width)})


def rows_of(result: Result) -> list[list[str]]:
    """Return the words of every line of a table, including its headings."""
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.stdout.splitlines() if line.strip(" ─")]


def json_of(*arguments: object, url: str) -> Any:
    """Run a command with `--json` and return the parsed output."""
    result = run(*arguments, "--json", url=url)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
