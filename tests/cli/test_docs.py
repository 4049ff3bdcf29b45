"""`docs/cli.md` documents every command and option."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand, TyperGroup
from typer.testing import CliRunner

from replaydb.cli import app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf8")
ROWS = {
    name: options
    for name, options in re.findall(
        r"^\| `replaydb ([a-z -]+?)(?: [^`a-z]*)?` \|.*\| (.*) ?\|$", PAGE, re.MULTILINE
    )
}
#: Options of every command.
COMMON = {"--help", "--url"}


def commands(group: TyperGroup, prefix: str = "") -> Iterator[tuple[str, TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, f"{prefix}{name} ")
        else:
            assert isinstance(command, TyperCommand)
            yield f"{prefix}{name}", command


COMMANDS = dict(commands(typer.main.get_group(app)))


def options_of(name: str) -> set[str]:
    """Return the documented options of a command."""
    return set(re.findall(r"`(--[\w-]+)", ROWS[name]))


def test_every_command_is_documented() -> None:
    assert sorted(ROWS) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented_and_has_help(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    taken = {option for one in command.params for option in one.opts if option.startswith("--")}
    assert options_of(name) == taken - COMMON
    assert [one.name for one in command.params if not getattr(one, "help", None)] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    found = CliRunner().invoke(app, ["--show-completion", shell], prog_name="replaydb")
    assert found.exit_code == 0
    assert "_REPLAYDB_COMPLETE" in found.stdout


def completed(words: str, **env: str) -> list[str]:
    """Return the completions of the last word."""
    last = str(len(words.split()) - 1)
    environment = {"_REPLAYDB_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": last}
    found = CliRunner().invoke(app, [], env=environment | env, prog_name="replaydb")
    assert found.stderr == ""
    return found.stdout.split()


def test_columns_are_completed() -> None:
    found = completed("replaydb groups list math --sort reward_")
    assert found == ["reward_max", "reward_mean", "reward_min", "reward_std"]


def test_names_of_buffers_are_completed(filled_url: str, tmp_path: Path) -> None:
    assert completed("replaydb groups list m", REPLAYDB_URL=filled_url) == ["math"]
    assert completed("replaydb draws list --limit 3 c", REPLAYDB_URL=filled_url) == ["code"]
    assert completed(f"replaydb watch --url {filled_url} m", REPLAYDB_URL="") == ["math"]
    for url in ("", "nonsense", f"sqlite:///{tmp_path / 'none.db'}"):
        assert completed("replaydb groups list m", REPLAYDB_URL=url) == []
