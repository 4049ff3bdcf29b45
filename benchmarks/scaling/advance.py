"""What others notice while the policy advances: another process puts, one group after another.

Before the advance it does so alone, for comparison.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.filling import fill
from benchmarks.results import Result, seconds
from benchmarks.scaling.putter import putting

LARGEST = 1_000_000
BAR = 50.0


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Milliseconds of the slowest put in a hundred, alone and during an advance; the ratio."""
    rows = max(rows for rows in bench.options.rows if rows <= LARGEST)
    url = await bench.database()
    await fill(url, rows, bench.say)
    async with rdb.Store.open(url) as store, putting(url) as putter:
        buffer = await store.buffer("bench")
        bench.say("puts alone")
        _, alone = await putter.slowest_during(asyncio.sleep(bench.options.seconds))
        bench.say("puts during an advance")
        advance = buffer.advance_policy(buffer.policy_version + 1)
        lasted, during = await putter.slowest_during(seconds(advance))
    of = f"{rows:,} groups"
    yield bench.result(f"advance_policy while another process puts, {of}", 1e3 * lasted, "ms")
    yield bench.result(f"put, 99 %, {of}", alone, "ms", side="alone")
    yield bench.result(f"put during an advance, 99 %, {of}", during, "ms", BAR, side="advance")
    yield bench.result("put, 99 %: during an advance / alone", during / alone, "x", side="ratio")
