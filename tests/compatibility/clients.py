"""Clients of the previous and the next release, each with its own copy of replaydb.

The previous one is the wheel in `tests/data`. `CONTRIBUTING.md` says when it is replaced. The next
one is this checkout, with changes that exist only in these tests: see `next_release`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replaydb import codec
from replaydb.database.tables.schema import REVISIONS

TESTS = Path(__file__).resolve().parents[1]
CHECKOUT = TESTS.parent


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a command.

    Attributes:
        code: Its exit code.
        output: What it printed, to stdout or stderr.
    """

    code: int
    output: str


class Process:
    """A process of a client, and the lines that it prints."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer

    async def ask(self, line: str) -> dict[str, Any]:
        """Send a line and return the next one, as JSON."""
        self._writer.write(f"{line}\n".encode())
        return await self.read()

    async def read(self) -> dict[str, Any]:
        """Return the next line, as JSON."""
        async with asyncio.timeout(60):
            line = (await self._reader.readline()).decode()
        try:
            facts: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:  # a traceback
            raise AssertionError(line + (await self._reader.read()).decode()) from None
        return facts

    async def read_line(self) -> str:
        return (await self._reader.readline()).decode()

    async def ended(self) -> Outcome:
        """Close stdin; wait for the end of the process."""
        self._writer.write_eof()
        async with asyncio.timeout(300):
            *lines, last = (await self._reader.read()).decode().splitlines()
        return Outcome(json.loads(last)["exit"], "\n".join(lines))


class Client:
    """A version of replaydb.

    Attributes:
        version: Its version.
    """

    def __init__(self, version: str, path: Path) -> None:
        self.version = version
        self._path = path

    @asynccontextmanager
    async def process(self, *request: object) -> AsyncIterator[Process]:
        """Run a process of `program.py` in the block."""
        reader, writer = await asyncio.open_unix_connection(self._path, limit=2**24)
        try:
            writer.write(f"{json.dumps([str(one) for one in request])}\n".encode())
            pid = json.loads(await reader.readline())["pid"]
            yield Process(pid, reader, writer)
        finally:
            writer.close()

    async def run(self, *words: object) -> Outcome:
        """Run a command, which cannot ask back."""
        async with self.process("command", *words) as process:
            return await process.ended()


@contextmanager
def running(package: Path, name: str) -> Iterator[Client]:
    """Run a client whose replaydb is in a folder."""
    with tempfile.TemporaryDirectory(prefix="replaydb-") as folder:
        path = Path(folder) / name
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "compatibility.program", path],
            stdout=subprocess.PIPE,
            env=os.environ
            | {
                "PYTHONPATH": f"{package}{os.pathsep}{TESTS}",
                "OPENBLAS_NUM_THREADS": "1",
                "COLUMNS": "400",
            },
            cwd=folder,
        )
        try:
            assert server.stdout is not None
            facts = json.loads(server.stdout.readline())
            assert Path(facts["file"]).is_relative_to(package), facts
            yield Client(facts["version"], path)
        finally:
            server.kill()
            server.communicate()


def previous_release(folder: Path) -> Path:
    """Unpack the wheel of the previous release."""
    (wheel,) = (TESTS / "data").glob("replaydb-*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


#: Versions of the next two releases of these tests, and their revisions.
ADDITIVE, BREAKING = "9.1.0", "9.2.0"
NEXT, LAST = (f"{int(REVISIONS[-1]) + number:04}" for number in (1, 2))
#: The payload format of the first of them.
NEXT_FORMAT = codec.VERSION + 1
#: The payload format of the previous client.
PREVIOUS_FORMAT = 1

_NEW_TABLE = """
group_note = Table("group_note", metadata, _group_id(), Column("note", Text, nullable=False))
"""
_ADDITIVE = f'''
"""A column, a table of rows that refer to groups, and a view with more columns."""

import sqlalchemy as sa
from alembic import op

from replaydb.database.tables.schema import episode_group, group_note
from replaydb.database.tables.views import group_overview, select_groups

revision = "{NEXT}"
down_revision = "{REVISIONS[-1]}"


def upgrade():
    op.execute(sa.DropView(group_overview.table))
    op.add_column("episode_group", sa.Column("note", sa.Text()))
    op.execute(group_overview)
    op.execute(sa.schema.CreateTable(group_note))
    rows = sa.select(episode_group.c.id, episode_group.c.group_uid)
    op.execute(group_note.insert().from_select(["group_id", "note"], rows))


def downgrade():
    op.drop_table("group_note")
    op.execute(sa.DropView(group_overview.table))
    op.drop_column("episode_group", "note")
    old = [one for one in select_groups().selected_columns if one.name != "note"]
    op.execute(sa.CreateView(select_groups().with_only_columns(*old), "group_overview"))
'''
_BREAKING = f'''
"""Another name of a table."""

from alembic import op

revision = "{LAST}"
down_revision = "{NEXT}"


def upgrade():
    op.rename_table("cursor", "stored_cursor")


def downgrade():
    op.rename_table("stored_cursor", "cursor")
'''


def next_release(folder: Path, *, is_breaking: bool = False) -> Path:
    """Copy this checkout, with a revision and a payload format of its own.

    `ADDITIVE` adds a revision that only adds, and a format, which has the layout of the newest one.
    `BREAKING` is the release after it, with a revision that older clients cannot live with.
    """
    package = shutil.copytree(CHECKOUT / "src" / "replaydb", folder / "replaydb")
    versions = shutil.copytree(CHECKOUT / "migrations", package / "migrations") / "versions"
    (versions / f"{NEXT}_additive.py").write_text(_ADDITIVE)
    releases = f'RELEASES |= {{"{NEXT}": "{ADDITIVE}"}}; FORMATS |= {{{NEXT_FORMAT}: "{NEXT}"}}'
    changes = {
        "    ForeignKeyConstraint(\n": '    Column("note", Text),\n{}',
        "episode = Table(": f"{_NEW_TABLE}\n{{}}",
    }
    if is_breaking:
        (versions / f"{LAST}_breaking.py").write_text(_BREAKING)
        releases += f'; RELEASES |= {{"{LAST}": "{BREAKING}"}}; BREAKING |= {{"{LAST}"}}'
        changes['    "cursor",\n'] = '    "stored_cursor",\n'
    changes["metadata = MetaData("] = f"{releases}; REVISIONS = tuple(RELEASES)\n{{}}"
    _edit(package / "database" / "tables" / "schema.py", changes)
    _edit(package / "codec" / "payload.py", {"\nVERSION =": f"\nVERSION = {NEXT_FORMAT} or"})
    version = BREAKING if is_breaking else ADDITIVE
    _edit(package / "util" / "release.py", {"\nVERSION =": f'\nVERSION = "{version}" or'})
    return folder


def _edit(path: Path, changes: dict[str, str]) -> None:
    """Replace texts that occur once in a file. `{}` in a new text is the old one."""
    text = path.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {path.name}"
        text = text.replace(old, new.replace("{}", old))
    path.write_text(text)
