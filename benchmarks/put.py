"""How fast groups of 72 KB are put, next to a bare driver that writes the same rows.

The bare driver gets its rows ready-made; ours encodes the groups, checks uids, gives ids and keeps
the accounts.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Sequence

import numpy as np

import replaydb as rdb
from benchmarks import bare
from benchmarks.databases import Databases
from benchmarks.groups import large_group
from benchmarks.options import Options
from benchmarks.results import Result

BATCH = 50
BATCH_PRODUCERS = 4
PRODUCERS = 64
ROUNDS = 5
BATCH_BAR, SINGLE_BAR = 0.85, 0.7


async def run(databases: Databases, engine: str, options: Options) -> list[Result]:
    """Groups per second and ratios, in batches and one by one from many producers."""
    urls = [await databases.make(engine) for _ in range(3)]
    rng = np.random.default_rng(0)
    async with rdb.Store.open(urls[0]) as ours, rdb.Store.open(urls[1]) as model:
        race = _Race(await ours.buffer("bench"), await model.buffer("bench"), rng)
        await race.connect(urls[2])
        count = max(options.groups, PRODUCERS)
        rounds = min(ROUNDS, options.rounds)
        for number in range(rounds + 1):
            await race.run(count, counts=number > 0)
        await race.close()
    return race.results(engine)


class _Race:
    """Ours, and a bare driver that repeats what a model put has sent, each on its own database."""

    def __init__(self, buffer: rdb.Buffer, model: rdb.Buffer, rng: np.random.Generator) -> None:
        self._buffer = buffer
        self._model = model
        self._rng = rng
        self._speeds: dict[str, list[float]] = {}
        self._num_bytes = 0

    async def connect(self, url: str) -> None:
        """The bare driver's database needs the buffer, the task and the run; all need an id."""
        async with rdb.Store.open(url) as store:
            await (await store.buffer("bench")).put(large_group(self._rng))
        await self._model.put(large_group(self._rng))
        self._driver = await bare.connect(url)

    async def close(self) -> None:
        """Let go of the bare driver."""
        await self._driver.close()

    async def run(self, count: int, *, counts: bool) -> None:
        """One round: everything once, right after each other."""
        speeds = {
            "put": await self._ours(count, BATCH, producers=1),
            "bare": await self._theirs(count, BATCH),
            "puts": await self._ours(count, BATCH, producers=BATCH_PRODUCERS),
            "single": await self._ours(count, 1, producers=PRODUCERS),
            "bare single": await self._theirs(count, 1),
        }
        for name, speed in speeds.items() if counts else ():
            self._speeds.setdefault(name, []).append(speed)

    def results(self, engine: str) -> list[Result]:
        """Medians."""

        def speed(name: str, what: str) -> Result:
            value = statistics.median(self._speeds[name])
            return Result("put", engine, what, value, "groups/s")

        def ratio(name: str, other: str, what: str, bar: float) -> Result:
            pairs = zip(self._speeds[name], self._speeds[other], strict=True)
            value = statistics.median(mine / theirs for mine, theirs in pairs)
            return Result("put", engine, what, value, "x", bar, more_is_better=True)

        return [
            speed("put", f"batches of {BATCH} groups of {self._num_bytes:,} B"),
            speed("puts", f"the same, {BATCH_PRODUCERS} producers"),
            speed("bare", "the same rows, bare driver"),
            ratio("put", "bare", "batches / bare", BATCH_BAR),
            ratio("puts", "bare", f"batches of {BATCH_PRODUCERS} producers / bare", BATCH_BAR),
            speed("single", f"one group at a time, {PRODUCERS} producers"),
            speed("bare single", "one group a transaction, bare driver"),
            ratio("single", "bare single", "one group at a time / bare", SINGLE_BAR),
        ]

    async def _ours(self, count: int, size: int, producers: int) -> float:
        groups = [large_group(self._rng) for _ in range(count)]
        batches = [groups[first : first + size] for first in range(0, count, size)]

        async def produce(first: int) -> None:
            for batch in batches[first::producers]:
                await self._buffer.put(batch)

        async def produce_all() -> None:
            await asyncio.gather(*(produce(first) for first in range(producers)))

        return count / await _seconds(produce_all())

    async def _theirs(self, count: int, size: int) -> float:
        groups = [large_group(self._rng) for _ in range(count)]
        with bare.recorded_inserts(self._model) as inserts:
            await self._model.put(groups)
        payloads = [row for sql, rows in inserts if " payload " in sql for row in rows]
        blobs = [memoryview(row[-1]).nbytes for row in payloads]  # its last column
        self._num_bytes = sum(blobs) // count
        transactions = _split(inserts, -(-count // size))

        async def write_all() -> None:
            for one in transactions:
                await self._driver.write(one)

        return count / await _seconds(write_all())


async def _seconds(work: Awaitable[None]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


def _split(inserts: Sequence[bare.Insert], parts: int) -> list[list[bare.Insert]]:
    """The rows of one put as those of several: of each insert an equal share, in order."""
    shares: list[list[bare.Insert]] = [[] for _ in range(parts)]
    for sql, rows in inserts:
        size = len(rows) / parts
        for i, share in enumerate(shares):
            share.append((sql, rows[round(i * size) : round((i + 1) * size)]))
    return shares
