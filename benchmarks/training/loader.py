"""Waiting time of a trainer for batches, without and with a prefetching loader.

A trainer requests batches of 32 groups of 72 KB as padded tensors; its step is a sleep. The time
between steps is measured.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.groups import SMALL, Source, put_all
from benchmarks.results import Result

BATCH = 32
STEP_SECONDS = 0.05


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds of waiting: the median and the maximum."""
    async with rdb.Store.open(await bench.database()) as store:
        buffer = await store.buffer("bench")
        bench.report("putting")
        await put_all(buffer, Source(SMALL), bench.options.groups(SMALL, BATCH))
        for prefetch in (0, 2):
            how = f"prefetch {prefetch}"
            bench.report(how)
            waits = await _waiting_times(buffer, prefetch, 3 + bench.options.rounds)
            what = f"waiting for {BATCH} groups of {SMALL} as padded tensors, {how}"
            facts: dict[str, Any] = {"prefetch": prefetch}
            yield bench.result(what, 1e3 * statistics.median(waits), "ms", side="median", **facts)
            yield bench.result(f"{what}, maximum", 1e3 * max(waits), "ms", side="maximum", **facts)


async def _waiting_times(buffer: rdb.Buffer, prefetch: int, steps: int) -> list[float]:
    waits = []
    collate = partial(rdb.Batch.padded, pad_token_id=0)
    async with buffer.loader(BATCH, prefetch=prefetch, collate=collate, num_steps=steps) as loader:
        start = time.perf_counter()
        async for _ in loader:
            waits.append(time.perf_counter() - start)
            await asyncio.sleep(STEP_SECONDS)
            start = time.perf_counter()
    return waits[2:]
