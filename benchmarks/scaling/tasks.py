"""Calls on a buffer with many tasks, which each have two groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.groups import small_group
from benchmarks.results import Result

#: A page must cost as much with the most tasks as with the fewest.
TARGET = 1.5
PAGE = 50
CALLS: dict[str, Callable[[rdb.Buffer], Awaitable[object]]] = {
    f"find(limit={PAGE})": lambda buffer: buffer.find(limit=PAGE),
    f"find(limit={PAGE}, order_by=priority)": lambda buffer: buffer.find(
        limit=PAGE, order_by=rdb.col.priority
    ),
    "sample(32)": lambda buffer: buffer.sample(32, at_least=1),
    "sample(32, Fifo())": lambda buffer: buffer.sample(32, rdb.Fifo(), at_least=1),
    "sample(2, tasks=...) of one task": lambda buffer: buffer.sample(2, tasks="task-0"),
    "stats(totals=False)": lambda buffer: buffer.stats(totals=False),
    "metrics(totals=False)": lambda buffer: buffer.metrics(totals=False),
}


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds for each number of tasks, and ratios of the most to the fewest."""
    async with rdb.Store.open(await bench.database()) as store:
        buffers = {}
        for number in bench.options.tasks:
            bench.report(f"writing {number} tasks")
            buffers[number] = await store.buffer(f"tasks-{number}")
            for start in range(0, number, 500):
                some = range(start, min(number, start + 500))
                await buffers[number].put(
                    [small_group(f"task-{i}") for i in some for _ in range(2)]
                )
        few, many = bench.options.tasks[0], bench.options.tasks[-1]
        for what, call in CALLS.items():
            works = {number: partial(call, buffer) for number, buffer in buffers.items()}
            times = await bench.times(what, works, bench.options.long_rounds)
            for number in buffers:
                label = f"{what}, {number:,} tasks"
                median = 1e3 * times.median(number)
                yield bench.result(label, median, "ms", call=what, tasks=f"{number:,} tasks")
            target = TARGET if what == f"find(limit={PAGE})" else None
            ratio = times.ratio(many, few)
            yield bench.result(f"{what}: ratio", ratio, "x", target, call=what, tasks="ratio")
