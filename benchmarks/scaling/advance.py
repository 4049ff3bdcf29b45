"""What others notice while the policy advances: another process puts, one group after another.

Before the advance it does so alone, for comparison.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import numpy as np

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.filling import fill
from benchmarks.groups import small_group
from benchmarks.processes import children, serve
from benchmarks.results import Result, seconds

LARGEST = 1_000_000
PAUSE_SECONDS = 0.005
BAR = 50.0


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Milliseconds of the slowest put in a hundred, alone and during an advance; the ratio."""
    rows = max(rows for rows in bench.options.rows if rows <= LARGEST)
    url = await bench.database()
    await fill(url, rows, bench.say)
    taken: dict[str, list[float]] = {"alone": [], "advance": []}
    heard = {side: asyncio.Event() for side in taken}  # busy machines come late
    side = "alone"
    async with rdb.Store.open(url) as store, children(__name__, 1, url) as [putter]:
        buffer = await store.buffer("bench")

        async def listen() -> None:
            while True:
                taken[side].append(float(await putter.line()))
                heard[side].set()

        bench.say("puts alone")
        await putter.begin()
        listening = asyncio.create_task(listen())
        await asyncio.sleep(bench.options.seconds)
        await heard["alone"].wait()
        bench.say("puts during an advance")
        side = "advance"
        lasted = await seconds(buffer.advance_policy(buffer.policy_version + 1))
        await asyncio.sleep(10 * PAUSE_SECONDS)  # one that waits is told of
        await heard["advance"].wait()
        listening.cancel()
        putter.kill()
    alone, during = (1e3 * float(np.quantile(times, 0.99)) for times in taken.values())
    of = f"{rows:,} groups"
    yield bench.result(f"advance_policy while another process puts, {of}", 1e3 * lasted, "ms")
    yield bench.result(f"put, 99 %, {of}", alone, "ms", side="alone")
    yield bench.result(f"put during an advance, 99 %, {of}", during, "ms", BAR, side="advance")
    yield bench.result("put, 99 %: during an advance / alone", during / alone, "x", side="ratio")


async def _serve(url: str) -> None:
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")

        async def put_for_ever() -> None:
            """Say after every put how many seconds it took."""
            while True:
                print(await seconds(buffer.put(small_group())), flush=True)
                await asyncio.sleep(PAUSE_SECONDS)

        await serve(put_for_ever)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
