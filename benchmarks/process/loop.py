"""How long the event loop is held up while everything goes on at once.

Four producers put batches, two trainers draw, one leases and acks, all without a pause and in one
process. A coroutine that sleeps a millisecond at a time says how late it was woken.
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

BEAT = 0.001
BAR = 20.0
WAITING_BAR = 5.0
PUT, BATCH = 50, 32
LOADS = {"puts": (4, 0, 0), "samples": (0, 2, 0), "leases": (0, 0, 2), "everything": (4, 2, 1)}
#: Enough for a buffer that is full, and evicts, after a second or two.
CAPACITY = 2000


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Lateness: idle, and under each kind of load."""
    bench.say("idle")
    late = await _beat(asyncio.create_task(asyncio.sleep(min(1.0, bench.options.seconds))))
    yield bench.result("stall, p99, idle", _p99(late), "ms", load="idle", side="p99")
    bench.say("waiting")
    used = await _wait_for_nothing(await bench.database(), min(1.0, bench.options.seconds))
    yield bench.result(
        "processor time of a sample that waits", 100 * used, "%", WAITING_BAR, side="waiting"
    )
    for load, numbers in LOADS.items():
        bench.say(load)
        async with rdb.Store.open(await bench.database()) as store:
            buffer = await store.buffer(
                "bench", capacity=rdb.Capacity(groups=CAPACITY), on_evict="delete", on_ack="return"
            )
            await put_all(buffer, Source(SMALL), 4 * BATCH)
            working = asyncio.create_task(_work(buffer, bench.options.seconds, *numbers))
            with _collections() as pauses:
                late, done = await _beat(working), await working
        facts: dict[str, Any] = {"load": load}
        yield bench.result(f"stall, p99, {load}", _p99(late), "ms", BAR, side="p99", **facts)
        yield bench.result(
            f"stall, longest, {load}", 1e3 * float(late.max()), "ms", side="longest", **facts
        )
        yield bench.result(
            f"garbage collection, longest, {load}", 1e3 * max(pauses), "ms", side="garbage", **facts
        )
        yield bench.result(
            f"groups put, drawn and leased meanwhile, {load}",
            done,
            "groups/s",
            side="done",
            **facts,
        )


async def _wait_for_nothing(url: str, duration: float) -> float:
    """The part of one processor that waiting takes."""
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        before = time.process_time()
        with suppress(rdb.NotEnoughGroupsError):
            await buffer.sample(1, timeout=duration)
        return (time.process_time() - before) / duration


async def _work(
    buffer: rdb.Buffer, duration: float, producers: int, trainers: int, lessees: int
) -> float:
    """Load until the time is over; groups per second."""
    source = Source(SMALL)
    # Made beforehand: what is measured is the store, not how fast groups can be thought up.
    ready = cycle([[one.episodes for one in source.take(PUT)] for _ in range(2)])

    async def put() -> int:
        episodes = next(ready)
        return len(await buffer.put([rdb.EpisodeGroup(TASK, several) for several in episodes]))

    async def sample() -> int:
        return len(await buffer.sample(BATCH))

    async def lease() -> int:
        with suppress(rdb.NotEnoughGroupsError):
            async with buffer.lease(BATCH, ttl=60, timeout=1) as held:
                return len(held.batch)
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
    """Seconds of Python's garbage collections, which hold up everything, during a block."""
    gc.collect()  # what came before is not to be collected now
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


async def _beat(during: asyncio.Task[Any]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    late = []
    while not during.done():
        start = time.perf_counter()
        await asyncio.sleep(BEAT)
        late.append(time.perf_counter() - start - BEAT)
    await during
    return np.array(late)


def _p99(late: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return 1e3 * float(np.quantile(late, 0.99))
