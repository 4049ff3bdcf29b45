"""Time of samples, compared with a bare driver that fetches as many groups by primary key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np

import replaydb as rdb
from benchmarks import bare
from benchmarks.bench import Bench
from benchmarks.groups import Shape, Source, put_all
from benchmarks.options import Options
from benchmarks.results import Result, Work
from replaydb.domain.policies import SamplingPolicy

Fetch = Callable[[], Awaitable[list[bare.Payload]]]

TARGETS = {"sqlite": 2.0, "postgresql": 1.5}
POLICIES: tuple[SamplingPolicy, ...] = (rdb.Uniform(), rdb.Prioritized(), rdb.Fifo())


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds, and ratios to the bare driver."""
    rng = np.random.default_rng(0)
    for shape in bench.options.shapes:
        url, count = await bench.database(), batch_size(bench.options, shape)
        async with rdb.Store.open(url) as store:
            buffer = await store.buffer("bench", seed=0)
            bench.report(f"{shape}: putting")
            ids = await put_all(buffer, Source(shape), bench.options.groups(shape, 3 * count))
            driver = await bare.connect(url)

            async def fetch(
                ids: list[int] = ids, count: int = count, driver: bare.Driver = driver
            ) -> list[bare.Payload]:
                return await driver.read(rng.choice(ids, count, replace=False).tolist())

            async def fetch_and_decode(fetch: Fetch = fetch) -> None:
                bare.decode(await fetch())

            works: dict[str, Work] = {"bare": fetch, "bare + decoding": fetch_and_decode}
            works |= {type(one).__name__: partial(buffer.sample, count, one) for one in POLICIES}
            timings = await bench.times(str(shape), works, bench.options.rounds, warm_up=3)
            await driver.close()
        facts: dict[str, Any] = {"shape": str(shape), "groups": count}
        for name in works:
            what = f"{count} groups of {shape}: {name}"
            yield bench.result(what, 1e3 * timings.median(name), "ms", side=name, **facts)
        for policy in POLICIES:
            name = type(policy).__name__
            for other, target in (("bare", TARGETS[bench.engine]), ("bare + decoding", None)):
                side = f"{name} / {other}"
                yield bench.result(
                    f"{count} groups of {shape}: {side}", timings.ratio(name, other), "x", target,
                    side=side, **facts,
                )  # fmt: skip


def batch_size(options: Options, shape: Shape) -> int:
    """Return 32, or fewer for large groups."""
    return min(32, options.groups(shape))
