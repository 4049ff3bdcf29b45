"""Event loop latency under load.

Under full load, four producers put batches, two trainers draw and one leases and acks, in one
process and without pauses. A coroutine that sleeps for a millisecond at a time records how late it
wakes up.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any

import numpy as np

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.groups import SMALL, TASK, Source, put_all
from benchmarks.results import Result

SLEEP = 0.001
TARGET = 20.0
WAITING_TARGET = 5.0
PUT, BATCH = 50, 32
LOADS = {"puts": (4, 0, 0), "samples": (0, 2, 0), "leases": (0, 0, 2), "everything": (4, 2, 1)}
#: Groups after which the buffer is full and evicts, after a second or two.
CAPACITY = 2000


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure the delay of wakeups: idle, and under each kind of load."""
    bench.report("idle")
    late = await _delays(asyncio.create_task(asyncio.sleep(min(1.0, bench.options.seconds))))
    yield bench.result("wakeup delay, p99, idle", _p99(late), "ms", load="idle", side="p99")
    bench.report("waiting")
    used = await _wait_in_vain(await bench.database(), min(1.0, bench.options.seconds))
    yield bench.result(
        "CPU usage of a waiting sample", 100 * used, "%", WAITING_TARGET, side="waiting"
    )
    for load, numbers in LOADS.items():
        bench.report(load)
        async with rdb.Store.open(await bench.database()) as store:
            buffer = await store.buffer(
                "bench", capacity=rdb.Capacity(groups=CAPACITY), on_evict="delete", on_ack="return"
            )
            await put_all(buffer, Source(SMALL), 4 * BATCH)
            working = asyncio.create_task(_work(buffer, bench.options.seconds, *numbers))
            with _collections() as pauses:
                late, done = await _delays(working), await working
        facts: dict[str, Any] = {"load": load}
        what = f"wakeup delay, p99, {load}"
        yield bench.result(what, _p99(late), "ms", TARGET, side="p99", **facts)
        what = f"wakeup delay, maximum, {load}"
        yield bench.result(what, 1e3 * float(late.max()), "ms", side="maximum", **facts)
        what = f"longest garbage collection, {load}"
        side = "longest garbage collection"
        yield bench.result(what, 1e3 * max(pauses), "ms", side=side, **facts)
        what = f"throughput (groups put, drawn and leased), {load}"
        yield bench.result(what, done, "groups/s", side="throughput", **facts)


async def _wait_in_vain(url: str, duration: float) -> float:
    """Return the share of one CPU that a sample uses while it waits."""
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        before = time.process_time()
        with suppress(rdb.NotEnoughGroupsError):
            await buffer.sample(1, timeout=duration)
        return (time.process_time() - before) / duration


async def _work(
    buffer: rdb.Buffer, duration: float, producers: int, trainers: int, lessees: int
) -> float:
    """Produce load for some seconds. Return groups per second."""
    source = Source(SMALL)
    # Generated beforehand, so that the time of generation does not count.
    ready = cycle([[one.episodes for one in source.take(PUT)] for _ in range(2)])

    async def put() -> int:
        episodes = next(ready)
        return len(await buffer.put([rdb.EpisodeGroup(TASK, several) for several in episodes]))

    async def sample() -> int:
        return len(await buffer.sample(BATCH))

    async def lease() -> int:
        with suppress(rdb.NotEnoughGroupsError):
            async with buffer.lease(BATCH, ttl=60, timeout=1) as leased:
                return len(leased.batch)
        return 0

    start = time.perf_counter()

    async def repeat(work: Callable[[], Awaitable[int]]) -> int:
        done = 0
        while time.perf_counter() - start < duration:
            done += await work()
        return done

    works = [put] * producers + [sample] * trainers + [lease] * lessees
    done = await asyncio.gather(*(repeat(work) for work in works))
    return sum(done) / (time.perf_counter() - start)


@contextmanager
def _collections() -> Iterator[list[float]]:
    """Record the seconds of Python's garbage collections during a block; they pause all threads."""
    gc.collect()  # so that earlier garbage does not count
    pauses, start = [0.0], 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal start
        if phase == "start":
            start = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - start)

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


async def _delays(during: asyncio.Task[Any]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    late = []
    while not during.done():
        start = time.perf_counter()
        await asyncio.sleep(SLEEP)
        late.append(time.perf_counter() - start - SLEEP)
    await during
    return np.array(late)


def _p99(late: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return 1e3 * float(np.quantile(late, 0.99))
