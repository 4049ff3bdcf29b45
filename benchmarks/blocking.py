"""What the blocking store costs beside the async one: `python -m benchmarks.blocking`."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time

import numpy as np
from rich.console import Console
from rich.table import Table

import replaydb as rdb
from benchmarks.loader import make_group
from replaydb import blocking

ROUNDS = 200


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/replay.db"
        with blocking.Store.open(url) as store:
            rng = np.random.default_rng(0)
            store.buffer("math").put([make_group(i, rng) for i in range(64)])
        waited = through_portal(url)
        awaited = asyncio.run(in_the_loop(url))
    table = Table(title="one call after another", title_justify="left")
    for column in ("call", "async ms", "blocking ms", "more, us"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for name, seconds in awaited.items():
        more = waited[name] - seconds
        table.add_row(
            name, f"{1e3 * seconds:.3f}", f"{1e3 * waited[name]:.3f}", f"{1e6 * more:.0f}"
        )
    Console().print(table)


async def in_the_loop(url: str) -> dict[str, float]:
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("math")
        counts, samples = [], []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            await buffer.count()
            counts.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            await buffer.sample(1)
            samples.append(time.perf_counter() - begin)
    return {"count": statistics.median(counts), "sample(1)": statistics.median(samples)}


def through_portal(url: str) -> dict[str, float]:
    with blocking.Store.open(url) as store:
        buffer = store.buffer("math")
        counts, samples = [], []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            buffer.count()
            counts.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            buffer.sample(1)
            samples.append(time.perf_counter() - begin)
    return {"count": statistics.median(counts), "sample(1)": statistics.median(samples)}


if __name__ == "__main__":
    main()
