"""Throughput of many processes that share one task, beside as many with a task each.

PostgreSQL behind a relay that delays its answers. Each process makes one call at a time. The bare
driver does the least that a put, a sample or a lease needs, in one transaction on the same tables,
and locks no task. At the end, twice as many processes share the task for a minute, to see whether
any of them gets less than its share.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

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
#: Duration of the measurement of shares, as a multiple of the others.
LONGER = 20

#: A call, the number of processes, and a layout.
Case = tuple[str, int, str]


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure each call with each number of processes and each layout, in rounds."""
    url = await bench.database()
    most, crowd = max(bench.options.sharers), 2 * max(bench.options.sharers)
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench", on_ack="return")
        for number in range(most + 1):
            bench.report(f"filling {number} of {most + 1} tasks")
            await buffer.put([small_group(f"task-{number}") for _ in range(GROUPS)])
        bare_buffer = await store.buffer("bare")
        await bare_buffer.put([small_group() for _ in range(GROUPS)])
    rounds: dict[Case, list[float]] = {}
    async with (
        relayed(url) as (distant, relay),
        children(__name__, crowd, distant, bare_buffer.id) as clients,
    ):
        await relay.delay(DELAY)
        for number in range(bench.options.long_rounds):
            for call in CALLS:
                for count in bench.options.sharers:
                    for layout in LAYOUTS:
                        bench.report(f"{call}, {count} processes, {layout}: round {number + 1}")
                        some = clients[:count]
                        rates, _ = await _repeated(some, call, layout, bench.options.seconds)
                        rounds.setdefault((call, count, layout), []).append(sum(rates))
        shares = {}
        for call in CALLS:
            bench.report(f"{call}, {crowd} processes, one task")
            for seconds in (bench.options.seconds, LONGER * bench.options.seconds):
                shares[call] = await _repeated(clients, call, "one task", seconds)
    for one in (*_throughputs(bench, rounds), *_shares(bench, shares)):
        yield one


def _throughputs(bench: Bench, rounds: Mapping[Case, Sequence[float]]) -> Iterator[Result]:
    for (call, count, layout), values in rounds.items():
        rate = float(np.median(values))
        facts: dict[str, Any] = {"call": call, "processes": count}
        label = f"{call}, {count} processes, {layout}"
        yield bench.result(label, rate, "calls/s", **facts, side=layout)
        if layout == "one task":
            apart = float(np.median(rounds[call, count, "a task each"]))
            least = float(np.median(rounds[call, count, "bare driver"]))
            yield bench.result(
                *(f"{label} / a task each", rate / apart, "x", 0.8),
                **facts, side="one task / a task each", more_is_better=True,
            )  # fmt: skip
            yield bench.result(
                f"{label} / bare driver", rate / least, "x", **facts, side="one task / bare driver"
            )


def _shares(
    bench: Bench, shares: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> Iterator[Result]:
    for call, (rates, times) in shares.items():
        label = f"{call}, {len(rates)} processes, one task"
        facts: dict[str, Any] = {"call": call, "processes": len(rates)}
        yield bench.result(label, sum(rates), "calls/s", **facts, side="one task")
        tail = float(np.quantile(times, 0.999) / np.median(times))
        yield bench.result(
            *(f"{label}: p99.9 / median", tail, "x", 10.0), **facts, side="p99.9 / median"
        )
        yield bench.result(
            *(f"{label}: least share / fair share", min(rates) / float(np.mean(rates)), "x", 0.5),
            **facts, side="least share / fair share", more_is_better=True,
        )  # fmt: skip


async def _repeated(
    clients: Sequence[Child], call: str, layout: str, seconds: float
) -> tuple[list[float], list[float]]:
    """Let each client repeat a call. Return the rate of each, and the times of all calls."""
    found = await asyncio.gather(
        *(one.ask(call, layout, at, seconds) for at, one in enumerate(clients))
    )
    return [rate for rate, *_ in found], [it for _, *several in found for it in several]


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
