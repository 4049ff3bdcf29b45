"""Throughput of one server, and a projection of the number of rollout GPUs that it could serve.

Two processes work as fast as they can: both put, both draw, then one puts and one draws. Clients
and server share this machine. On PostgreSQL also with payloads in 16 hash partitions.

The projection is arithmetic, not a measurement:

    GPUs = tokens per second put while another process draws / tokens per second of one GPU
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import asyncpg

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.engines.put import distribute
from benchmarks.groups import Shape, Source, put_all
from benchmarks.processes import Child, children, serve
from benchmarks.results import Result

#: Assumed tokens per second of one rollout GPU: the order of magnitude for a model of 7B parameters
#: with continuous batching.
GPU_TOKENS = 2500
#: Work of the two processes of a measurement.
LOADS = {"put": ["put", "put"], "sample": ["sample", "sample"], "both": ["put", "sample"]}
#: Labels of the throughputs, by load and work.
LABELS = {
    ("put", "put"): "put only",
    ("sample", "sample"): "sample only",
    ("both", "put"): "put while sampling",
    ("both", "sample"): "sample while putting",
}
PARTITIONS = 16
PUT_TOKENS, BATCH_TOKENS = 400_000, 2_000_000


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure tokens per second of each load and layout, and compute the projection."""
    shape = bench.options.shapes[min(1, len(bench.options.shapes) - 1)]
    urls = {"one table": await bench.database()}
    if bench.engine == "postgresql":
        urls[f"{PARTITIONS} partitions"] = await _partitioned(bench)
    for layout, url in urls.items():
        bench.report(f"{layout}: putting")
        async with rdb.Store.open(url) as store:
            await put_all(await store.buffer("bench"), Source(shape), 2 * _batch_size(shape))
    speeds: dict[tuple[str, str, str], list[float]] = {}
    async with AsyncExitStack() as stack:
        clients = {
            layout: await stack.enter_async_context(
                children(__name__, 2, url, shape.episodes, shape.tokens)
            )
            for layout, url in urls.items()
        }
        for number in range(min(2, bench.options.long_rounds)):
            for load, works in LOADS.items():
                for layout, pair in clients.items():
                    bench.report(f"{layout}, {load}: round {number + 1}")
                    asked = map(Child.ask, pair, works, [bench.options.seconds / 2] * 2)
                    for work, speed in zip(works, await asyncio.gather(*asked), strict=True):
                        speeds.setdefault((layout, load, work), []).append(speed)
    for (layout, load, work), several in speeds.items():
        tokens = statistics.mean(several) * (1 if load == "both" else 2)
        label = LABELS[load, work]
        facts: dict[str, Any] = {"layout": layout, "shape": str(shape), "load": label}
        yield bench.result(f"{shape}, {layout}, {label}", tokens / 1e6, "M tokens/s", **facts)
    for layout in urls:
        together = statistics.mean(speeds[layout, "both", "put"])
        yield bench.result(
            f"PROJECTION, {layout}: rollout GPUs at {GPU_TOKENS:,} tokens/s each",
            together / GPU_TOKENS,
            "GPUs",
            shape=str(shape),
            layout=layout,
            load="PROJECTION: rollout GPUs",
            formula="tokens/s put while sampling / tokens/s of one GPU",
            assumed=GPU_TOKENS,
        )


async def _partitioned(bench: Bench) -> str:
    """Create a database without rows whose payloads are partitioned by the hash of the group id."""
    url = await bench.database()
    connection = await asyncpg.connect(url)
    await connection.execute(
        "ALTER TABLE payload RENAME TO payload_whole; "
        "ALTER TABLE payload_whole RENAME CONSTRAINT pk_payload TO pk_payload_whole; "
        "CREATE TABLE payload (LIKE payload_whole INCLUDING STORAGE) PARTITION BY HASH (group_id); "
        "DROP TABLE payload_whole; "
        "ALTER TABLE payload ADD CONSTRAINT pk_payload PRIMARY KEY (group_id, part), "
        "ADD CONSTRAINT fk_payload_group_id FOREIGN KEY (group_id) REFERENCES episode_group "
        "ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED"
    )
    for i in range(PARTITIONS):
        await connection.execute(
            f"CREATE TABLE payload_{i} PARTITION OF payload "
            f"FOR VALUES WITH (MODULUS {PARTITIONS}, REMAINDER {i})"
        )
    await connection.close()
    return url


def _batch_size(shape: Shape) -> int:
    return max(1, min(32, BATCH_TOKENS // shape.num_tokens))


async def _serve(url: str, shape: Shape) -> None:
    source, put_size = Source(shape), max(1, min(50, PUT_TOKENS // shape.num_tokens))
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")

        async def put() -> int:
            batches = [source.take(put_size) for _ in range(4)]
            await distribute(batches, [buffer] * 4, lambda one, batch: one.put(batch))
            return 4 * put_size

        async def sample() -> int:
            return len(await buffer.sample(_batch_size(shape)))

        async def repeat(work: str, duration: float) -> float:
            """Repeat work for some seconds. Return tokens per second."""
            once = {"put": put, "sample": sample}[work]
            start, done = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - start) < duration:
                done += await once()
            return done * shape.num_tokens / elapsed

        await serve(repeat)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], Shape(int(sys.argv[2]), int(sys.argv[3]))))
