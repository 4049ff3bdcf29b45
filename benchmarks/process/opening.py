"""How long it takes to be ready: importing, and opening what a killed process left.

The killed process had said of every group when its put returned: none of them may be lost.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from sqlalchemy import make_url

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.groups import small_group
from benchmarks.processes import children, serve
from benchmarks.results import Result

OPEN_BAR, IMPORT_BAR = 300.0, 400.0


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Milliseconds, and groups lost; the import only once, with SQLite."""
    rounds, rows = min(bench.options.rounds, 7), bench.options.file_rows
    url = await bench.database()
    bench.say(f"writing {rows:,} groups")
    acknowledged = await _write_and_die(url, rows)
    opened = [await _open(url) for _ in range(rounds)]
    milliseconds = 1e3 * statistics.median(taken for taken, _ in opened)
    lost = max(acknowledged - count for _, count in opened)
    what = f"open after kill -9, {rows:,} groups, until the first batch"
    yield bench.result(what, milliseconds, "ms", OPEN_BAR, side="open")
    yield bench.result("put and acknowledged before kill -9", acknowledged, "groups")
    yield bench.result("lost of them", max(0, lost), "groups", 0, side="lost")
    if bench.engine == "sqlite":
        bench.say("importing")
        times = [[_start(code) for code in ("pass", "import replaydb")] for _ in range(rounds)]
        extra = statistics.median(full - bare for bare, full in times)
        yield bench.result("import replaydb", 1e3 * extra, "ms", IMPORT_BAR, side="import")


async def _write_and_die(url: str, count: int) -> int:
    """How many groups were acknowledged before the writer was killed, in the middle of putting."""
    async with children(__name__, 1, url) as [writer]:
        await writer.begin(count)
        while int(await writer.line()) < count:
            pass
        await asyncio.sleep(0.05)
        writer.kill()
        return int((await writer.rest() or [str(count)])[-1])


async def _open(url: str) -> tuple[float, int]:
    """Seconds until the first batch, and groups that are there."""
    with tempfile.TemporaryDirectory() as folder:
        if url.startswith("sqlite"):  # a copy, with its log: opening recovers it
            for path in Path(make_url(url).database or "").parent.glob("replay.db*"):
                shutil.copy(path, folder)
            url = f"sqlite:///{folder}/replay.db"
        start = time.perf_counter()
        async with rdb.Store.open(url) as store:
            buffer = await store.buffer("bench")
            await buffer.sample(1)
            taken = time.perf_counter() - start
            return taken, await buffer.count()


def _start(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


async def _serve(url: str) -> None:
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")

        async def put_for_ever(count: int) -> None:
            """Say after every put how many groups have been put."""
            done = 0
            while True:
                size = max(1, min(500, count - done))
                done += len(await buffer.put([small_group() for _ in range(size)]))
                print(done, flush=True)

        await serve(put_for_ever)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
