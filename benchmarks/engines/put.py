"""Throughput of puts, compared with a bare driver that writes the same rows.

The bare driver gets prepared rows; "bare + encoding" first converts the groups with the codec of
replaydb. Neither checks uids, allocates ids, generates keys or updates task counters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import replaydb as rdb
from benchmarks import bare
from benchmarks.bench import Bench
from benchmarks.groups import Shape, Source, put_all
from benchmarks.options import Options
from benchmarks.results import Result, TimedWork, seconds
from replaydb.database.tables.records import to_record

#: Groups per put, unless they exceed `PUT_BYTES`.
SIZES = (50, 1)
PUT_BYTES = 12_000_000
PRODUCERS = (1, 8, 64)
#: Maximum number of connections of the bare driver: SQLite has one writer, and ten is the default
#: size of an asyncpg pool.
CONNECTIONS = {"sqlite": 1, "postgresql": 10}
BATCH_TARGETS, SINGLE_TARGET = {"sqlite": 0.85, "postgresql": 0.8}, 0.7

W = TypeVar("W")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: `count` groups of a shape, `size` per put, by `producers` producers."""

    shape: Shape
    count: int
    size: int
    producers: int

    def __str__(self) -> str:
        return f"{self.shape}: {self.size} per put, {_plural(self.producers, 'producer')}"

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the results."""
        return {"shape": str(self.shape), "size": self.size, "producers": self.producers}

    @property
    def warm_up(self) -> int:
        """Number of warm-up rounds; long rounds need none."""
        return 1 if self.count * self.shape.num_bytes < 10**8 else 0

    def target(self, engine: str) -> float | None:
        """Return the target share of the bare driver's speed, for groups of 72 KB."""
        if self.shape.num_bytes > 100_000:
            return None
        if self.size > 1:
            return BATCH_TARGETS[engine]
        return SINGLE_TARGET if self.producers == 64 else None


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure groups per second of every case, and their ratios."""
    for shape in bench.options.shapes:
        async with _sides(bench, shape) as sides:
            size = to_record(sides.source.take(1)[0], None).facts["num_bytes"]
            yield bench.result(f"{shape}: payload of a group", size, "bytes", shape=str(shape))
            for case in cases(bench.options, shape):
                timings = await bench.race(
                    str(case), sides.works(case), bench.options.long_rounds, warm_up=case.warm_up
                )
                for side in timings:
                    speed = case.count / timings.median(side)
                    yield bench.result(
                        f"{case}: {side}", speed, "groups/s", side=side, **case.facts
                    )
                target = case.target(bench.engine)
                for other, limit in (("bare", target), ("bare + encoding", None)):
                    side = f"replaydb / {other}"
                    yield bench.result(
                        f"{case}: {side}", timings.ratio(other, "replaydb"), "x", limit,
                        more_is_better=True, side=side, **case.facts,
                    )  # fmt: skip


def cases(options: Options, shape: Shape) -> list[Case]:
    """Return the cases that do not move more than `most_megabytes`."""
    found = []
    most = max(1, min(PUT_BYTES // shape.num_bytes, options.groups(shape)))
    for size in dict.fromkeys(min(size, most) for size in SIZES):
        for producers in PRODUCERS:
            count = max(producers, options.groups(shape) // size) * size
            if count * shape.num_bytes <= 10**6 * options.most_megabytes:
                found.append(Case(shape, count, size, producers))
    return found


@dataclass(frozen=True, slots=True)
class _Sides:
    """A store and bare connections, on separate databases."""

    buffer: rdb.Buffer
    drivers: Sequence[bare.Driver]
    encoder: bare.Encoder
    source: Source

    def works(self, case: Case) -> dict[str, TimedWork]:
        drivers = self.drivers[: case.producers]

        async def put() -> float:
            batches = list(self.source.batches(case.count, case.size))
            buffers = [self.buffer] * case.producers
            return await seconds(distribute(batches, buffers, lambda one, batch: one.put(batch)))

        async def write() -> float:
            batches = self.source.batches(case.count, case.size)
            rows = [self.encoder.rows(batch) for batch in batches]
            return await seconds(distribute(rows, drivers, lambda one, rows: one.write(rows)))

        async def encode_and_write() -> float:
            batches = list(self.source.batches(case.count, case.size))
            return await seconds(
                distribute(batches, drivers, lambda one, batch: one.write(self.encoder.rows(batch)))
            )

        return {"replaydb": put, "bare": write, "bare + encoding": encode_and_write}


@asynccontextmanager
async def _sides(bench: Bench, shape: Shape) -> AsyncIterator[_Sides]:
    source = Source(shape)
    urls = [await bench.database() for _ in range(2)]
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(rdb.Store.open(url)) for url in urls]
        buffers = [await store.buffer("bench") for store in stores]
        for buffer in buffers:  # creates the task
            await put_all(buffer, source, 1)
        await stores[1].close()
        drivers = [await bare.connect(urls[1]) for _ in range(CONNECTIONS[bench.engine])]
        for driver in drivers:
            stack.push_async_callback(driver.close)
        yield _Sides(buffers[0], drivers, bare.Encoder(drivers[0], buffers[1].id), source)


async def distribute(
    items: Sequence[T], workers: Sequence[W], work: Callable[[W, T], Awaitable[object]]
) -> None:
    """Process items by concurrent workers, each of which takes its share one after another."""

    async def one_after_another(first: int) -> None:
        for item in items[first :: len(workers)]:
            await work(workers[first], item)

    await asyncio.gather(*(one_after_another(first) for first in range(len(workers))))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
