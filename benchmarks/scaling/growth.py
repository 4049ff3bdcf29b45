"""A buffer of many groups beside a small one: calls, growth of tables, and deletion of history.

Half of the groups are archived. Blocks of tables and indexes that a call reads, dead rows and
bytes do not depend on what else the machine does; milliseconds do.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg
import numpy as np

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.multiplying import DAYS, multiply
from benchmarks.processes import Child, children
from benchmarks.results import Result, seconds
from benchmarks.scaling.growth_client import CALLS, KINDS, UNBOUNDED
from replaydb.database import migrations
from replaydb.operations import prune_draws, prune_groups
from replaydb.operations.removal import Removal

CLIENT = "benchmarks.scaling.growth_client"
#: History that is older than this is deleted at the end.
OLDER_THAN = 86_400.0 * DAYS * 19 / 20

_BLOCKS = """
SELECT coalesce(sum(coalesce(heap_blks_read, 0) + coalesce(heap_blks_hit, 0)
    + coalesce(idx_blks_read, 0) + coalesce(idx_blks_hit, 0)), 0)::bigint
FROM pg_statio_user_tables
"""
_OTHERS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
    AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""
_TABLES = """
SELECT relname AS name, n_tup_ins AS inserted, n_tup_upd AS updated, n_tup_hot_upd AS hot,
    n_tup_del AS deleted, n_dead_tup AS dead, autovacuum_count AS vacuums,
    autoanalyze_count AS analyses, pg_relation_size(relid) AS bytes,
    pg_indexes_size(relid) AS index_bytes
FROM pg_stat_user_tables
"""
_INDEXES = """
SELECT indexrelname AS name, pg_relation_size(indexrelid) AS bytes FROM pg_stat_user_indexes
"""
#: An index of all groups, which the calls of the load do not use.
INDEX = "ix_episode_group_prompt_uid"
_DEFINITION = "SELECT pg_get_indexdef($1::text::regclass)"
_WAL = "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn"


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure calls, a load, and deletion of history, at the smallest and largest size."""
    urls = {}
    for rows in dict.fromkeys((min(bench.options.rows), max(bench.options.rows))):
        urls[rows] = await bench.database()
        await multiply(urls[rows], rows, bench.report)
    for part in (calls, load, deletion, indexing):
        async for one in part(bench, urls):
            yield one


class Server:
    """Statistics of a database."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def blocks(self) -> int:
        """Return the blocks that closed connections have read, from memory or disk."""
        # They report when they are closed.
        while await self._connection.fetchval(_OTHERS):  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.02)
        return int(await self._connection.fetchval(_BLOCKS))

    async def wal(self) -> int:
        """Return the bytes of write-ahead log so far."""
        return int(await self._connection.fetchval(_WAL))

    async def tables(self) -> dict[str, Counter[str]]:
        """Return the statistics of every table."""
        return {row["name"]: _numbers(row) for row in await self._connection.fetch(_TABLES)}

    async def indexes(self) -> dict[str, Counter[str]]:
        """Return the size of every index."""
        return {row["name"]: _numbers(row) for row in await self._connection.fetch(_INDEXES)}


@asynccontextmanager
async def server(url: str) -> AsyncIterator[Server]:
    """Connect to a database in a block."""
    connection = await asyncpg.connect(url)
    try:
        yield Server(connection)
    finally:
        await connection.close()


async def calls(bench: Bench, urls: Mapping[int, str]) -> AsyncIterator[Result]:
    """Measure blocks and milliseconds of every call, each on connections of its own."""
    async with AsyncExitStack() as stack:
        sides: dict[int, tuple[Server, Child]] = {}
        for rows, url in urls.items():
            [child] = await stack.enter_async_context(children(CLIENT, 1, url))
            sides[rows] = await stack.enter_async_context(server(url)), child
        for name in CALLS:
            blocks: dict[int, int] = {}
            for rows, (its, child) in sides.items():
                rounds: list[tuple[int, float]] = []
                # Reading millions of rows once is enough.
                for _ in range(1 if name in UNBOUNDED else bench.options.long_rounds):
                    bench.report(f"{rows:,} groups: {name}")
                    before = await its.blocks()
                    taken = float(await child.ask("once", name))
                    rounds.append((await its.blocks() - before, taken))
                # The fewest, as autovacuum may read at the same time.
                blocks[rows] = min(number for number, _ in rounds)
                milliseconds = 1e3 * statistics.median(taken for _, taken in rounds)
                for value, unit in ((blocks[rows], "blocks"), (milliseconds, "ms")):
                    column = f"{rows:,} groups, {unit}"
                    yield bench.result(f"{name}: {column}", value, unit, call=name, column=column)
            ratio = blocks[max(urls)] / max(1, blocks[min(urls)])
            column = "ratio of blocks"
            yield bench.result(f"{name}: {column}", ratio, "x", call=name, column=column)


async def load(bench: Bench, urls: Mapping[int, str]) -> AsyncIterator[Result]:
    """Measure rates of puts, draws, acks and updates together, and what they do to the tables."""
    rates = {}
    for rows, url in urls.items():
        async with server(url) as its, clients(url) as working:
            bench.report(f"{rows:,} groups: load")
            before, wal = await its.tables(), await its.wal()
            indexes = await its.indexes()
            rates[rows] = await _together(working, 20 * bench.options.seconds)
            await asyncio.sleep(1)  # until the statistics are reported
            after, written = await its.tables(), await its.wal() - wal
            if rows == max(urls):
                for one in _changes(bench, before, after):
                    yield one
                for name, one_index in (await its.indexes()).items():
                    grown = one_index["bytes"] - indexes[name]["bytes"]
                    if grown:
                        yield _of_table(bench, name, "growth", grown / 1e6, "MB")
        groups = sum(rates[rows][kind] for kind in KINDS) * 20 * bench.options.seconds
        what = f"write-ahead log of the load, {rows:,} groups"
        yield bench.result(what, written / max(1, groups) / 1e3, "kB/call")
    smallest, largest = min(urls), max(urls)
    for kind in KINDS:
        for rows in urls:
            yield bench.result(f"{kind}, {rows:,} groups", rates[rows][kind], "calls/s")
        ratio = rates[largest][kind] / max(rates[smallest][kind], 1e-9)
        yield bench.result(f"{kind}, {largest:,} / {smallest:,} groups", ratio, "x")


async def deletion(bench: Bench, urls: Mapping[int, str]) -> AsyncIterator[Result]:
    """Measure the deletion of old history, and calls of other processes meanwhile."""
    rows = max(urls)
    async with clients(urls[rows]) as working, rdb.Store.open(urls[rows]) as store:
        bench.report("calls alone")
        _, alone = await _slowest(working, asyncio.sleep(20 * bench.options.seconds))
        works: dict[str, Callable[[], Awaitable[Removal]]] = {
            "draws": lambda: prune_draws(store, min_age=OLDER_THAN, dry_run=False),
            "archived groups": lambda: prune_groups(store, min_age=OLDER_THAN, dry_run=False),
        }
        for name, work in works.items():
            bench.report(f"deleting {name}")
            done: list[Removal] = []

            async def deleted(work: Any = work, done: list[Removal] = done) -> None:
                done.append(await work())

            taken, during = await _slowest(working, deleted())
            number = done[0].num_groups + done[0].num_draws
            yield bench.result(f"{name} deleted, of {rows:,} groups", number, "rows")
            yield bench.result(f"deletion of a million {name}", taken / max(number, 1) * 1e6, "s")
            for kind in KINDS:
                what = f"{kind} while {name} are deleted"
                yield bench.result(f"{what}: slowest", 1e3 * during[kind][0], "ms")
                yield bench.result(f"{what}: p99", 1e3 * during[kind][1], "ms")
        for kind in KINDS:
            yield bench.result(f"{kind} without deletion: slowest", 1e3 * alone[kind][0], "ms")
            yield bench.result(f"{kind} without deletion: p99", 1e3 * alone[kind][1], "ms")


async def indexing(bench: Bench, urls: Mapping[int, str]) -> AsyncIterator[Result]:
    """Measure the creation of an index as an upgrade does it, and calls of other processes."""
    rows = max(urls)
    connection = await asyncpg.connect(urls[rows])
    try:
        definition = await connection.fetchval(_DEFINITION, INDEX)
        ways: dict[str, Callable[[], Awaitable[object]]] = {
            "by an upgrade": lambda: migrations.upgrade(urls[rows]),
            "with CREATE INDEX": lambda: connection.execute(definition),
        }
        for way, work in ways.items():
            bench.report(f"creating an index {way}")
            await connection.execute(f"DROP INDEX {INDEX}")
            async with clients(urls[rows]) as working:
                taken, during = await _slowest(working, work())
            yield bench.result(f"index of {rows:,} groups created {way}", taken, "s")
            for kind in KINDS:
                what = f"{kind} while an index is created {way}: slowest"
                yield bench.result(what, 1e3 * during[kind][0], "ms")
    finally:
        await connection.close()


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[dict[str, Child]]:
    """Run a process for each kind of call during a block."""
    async with children(CLIENT, len(KINDS), url) as started:
        yield dict(zip(KINDS, started, strict=True))


async def _together(working: Mapping[str, Child], lasting: float) -> dict[str, float]:
    """Return the calls per second of each kind, all at the same time."""
    asked = (one.ask("repeat", kind, lasting) for kind, one in working.items())
    times = await asyncio.gather(*asked)
    return {kind: len(some) / lasting for kind, some in zip(working, times, strict=True)}


async def _slowest(
    working: Mapping[str, Child], work: Awaitable[object]
) -> tuple[float, dict[str, tuple[float, float]]]:
    """Return the duration of work, and the longest and the p99 of each kind of call meanwhile."""
    task = asyncio.ensure_future(seconds(work))
    times: dict[str, list[float]] = {kind: [] for kind in working}
    while not task.done():
        asked = (one.ask("repeat", kind, 1.0) for kind, one in working.items())
        for kind, some in zip(working, await asyncio.gather(*asked), strict=True):
            times[kind] += some
    slowest = {kind: (max(some), float(np.quantile(some, 0.99))) for kind, some in times.items()}
    return await task, slowest


def _changes(
    bench: Bench, before: Mapping[str, Counter[str]], after: Mapping[str, Counter[str]]
) -> list[Result]:
    """Return what a load did to each table that it changed."""
    results = []
    for name, now in after.items():
        then = before[name]
        change = {key: now[key] - then[key] for key in now}
        if not change["inserted"] + change["updated"] + change["deleted"]:
            continue
        results += [
            _of_table(bench, name, "before", then["bytes"] / 1e6, "MB"),
            _of_table(bench, name, "growth", change["bytes"] / 1e6, "MB"),
            _of_table(bench, name, "growth of indexes", change["index_bytes"] / 1e6, "MB"),
            _of_table(bench, name, "inserted", change["inserted"], "rows"),
            _of_table(bench, name, "updated", change["updated"], "rows"),
            _of_table(bench, name, "dead", now["dead"], "rows"),
            _of_table(bench, name, "vacuums", change["vacuums"], ""),
        ]
        if change["updated"]:
            hot = 100 * change["hot"] / change["updated"]
            results.append(_of_table(bench, name, "HOT", hot, "%"))
    return results


def _of_table(bench: Bench, table: str, column: str, value: float, unit: str) -> Result:
    return bench.result(f"{table}: {column}", value, unit, table=table, column=column)


def _numbers(row: Mapping[str, Any]) -> Counter[str]:
    return Counter({key: int(value or 0) for key, value in row.items() if key != "name"})
