"""Time until four ranks of a trainer have the groups of one leased batch.

Each rank is a process. Either every rank reads only its own groups of the lease (`read_lease`), as
`ShardedBuffer` does, or every rank reads the whole batch. On PostgreSQL a relay counts the bytes
that the server sends, in rounds that are not timed.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.groups import Shape, Source, put_all
from benchmarks.processes import Child, children, serve
from benchmarks.relay import relayed
from benchmarks.results import Result

RANKS, BATCH = 4, 64
OWN, WHOLE = "own groups", "whole batch"


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds of the slowest rank, and megabytes that the server sent."""
    for shape in bench.options.shapes[:2]:
        for layout in ("database", "folder"):
            async for one in _measure(bench, shape, layout):
                yield one


async def _measure(bench: Bench, shape: Shape, layout: str) -> AsyncIterator[Result]:
    url = await bench.database()
    with tempfile.TemporaryDirectory(prefix="replaydb-bench-") as folder:
        payloads = Path(folder).as_uri() if layout == "folder" else None
        async with rdb.Store.open(url, payloads=payloads) as store:
            buffer = await store.buffer("bench")
            bench.report(f"putting {shape}")
            await put_all(buffer, Source(shape), BATCH)
            lease = await buffer.lease(BATCH, ttl=3600, load=False)
            parts = {OWN: lease.shards(RANKS), WHOLE: [lease.ids] * RANKS}
        async with children(__name__, RANKS, url) as ranks:
            works = {how: partial(_read, ranks, lease.id, ids) for how, ids in parts.items()}
            times = await bench.times(f"{shape} in a {layout}", works, bench.options.rounds)
        sent = await _bytes_sent(url, lease.id, parts) if bench.engine == "postgresql" else {}
    for how in parts:
        facts: dict[str, Any] = {"shape": str(shape), "payloads": layout, "each rank reads": how}
        what = f"{BATCH} groups of {shape} in a {layout}, {RANKS} ranks read {how}"
        yield bench.result(what, 1e3 * times.median(how), "ms", side="time", **facts)
        if sent:
            megabytes = sent[how] / 1e6
            yield bench.result(f"{what}: sent", megabytes, "MB", side="sent by the server", **facts)


async def _read(ranks: list[Child], lease_id: int, parts: list[list[int]]) -> None:
    """Let all ranks read, until the slowest has its groups."""
    asked = (rank.ask(lease_id, part) for rank, part in zip(ranks, parts, strict=True))
    await asyncio.gather(*asked)


async def _bytes_sent(url: str, lease_id: int, parts: dict[str, list[list[int]]]) -> dict[str, int]:
    """Return how many bytes the server sends to all ranks."""
    sent = {}
    async with relayed(url) as (near, relay), children(__name__, RANKS, near) as ranks:
        for how, ids in parts.items():
            await _read(ranks, lease_id, ids)  # connections are open, statements prepared
            _, before = await relay.num_bytes()
            await _read(ranks, lease_id, ids)
            _, after = await relay.num_bytes()
            sent[how] = after - before
    return sent


async def _serve(url: str) -> None:
    async with rdb.Store.open(url, payload_cache=0) as store:
        buffer = await store.buffer("bench", create=False)

        async def read(lease_id: int, ids: list[int]) -> int:
            return len(await buffer.read_lease(lease_id, ids))

        await serve(read)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
