"""Run commands and import modules in a process without the packages of some extras.

    python -m support.extras URL FOLDER COMMANDS MODULE ...

COMMANDS are comma-separated names of commands, or "all". The packages MODULE ... are hidden, as if
they were not installed. The last line of stdout is a JSON object. It contains the exit status and
the last output line of each command, and for each module of replaydb the error at its import or
null.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any
from urllib.request import urlopen

#: Arguments of each command. Add every new command. URL is a copy of the store.
COMMANDS = {
    "backup": ["FOLDER/saved.db"],
    "buffers delete": ["math", "--yes"],
    "buffers list": [],
    "buffers show": ["math"],
    "copy": ["URL", "sqlite:///FOLDER/copy.db"],
    "db adopt-payloads": ["--yes"],
    "db check": [],
    "db current": [],
    "db downgrade": ["base", "--yes"],
    "db history": [],
    "db relocate": ["file:///FOLDER"],
    "db roles": [],
    "db upgrade": [],
    "db rewrite-payloads": [],
    "db write-format": ["2"],
    "doctor": [],
    "draws list": ["math"],
    "draws show": ["math", "1"],
    "episodes list": ["math"],
    "episodes show": ["math", "1", "0"],
    "export": ["FOLDER/export"],
    "groups delete": ["math", "1", "--yes"],
    "groups list": ["math"],
    "groups show": ["math", "1"],
    "import": ["FOLDER/rows.jsonl", "--create"],
    "import-dataset": ["FOLDER/dataset.jsonl", "math", "--name", "data"],
    "leases list": ["math"],
    "leases revoke": ["math", "1"],
    "leases show": ["math", "1"],
    "trajectories list": ["math"],
    "trajectories release": ["math", "1"],
    "metrics serve": ["--port", "0"],
    "prune": [],
    "report": ["math", "--output", "FOLDER/report.html"],
    "restore": ["FOLDER/backup.db", "--url", "sqlite:///FOLDER/restored.db"],
    "runs delete": ["other", "--yes"],
    "runs list": [],
    "runs show": ["test"],
    "ui": ["--port", "0"],
    "vacuum": [],
    "verify": [],
    "watch": ["math", "--once", "--interval", "0.1"],
}
#: Commands that print their URL and run until Ctrl-C.
SERVING = ("metrics serve", "ui")
#: Not imported: it needs torch, whose import takes as long as all others and which is no extra.
SLOW = "replaydb.training.dataset"


class _Hiding(PathFinder):
    """Path finder that does not find hidden modules."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in cls.hidden:
            return None
        return super().find_spec(fullname, path, target)


def hide(modules: Sequence[str]) -> None:
    """Hide modules, none of which may be imported already."""
    assert sys.modules.keys().isdisjoint(modules), sys.modules.keys() & set(modules)
    _Hiding.hidden = frozenset(modules)
    sys.meta_path[sys.meta_path.index(PathFinder)] = _Hiding


def names(group: Any, prefix: str = "") -> Iterator[str]:
    """Yield the full names of all commands."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from names(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


def called(name: str, url: str, folder: Path) -> tuple[int, str]:
    """Run a command; return its exit status and the last line of its output."""
    from typer.testing import CliRunner

    from replaydb.cli import app

    own = folder / name.replace(" ", "-")
    own.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            shutil.copy(path, own)
    mine = f"sqlite:///{own / Path(url).name}"
    words = [one.replace("FOLDER", str(own)).replace("URL", mine) for one in COMMANDS[name]]
    if name in SERVING:
        stop_when_served()
    found = CliRunner().invoke(app, [*name.split(" "), *words], env={"REPLAYDB_URL": mine})
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    lines = found.output.strip().splitlines() or [""]
    return found.exit_code, lines[-1]


def stop_when_served() -> None:
    """Fetch a page as soon as a URL is printed, then send SIGINT."""
    import typer

    echo = typer.echo

    def fetch(url: str) -> None:
        with urlopen(url, timeout=60) as response:  # noqa: S310
            assert response.status == 200
        os.kill(os.getpid(), signal.SIGINT)

    def wrapped(message: Any = None, *args: Any, **options: Any) -> None:
        echo(message, *args, **options)
        if isinstance(message, str) and message.startswith("http"):
            typer.echo = echo
            threading.Thread(target=fetch, args=(message,)).start()

    typer.echo = wrapped


def refusals() -> dict[str, str | None]:
    """Import all modules except integrations and `__main__`; return the error of each, or None."""
    import replaydb
    from replaydb.errors import NotSupportedError

    found: dict[str, str | None] = {}
    package = Path(replaydb.__file__).parent
    for path in sorted(package.rglob("*.py")):
        name = ".".join(["replaydb", *path.relative_to(package).with_suffix("").parts])
        name = name.removesuffix(".__init__")
        if name.startswith("replaydb.integrations") or name.endswith("__main__") or name == SLOW:
            continue
        try:
            importlib.import_module(name)
            found[name] = None
        except NotSupportedError as error:
            found[name] = str(error)
    return found


def main(url: str, folder: str, commands: str, *modules: str) -> None:
    hide(modules)
    import typer

    from replaydb.cli import app

    listed = set(names(typer.main.get_group(app)))
    assert listed == COMMANDS.keys(), listed ^ COMMANDS.keys()
    wanted = sorted(listed) if commands == "all" else commands.split(",")
    outcomes = {name: called(name, url, Path(folder)) for name in wanted}
    print(json.dumps({"commands": outcomes, "modules": refusals()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
