"""Overhead of the blocking API over the asynchronous one, for sequential calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.groups import SMALL, Source, put_all
from benchmarks.results import Result, Timings, Work, race, timed
from replaydb import blocking


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds of a call with each API, and the difference."""
    url, rounds = await bench.database(), 8 * bench.options.rounds
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        await put_all(buffer, Source(SMALL), 64)
        works: dict[str, Work] = {
            "count()": buffer.count,
            "sample(1)": partial(buffer.sample, 1),
        }
        awaited = await race(timed(works), rounds, warm_up=2)
    called = await asyncio.to_thread(_blocking_calls, url, rounds)
    for name in works:
        asynchronous, synchronous = awaited.median(name), called.median(name)
        for side, value in (
            ("async", asynchronous),
            ("blocking", synchronous),
            ("blocking - async", synchronous - asynchronous),
        ):
            yield bench.result(f"{name}, {side}", 1e3 * value, "ms", call=name, side=side)


def _blocking_calls(url: str, rounds: int) -> Timings:
    timings = Timings({"count()": [], "sample(1)": []})
    with blocking.Store.open(url) as store:
        buffer = store.buffer("bench")
        for number in range(2 + rounds):
            for name, call in (("count()", buffer.count), ("sample(1)", partial(buffer.sample, 1))):
                start = time.perf_counter()
                call()
                if number >= 2:
                    timings[name].append(time.perf_counter() - start)
    return timings
