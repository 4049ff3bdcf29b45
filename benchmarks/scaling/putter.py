"""Another process that puts single groups one after another, and measures their latency."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

import numpy as np

import replaydb as rdb
from benchmarks.groups import small_group
from benchmarks.processes import Child, children, serve
from benchmarks.results import seconds

PAUSE_SECONDS = 0.005

T = TypeVar("T")


class Putter:
    """A process that puts groups until it is killed."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def p99_during(self, work: Awaitable[T]) -> tuple[T, float]:
        """Await work. Return its result, and the p99 latency of puts meanwhile in milliseconds.

        The put in progress at the end of the work counts too.
        """
        task = asyncio.ensure_future(work)
        times: list[float] = []
        while not (task.done() and times):
            times.append(float(await self._child.line()))
        return await task, 1e3 * float(np.quantile(times, 0.99))


@asynccontextmanager
async def putting(url: str) -> AsyncIterator[Putter]:
    """Run a process that puts into the buffer "bench" during a block."""
    async with children(__name__, 1, url) as [child]:
        await child.begin()
        yield Putter(child)
        child.kill()


async def _serve(url: str) -> None:
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")

        async def put_without_end() -> None:
            """Put groups, and print after each put how many seconds it took."""
            while True:
                print(await seconds(buffer.put(small_group())), flush=True)
                await asyncio.sleep(PAUSE_SECONDS)

        await serve(put_without_end)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
