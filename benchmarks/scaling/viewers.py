"""Response time of the web UI, and its effect on the latency of puts.

Another process puts single groups one after another: first alone, then while viewers request page
after page.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator
from itertools import count
from urllib.request import urlopen

from benchmarks.bench import Bench
from benchmarks.filling import fill
from benchmarks.processes import children
from benchmarks.results import Result, seconds
from benchmarks.scaling.putter import putting
from replaydb.ui import serve

LARGEST = 1_000_000
VIEWERS = 10
#: Pause between two pages of a viewer.
PAUSE_SECONDS = 1.0
TARGET = 200.0
#: Addresses of pages, and target milliseconds. No index has the order of rewards.
PAGES = {
    "overview": ("?buffer=bench", TARGET),
    "latest groups": ("groups?buffer=bench", TARGET),
    "groups by reward": ("groups?buffer=bench&sort=reward_mean", None),
    "groups of a task by priority": ("groups?buffer=bench&task=code&sort=priority", TARGET),
    "one group": ("group?buffer=bench&id=7", TARGET),
}


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds of a page, for the first and later requests; and p99 of puts."""
    rows = max(rows for rows in bench.options.rows if rows <= LARGEST)
    url = await bench.database()
    await fill(url, rows, bench.report)
    of = f"{rows:,} groups"
    async with children(__name__, 1, url) as [server]:
        root = await server.ask()
        for name, (page, target) in PAGES.items():
            bench.report(name)
            first, *again = [
                await seconds(_request(root + page)) for _ in range(1 + bench.options.rounds)
            ]
            what = f"page: {name}, {of}"
            yield bench.result(f"{what}, first request", 1e3 * first, "ms")
            yield bench.result(what, 1e3 * statistics.median(again), "ms", target)
        async with putting(url) as putter:
            lasting = 5 * bench.options.seconds
            bench.report("puts alone")
            _, alone = await putter.p99_during(asyncio.sleep(lasting))
            bench.report(f"puts with {VIEWERS} viewers")
            _, viewed = await putter.p99_during(_view(root, lasting))
        server.kill()
    yield bench.result(f"put, p99, {of}", alone, "ms", side="alone")
    yield bench.result(f"put with {VIEWERS} viewers, p99, {of}", viewed, "ms", side="viewers")
    yield bench.result("put, p99: with viewers / without", viewed / alone, "x", side="ratio")


async def _view(root: str, lasting: float) -> None:
    """Request all pages in turn for `lasting` seconds, as `VIEWERS` concurrent viewers."""
    pages = [root + page for page, _ in PAGES.values()]
    end = asyncio.get_running_loop().time() + lasting

    async def one(start: int) -> None:
        for number in count(start):
            await _request(pages[number % len(pages)])
            await asyncio.sleep(PAUSE_SECONDS)
            if asyncio.get_running_loop().time() > end:
                return

    await asyncio.gather(*map(one, range(VIEWERS)))


async def _request(page: str) -> None:
    def read() -> None:
        with urlopen(page) as answer:  # noqa: S310 - the benchmark's own server
            answer.read()

    await asyncio.to_thread(read)


def _serve(url: str) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    serve(url, port=0, ready=lambda address: print(f'"{address}"', flush=True))


if __name__ == "__main__":
    _serve(sys.argv[1])
