"""A worker or trainer rank of the benchmark `fleet`, as a process of its own."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import replaydb as rdb
from benchmarks.groups import Extras, Shape, Source
from benchmarks.object_store import counted_requests
from benchmarks.processes import serve

#: Groups of a draw.
BATCH = 4
#: Buffers: of groups that are deleted when they are acked, and of groups that stay stored.
DRAWN_ONCE, DRAWN_AGAIN = "once", "again"


class Client:
    """A worker or a trainer rank.

    Attributes:
        counts: Groups that it has put or drawn, and requests to the bucket by kind.
    """

    def __init__(self, once: rdb.Buffer, again: rdb.Buffer, source: Source) -> None:
        self._once, self._again, self._source = once, again, source
        self._is_running = False
        self._repeating: asyncio.Task[None] | None = None
        self.counts = Counter[str](groups=0, PUT=0, GET=0, LIST=0, HEAD=0, DELETE=0)
        self._calls: dict[str, Callable[[], Awaitable[int]]] = {
            "put": self._put,
            "sample": self._sample,
            "lease": partial(self._lease, once, BATCH, at_least=1),
            "lease all": partial(self._lease, once, BATCH),
            "lease again": partial(self._lease, again, BATCH),
            "wait": partial(self._lease, once, 10_000),  # more than there will be
        }

    async def ask(self, what: str, *arguments: Any) -> dict[str, float]:
        """Begin to repeat a call, end that, or delete the groups. Return all counts."""
        if what == "begin":
            self._is_running = True
            self._repeating = asyncio.create_task(self._repeat(*arguments))
        elif what == "end" and self._repeating is not None:
            self._is_running = False
            _, waiting = await asyncio.wait([self._repeating], timeout=3)
            if waiting:  # for groups that are not put any more
                self._repeating.cancel()
            with suppress(asyncio.CancelledError):
                await self._repeating
        elif what == "empty":
            await self._once.delete(statuses="completed")
        return {**self.counts, "CPU": time.process_time()}

    async def _repeat(self, call: str, period: float, start: float) -> None:
        """Make a call every `period` seconds, or without pauses if it is 0."""
        due = time.perf_counter() + start
        while self._is_running:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self.counts["groups"] += await self._calls[call]()
            due += period

    async def _put(self) -> int:
        await self._once.put(self._source.take(1))
        return 1

    async def _sample(self) -> int:
        return len(await self._again.sample(BATCH))

    async def _lease(self, buffer: rdb.Buffer, count: int, at_least: int | None = None) -> int:
        async with buffer.lease(count, ttl=600, timeout=None, at_least=at_least) as lease:
            return len(lease.batch)


async def _serve(url: str, shape: Shape) -> None:
    async with rdb.Store.open(url, pool_size=1, payload_cache=0) as store:
        once = await store.buffer(DRAWN_ONCE, create=False)
        again = await store.buffer(DRAWN_AGAIN, create=False)
        client = Client(once, again, Source(shape, variety=2))
        with counted_requests(client.counts):
            await serve(client.ask)


if __name__ == "__main__":
    _, _url, _episodes, _tokens, _extras = sys.argv
    asyncio.run(_serve(_url, Shape(int(_episodes), int(_tokens), cast(Extras, _extras))))
