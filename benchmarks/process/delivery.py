"""Cost of incremental groups (`add_episode`), and of recording draws."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from uuid import uuid4

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.groups import SMALL, TASK, Source, small_group
from benchmarks.results import Result, TimedWork, seconds
from replaydb import Buffer

CONCURRENT = (1, 8, 64)
BATCH = 64


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure episodes per second, and milliseconds of a draw with and without lineage."""
    async with rdb.Store.open(await bench.database()) as store:
        for one in [await _incremental(bench, store), await _lineage(bench, store)]:
            for result in one:
                yield result


async def _incremental(bench: Bench, store: rdb.Store) -> list[Result]:
    buffer = await store.buffer("incremental")
    [group] = Source(SMALL).take(1)

    async def add(concurrent: int) -> float:
        uids = [uuid4().hex for _ in range(concurrent)]
        await asyncio.gather(*(buffer.open_group(TASK, uid, group.num_episodes) for uid in uids))
        return await seconds(asyncio.gather(*(add_all(uid) for uid in uids)))

    async def add_all(uid: str) -> None:
        for episode in group.episodes:
            await buffer.add_episode(uid, episode)

    works: dict[str, TimedWork] = {
        f"{count} concurrent": partial(add, count) for count in CONCURRENT
    }
    timings = await bench.race("add_episode", works, max(1, bench.options.rounds // 4))
    return [
        bench.result(
            f"add_episode of 1,024 tokens, {name}",
            count * group.num_episodes / timings.median(name), "episodes/s", concurrent=count,
        )
        for count, name in zip(CONCURRENT, works, strict=True)
    ]  # fmt: skip


async def _lineage(bench: Bench, store: rdb.Store) -> list[Result]:
    names = {"with": True, "without": False}
    buffers: dict[str, Buffer] = {}
    for name, recorded in names.items():
        buffers[name] = await store.buffer(f"{name} lineage", record_draws=recorded)
        await buffers[name].put([small_group() for _ in range(20 * BATCH)])
    works = {name: partial(buffers[name].sample, BATCH) for name in names}
    timings = await bench.times("lineage", works, bench.options.rounds, warm_up=3)
    return [
        bench.result(f"sample {BATCH}, {name} lineage", 1e3 * timings.median(name), "ms")
        for name in names
    ]
