"""How long it takes to be ready: importing, and opening a file whose writer was killed."""

from __future__ import annotations

import asyncio
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sqlalchemy import make_url

import replaydb as rdb
from benchmarks.databases import Databases
from benchmarks.groups import small_group
from benchmarks.options import Options
from benchmarks.results import Result

OPEN_BAR, IMPORT_BAR = 300.0, 400.0


async def run(databases: Databases, engine: str, options: Options) -> list[Result]:
    """Milliseconds; the import only once, with SQLite."""
    url = await databases.make(engine)
    await _write_and_die(url, options.file_rows)
    seconds = [await _open(url) for _ in range(min(options.rounds, 7))]
    what = f"open after kill -9, {options.file_rows:,} groups, until the first batch"
    results = [Result("open", engine, what, 1e3 * statistics.median(seconds), "ms", OPEN_BAR)]
    if engine == "sqlite":
        rounds = min(options.rounds, 9)
        times = [[_start(code) for code in ("pass", "import replaydb")] for _ in range(rounds)]
        extra = statistics.median(full - bare for bare, full in times)
        results.append(Result("open", "", "import replaydb", 1e3 * extra, "ms", IMPORT_BAR))
    return results


async def _write_and_die(url: str, count: int) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.opening", url, str(count), stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    await child.stdout.readline()  # all are in, and it goes on putting
    await asyncio.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    await child.wait()


async def _open(url: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        if url.startswith("sqlite"):  # a copy, with its log: opening recovers it
            for path in Path(make_url(url).database or "").parent.glob("replay.db*"):
                shutil.copy(path, folder)
            url = f"sqlite:///{folder}/replay.db"
        start = time.perf_counter()
        async with rdb.Store.open(url) as store:
            await (await store.buffer("bench")).sample(1)
            return time.perf_counter() - start


def _start(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


async def _put_for_ever(url: str, count: int) -> None:
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        for first in range(0, count, 500):
            await buffer.put([small_group() for _ in range(min(500, count - first))])
        print("ready", flush=True)
        while True:
            await buffer.put(small_group())


if __name__ == "__main__":
    asyncio.run(_put_for_ever(sys.argv[1], int(sys.argv[2])))
