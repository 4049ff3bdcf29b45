"""Every command on a file that does not exist: it fails with one line, and creates nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from replaydb.cli import app
from support.command import run

#: Arguments of each command; `{folder}` is an empty folder, `{rows}` a file of rows.
COMMANDS = {
    "backup": "{folder}/backup.db",
    "buffers delete": "math --yes",
    "buffers list": "",
    "buffers show": "math",
    "copy": "sqlite:///{folder}/typo.db sqlite:///{folder}/copy.db",
    "db adopt-payloads": "--yes",
    "db check": "",
    "db current": "",
    "db downgrade": "base --yes",
    "db history": "",
    "db relocate": "file://{folder}/payloads",
    "db upgrade": "base",
    "db rewrite-payloads": "",
    "db write-format": "1",
    "doctor": "",
    "draws list": "math",
    "draws show": "math 1",
    "episodes list": "math",
    "episodes show": "math 1 0",
    "export": "{folder}/export",
    "groups delete": "math 1 --yes",
    "groups list": "math",
    "groups show": "math 1",
    "import": "{rows} --create",
    "import-dataset": "{rows} math --name gsm8k --create",
    "leases list": "math",
    "leases revoke": "math 1",
    "leases show": "math 1",
    "trajectories list": "math",
    "trajectories release": "math 1",
    "metrics serve": "",
    "prune": "--remove",
    "report": "math -o {folder}/report.html",
    "restore": "{folder}/typo.db",
    "runs delete": "first --yes",
    "runs list": "",
    "runs show": "first",
    "ui": "",
    "vacuum": "",
    "verify": "--repair",
    "watch": "math --once",
}
#: Commands with a result for such a file.
WITHOUT_FILE = {"db roles": "SQLite has no roles"}


def _names(command: object, *words: str) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from _names(inner, *words, name)
    else:
        yield " ".join(words)


def test_every_command_is_tested() -> None:
    names = set(_names(typer.main.get_command(app)))
    assert names == COMMANDS.keys() | WITHOUT_FILE.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_file_is_not_created(
    command: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("empty")
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text('{"group_uid": "a", "task_name": "t", "token_ids": [1], "loss_mask": [true]}\n')
    arguments = COMMANDS[command].format(folder=folder, rows=rows).split()
    url = f"sqlite:///{folder}/{'other' if command == 'restore' else 'typo'}.db"
    outcome = run(*command.split(), *arguments, url=url)
    assert outcome.exit_code == 1
    problem = f"{folder}/typo.db: there is no such file"
    if command == "doctor":
        assert problem in outcome.stdout
    else:
        assert outcome.stderr == f"error: {problem}\n"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("command", WITHOUT_FILE)
def test_an_unsupported_command_creates_no_file(command: str, tmp_path: Path) -> None:
    outcome = run(*command.split(), url=f"sqlite:///{tmp_path}/typo.db")
    assert (outcome.exit_code, WITHOUT_FILE[command] in outcome.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []
