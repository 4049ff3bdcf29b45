"""Puts and samples of groups with payloads in an object store, compared with its client alone.

Before its transaction begins, a put verifies that its pack is next to the marker of the store. The
cost is the difference to a put without this verification.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import numpy as np
import obstore

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.engines.sample import batch_size
from benchmarks.groups import ROUTED, Shape, Source
from benchmarks.object_store import counted_requests, object_store
from benchmarks.results import Result, TimedWork, seconds
from replaydb.database.tables.records import to_record
from replaydb.packs import PayloadStore
from replaydb.packs.bucket import Bucket
from replaydb.packs.protocol import State
from replaydb.packs.urls import PayloadURL

#: For groups of 6.4 MB: share of the rate of the client alone.
RATE_TARGET = 0.8


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds, ratios to the client with the same bytes, and requests of a put."""
    async with object_store() as payloads:
        for shape in (*bench.options.shapes, ROUTED):
            count = batch_size(bench.options, shape)
            # Without a cache of payloads, each draw reads from the bucket.
            url = await bench.database()
            async with rdb.Store.open(url, payloads=payloads, payload_cache=0) as store:
                for result in await _one_shape(bench, store, payloads, shape, count):
                    yield result
            payloads = payloads.replace("?", f"/{uuid4().hex}?", 1)


async def _one_shape(
    bench: Bench, store: rdb.Store, payloads: str, shape: Shape, count: int
) -> list[Result]:
    buffer, source = await store.buffer("sampled", seed=0), Source(shape)
    other = await store.buffer("put")
    # Configured as the client of replaydb, so that the difference is the work of replaydb.
    bare = Bucket(PayloadURL.of(payloads), uuid4().hex)._store
    [group] = source.take(1)
    content = b"".join(bytes(one.data) for one in to_record(group, None).payloads)
    names = [uuid4().hex for _ in range(2 * count)]
    bench.report(f"{shape}: putting")
    for name in names:  # one pack per group, and as many objects of the same size
        await obstore.put_async(bare, name, content, use_multipart=False)
        await buffer.put(source.take(1))
    rng = np.random.default_rng(0)

    async def put_bare() -> float:
        data = content * count
        return await seconds(obstore.put_async(bare, uuid4().hex, data, use_multipart=False))

    async def put(number: int = count) -> float:
        groups = source.take(number)
        return await seconds(other.put(groups))

    async def put_unverified() -> float:
        with patch.object(PayloadStore, "_prove", _not_verified):
            return await put(1)

    async def get_bare() -> float:
        turns = asyncio.Semaphore(16)

        async def get(name: str) -> object:
            async with turns:
                return await obstore.get_range_async(bare, name, start=0, length=len(content))

        chosen = rng.choice(names, count, replace=False).tolist()
        return await seconds(asyncio.gather(*map(get, chosen)))

    async def sample() -> float:
        return await seconds(buffer.sample(count))

    works: dict[str, TimedWork] = {
        "put_async": put_bare, "put": put, "get_range_async": get_bare, "sample": sample,
    }  # fmt: skip
    timings = await bench.race(str(shape), works, max(1, bench.options.rounds // 2), warm_up=2)
    facts: dict[str, Any] = {"shape": str(shape), "groups": count}
    results = [
        bench.result(
            f"{count} groups of {shape}: {name}",
            1e3 * timings.median(name),
            "ms",
            side=name,
            **facts,
        )
        for name in works
    ]
    target = 1 / RATE_TARGET if shape == ROUTED else None
    results += [
        bench.result(
            f"{count} groups of {shape}: {mine} / {theirs}", timings.ratio(mine, theirs), "x",
            target, side=f"{mine} / {theirs}", **facts,
        )
        for mine, theirs in (("put", "put_async"), ("sample", "get_range_async"))
    ]  # fmt: skip
    facts["groups"] = 1
    unverified = "put without verification"
    puts: dict[str, TimedWork] = {unverified: put_unverified, "put": lambda: put(1)}
    timings = await bench.race(f"{shape}: verification", puts, 4 * bench.options.rounds, warm_up=2)
    one = f"1 group of {shape}"
    results += [
        bench.result(f"{one}: {name}", 1e3 * timings.median(name), "ms", side=name, **facts)
        for name in puts
    ]
    side = f"put / {unverified}"
    ratio = timings.ratio("put", unverified)
    results.append(bench.result(f"{one}: {side}", ratio, "x", side=side, **facts))
    requests: Counter[str] = Counter()
    with counted_requests(requests):
        await put(1)
    results += [
        bench.result(f"{one}: {kind} requests of a put", times, "requests", side=kind, **facts)
        for kind, times in requests.items()
    ]
    return results


async def _not_verified(store: PayloadStore, file: str, size: int, end: float) -> State:
    """Return the state of the marker as the store knows it, without a request."""
    return State(size, store._claimed or "")
