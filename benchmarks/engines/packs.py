"""How fast groups come and go whose payloads are in an object store, next to its client alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import numpy as np
import obstore

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.engines.sample import batch_size
from benchmarks.groups import Shape, Source
from benchmarks.object_store import object_store
from benchmarks.results import Result, TimedWork, seconds
from replaydb.database.records import to_record
from replaydb.packs.bucket import Bucket
from replaydb.packs.urls import PlaceURL


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Milliseconds, and the ratios to the client with the same bytes."""
    async with object_store() as place:
        for shape in bench.options.shapes:
            count = batch_size(bench.options, shape)
            async with rdb.Store.open(await bench.database(), payloads=place) as store:
                for result in await _one_shape(bench, store, place, shape, count):
                    yield result
            place = place.replace("?", f"/{uuid4().hex}?", 1)


async def _one_shape(
    bench: Bench, store: rdb.Store, place: str, shape: Shape, count: int
) -> list[Result]:
    buffer, source = await store.buffer("sampled", seed=0), Source(shape)
    other = await store.buffer("put")
    # As our own client is configured, so that what is measured is what we do around it.
    bare = Bucket(PlaceURL.of(place), uuid4().hex)._store
    [group] = source.take(1)
    content = b"".join(bytes(one.data) for one in to_record(group, None).payloads)
    names = [uuid4().hex for _ in range(2 * count)]
    bench.say(f"{shape}: putting")
    for name in names:  # one pack a group, and as many objects of the same size
        await obstore.put_async(bare, name, content, use_multipart=False)
        await buffer.put(source.take(1))
    rng = np.random.default_rng(0)

    async def put_bare() -> float:
        data = content * count
        return await seconds(obstore.put_async(bare, uuid4().hex, data, use_multipart=False))

    async def put() -> float:
        groups = source.take(count)
        return await seconds(other.put(groups))

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
    facts = {"shape": str(shape), "groups": count}
    results = [
        bench.result(
            f"{count} of {shape}: {name}", 1e3 * timings.median(name), "ms", side=name, **facts
        )
        for name in works
    ]
    results += [
        bench.result(
            f"{count} of {shape}: {mine} / {theirs}", timings.ratio(mine, theirs), "x",
            side=f"{mine} / {theirs}", **facts,
        )
        for mine, theirs in (("put", "put_async"), ("sample", "get_range_async"))
    ]  # fmt: skip
    return results
