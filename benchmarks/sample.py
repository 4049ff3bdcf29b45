"""How fast 32 groups of 72 KB are drawn, next to a bare fetch by primary key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np

import replaydb as rdb
from benchmarks import bare
from benchmarks.databases import Databases
from benchmarks.groups import large_group
from benchmarks.options import Options
from benchmarks.results import Result, medians
from replaydb.policies import SamplingPolicy

N = 32
BAR = 2.0
POLICIES: list[SamplingPolicy] = [rdb.Uniform(), rdb.Prioritized(), rdb.Fifo()]


async def run(databases: Databases, engine: str, options: Options) -> list[Result]:
    """Milliseconds, and the ratio to the bare fetch."""
    url = await databases.make(engine)
    rng = np.random.default_rng(0)
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench", seed=0)
        count = max(options.groups, N)
        ids = [
            one
            for first in range(0, count, 50)
            for one in await buffer.put([large_group(rng) for _ in range(min(50, count - first))])
        ]
        driver = await bare.connect(url)

        async def fetch() -> None:
            await driver.read(rng.choice(ids, N, replace=False).tolist())

        works: dict[str, Callable[[], Awaitable[object]]] = {"bare": fetch}
        works |= {type(policy).__name__: partial(buffer.sample, N, policy) for policy in POLICIES}
        seconds = await medians(works, 3 * options.rounds, warm_up=5)
        await driver.close()
    what = f"{N} payloads by primary key, bare driver"
    results = [Result("sample", engine, what, 1e3 * seconds["bare"], "ms")]
    for policy in POLICIES:
        name = type(policy).__name__
        what = f"sample {N} groups of 72 KB, {name}"
        results.append(Result("sample", engine, what, 1e3 * seconds[name], "ms"))
        ratio = seconds[name] / seconds["bare"]
        results.append(Result("sample", engine, f"{name} / bare", ratio, "x", BAR))
    return results
