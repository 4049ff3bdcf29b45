"""Startup: the CPU time of imports, and opening a store after its writer was killed.

The killed process reported every put that returned: none of these groups may be lost.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from sqlalchemy import make_url

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.groups import small_group
from benchmarks.processes import children, serve
from benchmarks.results import Result

OPEN_TARGET = 300.0
#: Arguments of an interpreter, and the target of its CPU time as a multiple of `BASE`.
BASE = ("-c", "import numpy, sqlalchemy")
STARTS = {
    "import replaydb": (("-c", "import replaydb"), 1.3),
    "replaydb --version": (("-m", "replaydb.cli", "--version"), 1.5),
    "from replaydb import *": (("-c", "from replaydb import *"), None),
}


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds, and count lost groups. Imports are measured with SQLite only."""
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
        every = {"base": BASE, **{name: arguments for name, (arguments, _) in STARTS.items()}}
        with tempfile.TemporaryDirectory() as folder:
            times = [
                {name: _start(arguments, folder) for name, arguments in every.items()}
                for _ in range(1 + min(bench.options.rounds, 20))
            ][1:]  # the first round compiles the modules
        median = {name: statistics.median(one[name] for one in times) for name in every}
        for name, (_, target) in STARTS.items():
            what = f"{name} / import numpy, sqlalchemy"
            yield bench.result(what, median[name] / median["base"], "x", target, side=name)


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


def _start(arguments: Sequence[str], bytecode: str) -> float:
    """Return the CPU seconds of a process whose modules are compiled, as pip leaves them."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *arguments]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


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
