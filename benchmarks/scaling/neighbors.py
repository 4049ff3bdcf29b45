"""One client beside clients of the same task whose event loops are blocked for 50 ms at a time.

Rollout workers tokenize and compute rewards in their event loops. A lock that such a process held
across several turns of its loop would stop all other clients of the task. Each client is a process
of its own. It puts groups of one task or samples from it, as fast as it can, while its neighbors
put at most five times a second, or sample with a filter that few groups match.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.groups import small_group
from benchmarks.processes import Child, children, serve
from benchmarks.results import Result

BLOCK_SECONDS = 0.05
PUTS_PER_SECOND = 5
GROUPS = 2000
RARE = 100
BATCH = 8
#: Neighbors of most measurements; one has as many as there are processes that draw, twice over.
FEW = 4


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure puts and samples of one client in each neighborhood, in rounds."""
    url = await bench.database()
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        for start in range(0, GROUPS, 500):
            await buffer.put(
                [
                    small_group(tags={"kind": "common" if i % RARE else "rare"})
                    for i in range(start, start + 500)
                ]
            )
    most = 2 * max(bench.options.trainers)
    neighborhoods = {
        "alone": (0, ""),
        f"{FEW} that put": (FEW, "put"),
        f"{most} that put": (most, "put"),
        "1 that samples with a rare filter": (1, "sample rare"),
    }
    rounds: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    async with children(__name__, 1 + max(FEW, most), url) as [client, *neighbors]:
        for number in range(bench.options.long_rounds):
            for call in ("put", "sample"):
                for name, (count, beside) in neighborhoods.items():
                    bench.report(f"{call}, {name}: round {number + 1}")
                    duration = bench.options.seconds
                    mine, *theirs = await asyncio.gather(
                        client.ask(call, duration, False),
                        *(Child.ask(one, beside, duration, True) for one in neighbors[:count]),
                    )
                    rates = [rate for rate, _ in theirs] or [0.0]
                    rounds.setdefault((call, name), []).append((*mine, sum(rates), min(rates)))
    for (call, name), values in rounds.items():
        facts = {"call": call, "neighbors": name}
        rate, p99, all_rates, least_rate = np.median(values, axis=0).tolist()
        alone, p99_alone, *_ = np.median(rounds[call, "alone"], axis=0).tolist()
        label = f"{call}, {name}"
        yield bench.result(label, rate, "calls/s", **facts, side="calls")
        yield bench.result(f"{label}: p99", 1e3 * p99, "ms", **facts, side="p99")
        if name != "alone":
            yield bench.result(
                *(f"{label}: rate / alone", rate / alone, "x", 0.7),
                **facts, side="rate / alone", more_is_better=True,
            )  # fmt: skip
            yield bench.result(
                f"{label}: p99 / alone", p99 / p99_alone, "x", 3.0, **facts, side="p99 / alone"
            )
            yield bench.result(
                f"{label}: neighbors", all_rates, "calls/s", **facts, side="neighbors together"
            )
            yield bench.result(
                f"{label}: slowest neighbor", least_rate, "calls/s", **facts, side="the slowest"
            )


async def _serve(url: str) -> None:
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        works: dict[str, Callable[[], Awaitable[object]]] = {
            "put": lambda: buffer.put(small_group()),
            "sample": lambda: buffer.sample(BATCH),
            "sample rare": lambda: buffer.sample(BATCH, where=rdb.col.tags["kind"] == "rare"),
        }

        async def block(end: float) -> None:
            """Block the event loop for most of the time, as a worker that computes does."""
            while time.perf_counter() < end:
                time.sleep(BLOCK_SECONDS)  # noqa: ASYNC251
                await asyncio.sleep(0)

        async def repeat(work: str, duration: float, is_neighbor: bool) -> tuple[float, float]:
            """Repeat a call for some seconds. Return its rate and the p99 of its latency."""
            end = time.perf_counter() + duration
            blocking = asyncio.ensure_future(block(end if is_neighbor else 0.0))
            times = []
            while (start := time.perf_counter()) < end:
                await works[work]()
                times.append(time.perf_counter() - start)
                if is_neighbor and work == "put":
                    await asyncio.sleep(max(0.0, 1 / PUTS_PER_SECOND - times[-1]))
            await blocking
            return len(times) / duration, float(np.quantile(times, 0.99)) if times else duration

        await serve(repeat)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
