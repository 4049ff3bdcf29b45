"""Throughput of concurrent trainers that draw from one buffer, each in its own process.

They draw batches of 32 groups of 72 KB for some seconds: from the same task, whose row they lock in
turn, or each from its own task. The possible speedup depends on the number of processors and on
their use, which is reported too.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import psutil

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.groups import SMALL, Source, put_all
from benchmarks.processes import Child, children, cpu_seconds, serve
from benchmarks.results import Result

BATCH = 32
TARGET = 4.0
#: Groups in the shared task, and in each of the others.
SHARED, OWN = 512, 64
#: Labels of the two cases.
SHARED_TASK, OWN_TASKS = "one shared task", "one task per trainer"


@dataclass(frozen=True, slots=True)
class Run:
    """Total throughput of several trainers, and the number of processors in use."""

    groups_per_second: float
    trainers: float
    server: float
    machine: float


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure groups per second of all trainers, the ratio to one, and processors in use."""
    url, most = await bench.database(), max(bench.options.trainers)
    bench.report("putting")
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        await put_all(buffer, Source(SMALL, task_name="shared"), SHARED)
        for number in range(most):
            await put_all(buffer, Source(SMALL, task_name=f"task-{number}"), OWN)
    async with children(__name__, most, url) as trainers:
        for how in (SHARED_TASK, OWN_TASKS):
            runs = {
                count: await _draw(bench, trainers[:count], how) for count in bench.options.trainers
            }
            for count, run_ in runs.items():
                for result in _results(bench, how, count, run_, runs[min(runs)]):
                    yield result


def _results(bench: Bench, how: str, count: int, run: Run, alone: Run) -> list[Result]:
    what = f"{count} trainers, {how}" if count > 1 else f"1 trainer, {how}"
    facts: dict[str, Any] = {"trainers": count, "how": how}
    results = [bench.result(what, run.groups_per_second, "groups/s", side="throughput", **facts)]
    if run is not alone:
        target = TARGET if (count, bench.engine) == (16, "postgresql") else None
        ratio = run.groups_per_second / alone.groups_per_second
        results.append(
            bench.result(
                f"{what} / 1 trainer",
                ratio,
                "x",
                target,
                more_is_better=True,
                side="ratio",
                **facts,
            )
        )
    processors = {"trainers": run.trainers, "server": run.server, "all": run.machine}
    if bench.engine == "sqlite":
        del processors["server"]
    for user, used in processors.items():
        results.append(
            bench.result(
                f"{what}: processors used by {user}",
                used,
                f"of {os.cpu_count()}",
                side=f"processors: {user}",
                **facts,
            )
        )
    return results


async def _draw(bench: Bench, trainers: list[Child], how: str) -> Run:
    bench.report(f"{len(trainers)} from {how}")
    server = await bench.databases.server_process()
    watched = [[psutil.Process(one.pid) for one in trainers], [server] if server else []]
    then, times_then = [sum(map(cpu_seconds, several)) for several in watched], psutil.cpu_times()
    speeds = await asyncio.gather(
        *(
            one.ask("shared" if how == SHARED_TASK else f"task-{i}", bench.options.seconds)
            for i, one in enumerate(trainers)
        )
    )
    now, times_now = [sum(map(cpu_seconds, several)) for several in watched], psutil.cpu_times()
    used = [after - before for after, before in zip(now, then, strict=True)]
    total = sum(times_now) - sum(times_then)
    used.append(total - _idle(times_now) + _idle(times_then))
    return Run(sum(speeds), *(one * (os.cpu_count() or 1) / total for one in used))


def _idle(times: Any) -> float:
    return float(times.idle + getattr(times, "iowait", 0.0))


async def _serve(url: str) -> None:
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")

        async def draw(task: str, duration: float) -> float:
            """Draw for some seconds. Return groups per second."""
            await buffer.sample(BATCH, tasks=task)
            start, count = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - start) < duration:
                count += len(await buffer.sample(BATCH, tasks=task))
            return count / elapsed

        await serve(draw)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
