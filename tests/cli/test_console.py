"""Shared parts of all commands: tables, JSON, progress and errors."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from replaydb import Store
from replaydb.cli import app, console
from replaydb.util import display

#: Longer than any terminal.
LONG = "x" * 500


@dataclass(frozen=True)
class Row:
    name: str
    at: datetime


def test_help_imports_no_heavy_module() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from replaydb.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print(*sys.modules)"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    heavy = {"torch", "alembic", "aiosqlite", "asyncpg", "pyarrow", "plotly", "prometheus_client"}
    assert "replaydb.cli.groups" in outcome.stdout.split()
    assert heavy.isdisjoint(outcome.stdout.split())


def _numbers(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command and each of its options that is a float."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _numbers(inner, *words, name)
    hints = get_type_hints(command.callback) if words and command.callback else {}
    for option in command.params:
        kind = hints.get(option.name)
        if float in (kind, *get_args(kind)):
            yield *words, option.opts[0]


NUMBERS = list(_numbers(typer.main.get_command(app)))


@pytest.mark.parametrize("words", NUMBERS, ids=" ".join)
def test_numbers_are_finite(words: tuple[str, ...]) -> None:
    *command, option = words
    buffer = [] if command[0] in ("metrics", "prune") else ["math"]
    for value in "nan", "inf", "-inf", "1e999":
        given = [*command, *buffer, "--url", "sqlite:///none.db", f"{option}={value}"]
        outcome = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
        assert (outcome.exit_code, option in outcome.output) == (2, True), outcome.output


def test_every_kind_of_command_has_numbers() -> None:
    assert {words[0] for words in NUMBERS} == {"watch", "metrics", "prune", "episodes"}


def test_a_table_in_a_pipe_is_complete(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    rows = [(LONG, 5, 0.123456), ("[red]", None, None)]
    console.print_table(("name", "number", "mean"), rows)
    _, headings, _rule, first, second, *_ = capsys.readouterr().out.splitlines()
    assert headings.split() == ["name", "number", "mean"]
    assert first.split() == [LONG, "5", "0.1235"]
    assert second.split() == ["[red]", "-", "-"]
    assert first.index(" 5") + 1 == second.index(" -") + 1  # numbers are right-aligned


def test_headings_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(("\x1b[2J[red]:smile:", "[/]"), [(1, 2)])
    assert capsys.readouterr().out.split()[:2] == ["\\x1b[2J[red]:smile:", "[/]"]


def test_non_finite_numbers_are_strings(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"some": [float("nan"), math.inf, (-math.inf, None)]})
    expected = {"some": ["NaN", "Infinity", ["-Infinity", None]]}
    assert json.loads(capsys.readouterr().out) == expected


def test_an_empty_table_has_headings(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(("name", "number"), [])
    assert capsys.readouterr().out.split()[:2] == ["name", "number"]


def test_json_of_dataclasses_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json([Row("\x1b[31m\x7f", datetime(2026, 1, 2, tzinfo=UTC))])
    text = capsys.readouterr().out
    assert text.isascii()
    assert all(sign.isprintable() for sign in text.replace("\n", ""))
    assert json.loads(text) == [{"name": "\x1b[31m\x7f", "at": "2026-01-02T00:00:00+00:00"}]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1500, "1.5 kB"),
        (147_000_000, "147 MB"),
        (10**16, "10 PB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert display.human_size(num_bytes) == text


def test_no_progress_bar_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("copying") as report:
        report(5, None)
        report(10, 20)
    assert capsys.readouterr() == ("", "")


def cli(*arguments: str, environment: dict[str, str], stdout: int) -> tuple[int, str, str]:
    """Run a command in its own process; return exit code, stdout and stderr."""
    process = subprocess.run(
        [sys.executable, "-m", "replaydb.cli", *arguments],
        env=os.environ | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process.returncode, process.stdout, process.stderr


def test_terminals_without_all_characters_and_full_disks(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/replay.db"

    async def fill() -> None:
        async with Store.open(url) as store:
            await store.buffer("größe")

    asyncio.run(fill())
    environment = {"REPLAYDB_URL": url, "PYTHONIOENCODING": "ascii"}
    code, out, error = cli("buffers", "list", environment=environment, stdout=subprocess.PIPE)
    assert (code, error) == (0, "")
    assert r"gr\xf6\xdfe" in out
    with Path("/dev/full").open("w") as full:
        code, _, error = cli("buffers", "list", environment=environment, stdout=full.fileno())
    assert (code, error) == (1, "error: [Errno 28] No space left on device\n")
