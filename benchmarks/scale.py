"""How much slower a draw of 64 groups is from a large buffer than from a small one."""

from __future__ import annotations

import gc
from contextlib import AsyncExitStack
from functools import partial

import replaydb as rdb
from benchmarks.databases import Databases
from benchmarks.groups import fill
from benchmarks.options import Options
from benchmarks.results import Result, medians
from replaydb.policies import SamplingPolicy

N = 64
BAR = 2.0
POLICIES: list[SamplingPolicy] = [
    rdb.Uniform(),
    rdb.Prioritized(),
    rdb.Fifo(),
    rdb.Lifo(),
    rdb.StalestFirst(),
    rdb.FreshestFirst(),
    rdb.TopPriority(),
    rdb.LeastSampled(),
]


async def run(databases: Databases, engine: str, options: Options) -> list[Result]:
    """Milliseconds for every policy and size; then the ratio of the largest to the smallest."""
    results: list[Result] = []
    async with AsyncExitStack() as stack:
        buffers: dict[int, rdb.Buffer] = {}
        for rows in options.rows:
            url = await databases.make(engine)
            await fill(url, rows)
            store = await stack.enter_async_context(rdb.Store.open(url))
            buffers[rows] = await store.buffer("bench")
        gc.collect()
        works = {
            f"{type(policy).__name__} {rows}": partial(buffer.sample, N, policy)
            for policy in POLICIES
            for rows, buffer in buffers.items()
        }
        where = rdb.group.reward_mean > 0.45
        works |= {
            f"Uniform, half eligible {rows}": partial(buffer.sample, N, rdb.Uniform(), where=where)
            for rows, buffer in buffers.items()
        }
        seconds = await medians(works, options.rounds, warm_up=5)
    smallest, largest = min(options.rows), max(options.rows)
    for name in dict.fromkeys(name.rpartition(" ")[0] for name in works):
        for rows in options.rows:
            what = f"sample {N}, {name}, {rows:,} groups"
            results.append(Result("scale", engine, what, 1e3 * seconds[f"{name} {rows}"], "ms"))
        if largest > smallest:
            ratio = seconds[f"{name} {largest}"] / seconds[f"{name} {smallest}"]
            what = f"{name}, {largest:,} / {smallest:,}"
            results.append(Result("scale", engine, what, ratio, "x", BAR))
    return results
