"""Latency of calls over a network: PostgreSQL behind a relay that delays its answers.

The relay is a process of its own. The bare driver does the least that such a call needs: it writes
the same rows in one transaction, reads payloads by id, or claims groups and returns them. The
increase of the latency with the delay, divided by that of a single round trip, shows how many round
trips a call waits for.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from urllib.parse import parse_qs, urlsplit, urlunsplit

import asyncpg

import replaydb as rdb
from benchmarks import bare
from benchmarks.bench import Bench
from benchmarks.groups import SMALL, Source, put_all, small_group
from benchmarks.processes import children, serve
from benchmarks.results import Result

#: Delays of a round trip, in milliseconds.
DELAYS = (0.0, 1.0, 5.0)
BATCH = 8
MANY = 50
GROUPS = 400
CHUNK_BYTES = 1 << 18
PING = "one round trip: bare driver"


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure every call at every delay, beside the bare driver."""
    url = await bench.database()
    async with AsyncExitStack() as stack:
        [relay] = await stack.enter_async_context(children(__name__, 1, url))
        port = await relay.ask("start", 0.0)
        parts = urlsplit(url)
        user = parts.netloc.rpartition("@")[0]
        relayed = urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{port}", query=""))
        store = await stack.enter_async_context(rdb.Store.open(relayed))
        buffer = await store.buffer("bench", max_staleness=4, on_ack="return")
        puts = await store.buffer("puts", max_staleness=4)
        ids = await put_all(buffer, Source(SMALL), GROUPS)
        driver = await bare.connect(relayed)
        stack.push_async_callback(driver.close)
        connection = await asyncpg.connect(relayed)
        stack.push_async_callback(connection.close)
        works = {PING: lambda: connection.fetchval("SELECT 1")}
        works |= _works(buffer, puts, driver, ids)
        medians: dict[tuple[str, float], float] = {}
        for delay in DELAYS:
            await relay.ask("delay", delay / 1e3)
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


class _Relay:
    """Forwards connections to a server, and delays what it answers."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._delay = 0.0

    async def ask(self, what: str, value: float) -> int:
        """Start to listen and return the port, or set the delay in seconds."""
        if what == "delay":
            self._delay = value
            return 0
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        folder = parse_qs(self._parts.query).get("host", [""])[0]
        port = self._parts.port or 5432
        if folder:
            upstream = await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.{port}")
        else:
            upstream = await asyncio.open_connection(self._parts.hostname or "127.0.0.1", port)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._forward(reader, upstream[1], is_answer=False))
                both.create_task(self._forward(upstream[0], writer, is_answer=True))
        except* ConnectionError:
            pass  # one side has closed the connection

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            data = b"."
            while data:
                when, data = await waiting.get()
                if when > loop.time():
                    await asyncio.sleep(when - loop.time())
                writer.write(data)
                await writer.drain()
            writer.close()

        async with asyncio.TaskGroup() as delivering:
            delivering.create_task(deliver())
            data = b"."
            while data:
                data = await reader.read(CHUNK_BYTES)
                waiting.put_nowait((loop.time() + (self._delay if is_answer else 0.0), data))


async def _serve(url: str) -> None:
    await serve(_Relay(url).ask)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
