"""Context of an attack: its own database, a seeded random generator, and figures to report."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg

from replaydb.database import migrations
from support.workers import Worker
from torture import checker
from torture.checker import Tables


@dataclass
class AttackContext:
    """The context of one round of an attack."""

    engine: str
    url: str
    """URL of a migrated database without rows, for this round alone."""
    folder: Path
    chance: random.Random
    seconds: float
    """Approximate duration of the round."""
    figures: Counter[str] = field(default_factory=Counter)
    """Counts of actions such as kills and calls. Violations raise an AssertionError instead."""

    @property
    def log(self) -> Path:
        """Log file in which other processes record the results of their calls."""
        return self.folder / "log"

    async def check(self) -> Tables:
        """Check the tables for consistency and against the log of other processes."""
        tables = await checker.read_tables(self.url)
        checker.check_tables(tables)
        self.figures += checker.check_log(checker.read_log(self.log), tables)
        return tables

    async def progress(self, workers: list[Worker], count: int, call: str | None = None) -> None:
        """Wait until the workers have logged `count` more calls, of any kind or of one."""

        def logged() -> int:
            return sum(call in (None, entry.call) for entry in checker.read_log(self.log))

        before = logged()
        async with asyncio.timeout(120):
            while logged() < before + count:
                if not all(one.is_running for one in workers):
                    entries = checker.read_log(self.log)
                    errors = [entry.detail for entry in entries if entry.call == "error"]
                    raise AssertionError(f"a process has ended: {errors[:1] or entries[-1:]}")
                await asyncio.sleep(0.02)


@asynccontextmanager
async def attack_context(
    engine: str, server_url: str, folder: Path, seed: str, seconds: float
) -> AsyncIterator[AttackContext]:
    """Create the context of a round. Its database is dropped at the end of the block."""
    own = folder / uuid4().hex
    own.mkdir(parents=True)
    url = f"sqlite:///{own / 'replay.db'}"
    name = f"replaydb_torture_{own.name}"
    if engine == "postgresql":
        # The tests' server commits asynchronously; attacks that kill it need durable commits.
        durable = f'ALTER DATABASE "{name}" SET synchronous_commit = on'
        await _execute(server_url, f'CREATE DATABASE "{name}"', durable)
        url = urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
    await migrations.upgrade(url)
    try:
        yield AttackContext(engine, url, own, random.Random(seed), seconds)
    finally:
        if engine == "postgresql":
            await _execute(server_url, f'DROP DATABASE "{name}" WITH (FORCE)')


@asynccontextmanager
async def copied(url: str, path: Path) -> AsyncIterator[str]:
    """Copy a database that is not in use, to this path if it is a file, for the block."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        with closing(sqlite3.connect(parts.path.removeprefix("/"))) as connection:
            connection.execute("VACUUM INTO ?", [str(path)])
        yield f"sqlite:///{path}"
        return
    name = parts.path.removeprefix("/")
    copy, server = f"{name}_copy", urlunsplit(parts._replace(path="/postgres"))
    disconnect = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'"
    await _execute(server, disconnect.format(name), f'CREATE DATABASE "{copy}" TEMPLATE "{name}"')
    try:
        yield urlunsplit(parts._replace(path=f"/{copy}"))
    finally:
        await _execute(server, f'DROP DATABASE "{copy}" WITH (FORCE)')


async def _execute(url: str, *statements: str) -> None:
    """Run statements on a new connection; wait if the server is recovering from a crash."""
    async with asyncio.timeout(60):
        while (connection := await _connection(url)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


async def _connection(url: str) -> asyncpg.Connection | None:
    try:
        return await asyncpg.connect(url)
    except (OSError, asyncpg.CannotConnectNowError):
        return None
