"""Latency of another process's puts while the policy version advances.

The other process puts single groups one after another: first alone, for comparison, then during the
advance.
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
TARGET = 50.0


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure the p99 latency of puts, alone and during an advance, and their ratio."""
    rows = max(rows for rows in bench.options.rows if rows <= LARGEST)
    url = await bench.database()
    await fill(url, rows, bench.report)
    async with rdb.Store.open(url) as store, putting(url) as putter:
        buffer = await store.buffer("bench")
        bench.report("puts alone")
        _, alone = await putter.p99_during(asyncio.sleep(bench.options.seconds))
        bench.report("puts during an advance")
        advance = buffer.advance_policy(buffer.policy_version + 1)
        lasted, during = await putter.p99_during(seconds(advance))
    of = f"{rows:,} groups"
    yield bench.result(f"advance_policy while another process puts, {of}", 1e3 * lasted, "ms")
    yield bench.result(f"put, p99, {of}", alone, "ms", side="alone")
    yield bench.result(f"put during an advance, p99, {of}", during, "ms", TARGET, side="advance")
    yield bench.result("put, p99: during an advance / alone", during / alone, "x", side="ratio")
