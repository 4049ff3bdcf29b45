"""How long those wait who look at the pages of `replaydb ui`, and what a training notices of them.

Another process puts, one group after another: alone, then while viewers look at page after page.
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
#: Between two pages that somebody looks at.
LOOK_SECONDS = 1.0
BAR = 200.0
#: Where they are, and milliseconds that they may take: no index is in the order of rewards.
PAGES = {
    "overview": ("?buffer=bench", BAR),
    "groups, the latest": ("groups?buffer=bench", BAR),
    "groups by reward": ("groups?buffer=bench&sort=reward_mean", None),
    "groups of a task by priority": ("groups?buffer=bench&task=code&sort=priority", BAR),
    "a group": ("group?buffer=bench&id=7", BAR),
}


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Milliseconds of a page, the first time and then; of the slowest put in a hundred."""
    rows = max(rows for rows in bench.options.rows if rows <= LARGEST)
    url = await bench.database()
    await fill(url, rows, bench.say)
    of = f"{rows:,} groups"
    async with children(__name__, 1, url) as [server]:
        root = await server.ask()
        for name, (page, bar) in PAGES.items():
            bench.say(name)
            first, *again = [
                await seconds(_look(root + page)) for _ in range(1 + bench.options.rounds)
            ]
            what = f"page: {name}, {of}"
            yield bench.result(f"{what}, the first time", 1e3 * first, "ms")
            yield bench.result(what, 1e3 * statistics.median(again), "ms", bar)
        async with putting(url) as putter:
            lasting = 5 * bench.options.seconds
            bench.say("puts alone")
            _, alone = await putter.slowest_during(asyncio.sleep(lasting))
            bench.say(f"puts beside {VIEWERS} viewers")
            _, beside = await putter.slowest_during(_view(root, lasting))
        server.kill()
    yield bench.result(f"put, 99 %, {of}", alone, "ms", side="alone")
    yield bench.result(f"put beside {VIEWERS} viewers, 99 %, {of}", beside, "ms", side="viewers")
    yield bench.result("put, 99 %: beside viewers / alone", beside / alone, "x", side="ratio")


async def _view(root: str, lasting: float) -> None:
    """Look at all pages, one after the other, as so many people do for so many seconds."""
    pages = [root + page for page, _ in PAGES.values()]
    end = asyncio.get_running_loop().time() + lasting

    async def one(start: int) -> None:
        for number in count(start):
            await _look(pages[number % len(pages)])
            await asyncio.sleep(LOOK_SECONDS)
            if asyncio.get_running_loop().time() > end:
                return

    await asyncio.gather(*map(one, range(VIEWERS)))


async def _look(page: str) -> None:
    def read() -> None:
        with urlopen(page) as answer:  # noqa: S310 - of our own server
            answer.read()

    await asyncio.to_thread(read)


def _serve(url: str) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    serve(url, port=0, ready=lambda address: print(f'"{address}"', flush=True))


if __name__ == "__main__":
    _serve(sys.argv[1])
