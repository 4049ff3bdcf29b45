"""Where an attack takes place: a database of its own, chance from a seed, and figures to report."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg

from replaydb.database import migrations
from support.workers import Worker
from torture import judge
from torture.judge import Tables


@dataclass
class Arena:
    """What one round of an attack gets."""

    engine: str
    url: str
    """A migrated database without rows, for this round alone."""
    folder: Path
    chance: random.Random
    seconds: float
    """About how long a round should go on."""
    figures: Counter[str] = field(default_factory=Counter)
    """What was done: kills, calls, cuts. What must not be raises an AssertionError instead."""

    @property
    def log(self) -> Path:
        """Where other processes tell what they were promised."""
        return self.folder / "log"

    async def verdict(self) -> Tables:
        """Hold what is stored against the promises, and against what other processes were told."""
        tables = await judge.read(self.url)
        judge.check(tables)
        self.figures += judge.check_log(judge.entries(self.log), tables)
        return tables

    async def progress(self, crew: list[Worker], count: int, what: str | None = None) -> None:
        """Until the crew has told of so many calls more, `what` or any."""

        def told() -> int:
            return sum(what in (None, entry.what) for entry in judge.entries(self.log))

        before = told()
        async with asyncio.timeout(120):
            while told() < before + count:
                if not all(one.is_running for one in crew):
                    entries = judge.entries(self.log)
                    errors = [entry.detail for entry in entries if entry.what == "error"]
                    raise AssertionError(f"a process has ended: {errors[:1] or entries[-1:]}")
                await asyncio.sleep(0.02)


@asynccontextmanager
async def arena(
    engine: str, server_url: str, folder: Path, seed: str, seconds: float
) -> AsyncIterator[Arena]:
    """A round's arena; the database is dropped afterwards."""
    own = folder / uuid4().hex
    own.mkdir(parents=True)
    url = f"sqlite:///{own / 'replay.db'}"
    name = f"replaydb_torture_{own.name}"
    if engine == "postgresql":
        # The server of the tests is quick, not durable: here it is killed.
        durable = f'ALTER DATABASE "{name}" SET synchronous_commit = on'
        await _execute(server_url, f'CREATE DATABASE "{name}"', durable)
        url = urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
    await migrations.upgrade(url)
    try:
        yield Arena(engine, url, own, random.Random(seed), seconds)
    finally:
        if engine == "postgresql":
            await _execute(server_url, f'DROP DATABASE "{name}" WITH (FORCE)')


async def _execute(url: str, *statements: str) -> None:
    """On a connection of its own: the server may have died since the last, and be recovering."""
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
