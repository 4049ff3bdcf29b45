"""Latency of calls over a network: PostgreSQL behind a relay that delays its answers.

The relay is a process of its own. The bare driver does the least that such a call needs: it writes
the same rows in one transaction, reads payloads by id, or claims groups and returns them. The
increase of the latency with the delay, divided by that of a single round trip, shows how many round
trips a call waits for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import asyncpg

import replaydb as rdb
from benchmarks import bare
from benchmarks.bench import Bench
from benchmarks.groups import SMALL, Source, put_all, small_group
from benchmarks.relay import relayed
from benchmarks.results import Result

#: Delays of a round trip, in milliseconds.
DELAYS = (0.0, 1.0, 5.0)
BATCH = 8
MANY = 50
GROUPS = 400
PING = "one round trip: bare driver"


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure every call at every delay, beside the bare driver."""
    url = await bench.database()
    async with AsyncExitStack() as stack:
        distant, relay = await stack.enter_async_context(relayed(url))
        store = await stack.enter_async_context(rdb.Store.open(distant))
        buffer = await store.buffer("bench", max_staleness=4, on_ack="return")
        puts = await store.buffer("puts", max_staleness=4)
        ids = await put_all(buffer, Source(SMALL), GROUPS)
        driver = await bare.connect(distant)
        stack.push_async_callback(driver.close)
        connection = await asyncpg.connect(distant)
        stack.push_async_callback(connection.close)
        works = {PING: lambda: connection.fetchval("SELECT 1")}
        works |= _works(buffer, puts, driver, ids)
        medians: dict[tuple[str, float], float] = {}
        for delay in DELAYS:
            await relay.delay(delay / 1e3)
            what = f"{delay:g} ms"
            timings = await bench.times(what, works, bench.options.rounds, warm_up=8)
            for name in works:
                medians[name, delay] = 1e3 * timings.median(name)
    for name in works:
        call, _, side = name.partition(": ")
        for delay in DELAYS:
            yield bench.result(
                *(f"{name}, {delay:g} ms", medians[name, delay], "ms"),
                call=call, side=side, column=f"{delay:g} ms",
            )  # fmt: skip
        increase, of_one = (medians[one, DELAYS[-1]] - medians[one, 0.0] for one in (name, PING))
        yield bench.result(
            *(f"{name}, round trips", increase / of_one, ""),
            call=call, side=side, column="round trips",
        )  # fmt: skip


def _works(
    buffer: rdb.Buffer, puts: rdb.Buffer, driver: bare.Driver, ids: list[int]
) -> dict[str, Callable[[], Awaitable[object]]]:
    encoder = bare.Encoder(driver, puts.id)

    async def lease() -> None:
        leased = await buffer.lease(BATCH, ttl=600)
        await leased.ack()

    async def claim() -> None:
        claimed = await driver.claim(buffer.id, BATCH)
        await driver.release([one[0] for one in claimed])

    return {
        "put of one small group: replaydb": lambda: puts.put(small_group()),
        "put of one small group: bare driver": lambda: driver.write(encoder.rows([small_group()])),
        f"put of {MANY} small groups: replaydb": lambda: puts.put(
            [small_group() for _ in range(MANY)]
        ),
        f"put of {MANY} small groups: bare driver": lambda: driver.write(
            encoder.rows([small_group() for _ in range(MANY)])
        ),
        f"sample of {BATCH} groups of 72 KB: replaydb": lambda: buffer.sample(BATCH),
        f"sample of {BATCH} groups of 72 KB: bare driver": lambda: driver.read(ids[:BATCH]),
        f"lease and ack of {BATCH}: replaydb": lease,
        f"lease and ack of {BATCH}: bare driver": claim,
        f"new priorities of {BATCH}: replaydb": lambda: buffer.update_priorities(
            ids[:BATCH], [1.0] * BATCH
        ),
        "count: replaydb": buffer.count,
        "stats: replaydb": buffer.stats,
    }
