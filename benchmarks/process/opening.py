"""Startup time: the import, and opening a store after its writer was killed.

The killed process reported every put that returned: none of these groups may be lost.
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

OPEN_TARGET, IMPORT_TARGET = 300.0, 400.0


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds, and count lost groups. The import is measured with SQLite only."""
    rounds, rows = min(bench.options.rounds, 7), bench.options.file_rows
    url = await bench.database()
    bench.report(f"writing {rows:,} groups")
    acknowledged = await _write_and_die(url, rows)
    opened = [await _open(url) for _ in range(rounds)]
    milliseconds = 1e3 * statistics.median(taken for taken, _ in opened)
    lost = max(acknowledged - count for _, count in opened)
    what = f"open after kill -9 to first batch, {rows:,} groups"
    yield bench.result(what, milliseconds, "ms", OPEN_TARGET, side="open")
    yield bench.result("groups acknowledged before kill -9", acknowledged, "groups")
    yield bench.result("acknowledged groups lost", max(0, lost), "groups", 0, side="lost")
    if bench.engine == "sqlite":
        bench.report("importing")
        times = [[_start(code) for code in ("pass", "import replaydb")] for _ in range(rounds)]
        extra = statistics.median(full - bare for bare, full in times)
        yield bench.result("import replaydb", 1e3 * extra, "ms", IMPORT_TARGET, side="import")


async def _write_and_die(url: str, count: int) -> int:
    """Kill a writer while it puts. Return the number of groups that were acknowledged."""
    async with children(__name__, 1, url) as [writer]:
        await writer.begin(count)
        while int(await writer.line()) < count:
            pass
        await asyncio.sleep(0.05)
        writer.kill()
        return int((await writer.rest() or [str(count)])[-1])


async def _open(url: str) -> tuple[float, int]:
    """Return the seconds from opening to the first batch, and the number of stored groups."""
    with tempfile.TemporaryDirectory() as folder:
        if url.startswith("sqlite"):  # copied with its log, which opening must recover
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

        async def put_without_end(count: int) -> None:
            """Put groups, and print after each put how many have been put."""
            done = 0
            while True:
                size = max(1, min(500, count - done))
                done += len(await buffer.put([small_group() for _ in range(size)]))
                print(done, flush=True)

        await serve(put_without_end)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
