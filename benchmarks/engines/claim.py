"""Time of leases, compared with a bare driver that claims as many groups.

The bare claim is a common implementation of a queue: SELECT by an index (FOR UPDATE SKIP LOCKED on
PostgreSQL), UPDATE of the status, fetch, COMMIT. A lease also updates task counters and lineage,
expires, and decodes the groups.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import replaydb as rdb
from benchmarks import bare
from benchmarks.bench import Bench
from benchmarks.engines.sample import batch_size
from benchmarks.groups import Source, put_all
from benchmarks.results import Result, TimedWork, seconds

TTL = 600


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds of a claim, and of a claim with its release; and their ratios."""
    for shape in bench.options.shapes:
        url, count = await bench.database(), batch_size(bench.options, shape)
        async with rdb.Store.open(url) as store:
            buffer = await store.buffer("bench", on_ack="return")
            bench.report(f"{shape}: putting")
            await put_all(buffer, Source(shape), bench.options.groups(shape, 2 * count))
            driver = await bare.connect(url)
            claims = _Claims(buffer, driver, count)
            rounds = bench.options.rounds
            timings = await bench.race(str(shape), claims.works(), rounds, warm_up=3)
            await driver.close()
        for name, total in (("bare claim", "bare claim + release"), ("lease", "lease + ack")):
            ends = claims.ends[name][-rounds:]
            timings[total] = [sum(both) for both in zip(timings[name], ends, strict=True)]
        facts: dict[str, Any] = {"shape": str(shape), "groups": count}
        for side in map(str, timings):
            what = f"{count} groups of {shape}: {side}"
            yield bench.result(what, 1e3 * timings.median(side), "ms", side=side, **facts)
        for name, other in (
            ("lease", "bare claim"),
            ("lease", "bare claim + decoding"),
            ("lease + ack", "bare claim + release"),
        ):
            side = f"{name} / {other}"
            ratio = timings.ratio(name, other)
            yield bench.result(f"{count} groups of {shape}: {side}", ratio, "x", side=side, **facts)


class _Claims:
    """Timed claims, each followed by its release or ack, which is timed separately."""

    def __init__(self, buffer: rdb.Buffer, driver: bare.Driver, count: int) -> None:
        self._buffer = buffer
        self._driver = driver
        self._count = count
        self.ends: dict[str, list[float]] = {"bare claim": [], "lease": []}

    def works(self) -> dict[str, TimedWork]:
        return {
            "bare claim": self._claim,
            "bare claim + decoding": partial(self._claim, decoding=True),
            "lease": self._lease,
        }

    async def _claim(self, *, decoding: bool = False) -> float:
        start = time.perf_counter()
        claimed = await self._driver.claim(self._buffer.id, self._count)
        if decoding:
            bare.decode(claimed)
        taken = time.perf_counter() - start
        release = await seconds(self._driver.release([one[0] for one in claimed]))
        if not decoding:
            self.ends["bare claim"].append(release)
        return taken

    async def _lease(self) -> float:
        start = time.perf_counter()
        lease = await self._buffer.lease(self._count, rdb.Fifo(), ttl=TTL)
        taken = time.perf_counter() - start
        self.ends["lease"].append(await seconds(lease.ack()))
        return taken
