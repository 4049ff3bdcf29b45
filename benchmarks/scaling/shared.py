"""Throughput of many processes that share one task, beside as many with a task each.

PostgreSQL behind a relay that delays its answers. Each process makes one call at a time. The bare
driver does the least that a put, a sample or a lease needs, in one transaction on the same tables,
and locks no task.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np

import replaydb as rdb
from benchmarks import bare
from benchmarks.bench import Bench
from benchmarks.groups import small_group
from benchmarks.processes import Child, children, serve
from benchmarks.relay import relayed
from benchmarks.results import Result

#: Delay of a round trip, in seconds.
DELAY = 0.001
BATCH = 8
#: Groups of each task: enough for one batch of every process.
GROUPS = 600
CALLS = ("put", "sample", "lease and ack")
LAYOUTS = ("a task each", "one task", "bare driver")


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure each call with each number of processes and each layout, in rounds."""
    url = await bench.database()
    most = max(bench.options.sharers)
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench", on_ack="return")
        for number in range(most + 1):
            bench.report(f"filling {number} of {most + 1} tasks")
            await buffer.put([small_group(f"task-{number}") for _ in range(GROUPS)])
        bare_buffer = await store.buffer("bare")
        await bare_buffer.put([small_group() for _ in range(GROUPS)])
    rounds: dict[tuple[str, int, str], list[tuple[float, ...]]] = {}
    async with (
        relayed(url) as (distant, relay),
        children(__name__, most, distant, bare_buffer.id) as clients,
    ):
        await relay.delay(DELAY)
        for number in range(bench.options.long_rounds):
            for call in CALLS:
                for count in bench.options.sharers:
                    for layout in LAYOUTS:
                        bench.report(f"{call}, {count} processes, {layout}: round {number + 1}")
                        found = await asyncio.gather(
                            *(
                                Child.ask(one, call, layout, at, bench.options.seconds)
                                for at, one in enumerate(clients[:count])
                            )
                        )
                        rates = [rate for rate, *_ in found]
                        times = [it for _, *several in found for it in several]
                        tail = np.quantile(times, 0.999) / np.median(times)
                        share = min(rates) / np.mean(rates)
                        rounds.setdefault((call, count, layout), []).append(
                            (sum(rates), float(tail), float(share))
                        )
    for (call, count, layout), values in rounds.items():
        rate, tail, share = np.median(values, axis=0).tolist()
        facts = {"call": call, "processes": count}
        label = f"{call}, {count} processes, {layout}"
        yield bench.result(label, rate, "calls/s", **facts, side=layout)
        if layout == "one task":
            apart, *_ = np.median(rounds[call, count, "a task each"], axis=0).tolist()
            least, *_ = np.median(rounds[call, count, "bare driver"], axis=0).tolist()
            yield bench.result(
                *(f"{label} / a task each", rate / apart, "x", 0.8),
                **facts, side="one task / a task each", more_is_better=True,
            )  # fmt: skip
            yield bench.result(
                f"{label} / bare driver", rate / least, "x", **facts, side="one task / bare driver"
            )
            yield bench.result(
                *(f"{label}: p99.9 / median", tail, "x", 10.0), **facts, side="p99.9 / median"
            )
            yield bench.result(
                *(f"{label}: least share / fair share", share, "x", 0.5),
                **facts, side="least share / fair share", more_is_better=True,
            )  # fmt: skip


async def _serve(url: str, buffer_id: int) -> None:
    async with rdb.Store.open(url, pool_size=1) as store:
        buffer = await store.buffer("bench")
        driver = await bare.connect(url)
        encoder = bare.Encoder(driver, buffer_id, first_id=time.time_ns())
        ids = [one.id for one in await buffer.find(limit=BATCH)]

        async def lease(task: str) -> None:
            lease = await buffer.lease(BATCH, rdb.Uniform(), ttl=600, tasks=task)
            await lease.ack()

        async def claim(task: str) -> None:
            claimed = await driver.claim(buffer_id, BATCH)
            await driver.release([one[0] for one in claimed])

        works: dict[tuple[str, bool], Callable[[str], Awaitable[object]]] = {
            ("put", True): lambda task: driver.write(encoder.rows([small_group()])),
            ("put", False): lambda task: buffer.put(small_group(task)),
            ("sample", True): lambda task: driver.read(ids),
            ("sample", False): lambda task: buffer.sample(BATCH, tasks=task),
            ("lease and ack", True): claim,
            ("lease and ack", False): lease,
        }

        async def repeat(call: str, layout: str, at: int, duration: float) -> list[float]:
            """Repeat a call for some seconds. Return its rate, and the time of each."""
            work = works[call, layout == "bare driver"]
            task = f"task-{at + 1 if layout == 'a task each' else 0}"
            end = time.perf_counter() + duration
            times = []
            while (start := time.perf_counter()) < end:
                await work(task)
                times.append(time.perf_counter() - start)
            return [len(times) / duration, *times]

        await serve(repeat)
        await driver.close()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
