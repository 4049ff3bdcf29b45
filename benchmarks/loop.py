"""How long the event loop is held up while groups are put at full speed."""

from __future__ import annotations

import asyncio
import time

import numpy as np

import replaydb as rdb
from benchmarks.databases import Databases
from benchmarks.groups import large_group
from benchmarks.options import Options
from benchmarks.results import Result

BEAT = 0.001
BAR = 20.0


async def run(databases: Databases, engine: str, options: Options) -> list[Result]:
    """Lateness of a coroutine that sleeps a millisecond at a time: idle, and during puts."""
    url = await databases.make(engine)
    rng = np.random.default_rng(0)
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        groups = [large_group(rng) for _ in range(2 * options.groups)]
        idle = await _beat(asyncio.create_task(asyncio.sleep(1.0)))

        async def put_all() -> None:
            for first in range(0, len(groups), 50):
                await buffer.put(groups[first : first + 50])

        busy = await _beat(asyncio.create_task(put_all()))
    return [
        Result("loop", engine, "stall, p99, idle", 1e3 * float(np.quantile(idle, 0.99)), "ms"),
        Result(
            "loop",
            engine,
            "stall, p99, during puts",
            1e3 * float(np.quantile(busy, 0.99)),
            "ms",
            BAR,
        ),
        Result("loop", engine, "stall, longest, during puts", 1e3 * float(busy.max()), "ms"),
    ]


async def _beat(during: asyncio.Task[None]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    late = []
    while not during.done():
        start = time.perf_counter()
        await asyncio.sleep(BEAT)
        late.append(time.perf_counter() - start - BEAT)
    await during
    return np.array(late)
