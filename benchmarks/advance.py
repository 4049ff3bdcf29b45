"""How long a new policy version takes, which rewrites the staleness of every live group."""

from __future__ import annotations

import itertools

import replaydb as rdb
from benchmarks.databases import Databases
from benchmarks.groups import NUM_VERSIONS, fill
from benchmarks.options import Options
from benchmarks.results import Result, medians

BARS = {"sqlite": 300.0, "postgresql": 1000.0}


async def run(databases: Databases, engine: str, options: Options) -> list[Result]:
    """Milliseconds, without and with a limit that the oldest groups pass."""
    url = await databases.make(engine)
    await fill(url, options.live_rows)
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        versions = itertools.count(NUM_VERSIONS + 1)

        async def advance() -> None:
            await buffer.advance_policy(next(versions))

        rounds = min(options.rounds, 9)
        seconds = await medians({"advance": advance}, rounds)
        await buffer.update_settings(max_staleness=NUM_VERSIONS + rounds + 2)
        seconds |= await medians({"expire": advance}, rounds)
    rows = f"{options.live_rows:,} live groups"
    bar = BARS[engine]
    return [
        Result("advance", engine, f"advance_policy, {rows}", 1e3 * seconds["advance"], "ms", bar),
        Result(
            "advance", engine, "the same, 2 % expire each time", 1e3 * seconds["expire"], "ms", bar
        ),
    ]
