"""How fast groups come and go whose payloads are in an object store, next to its client alone.

A put proves, before its transaction begins, that its pack is beside the marker of the store: what
that takes is the difference to a put that does not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch
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
from replaydb.packs import Place
from replaydb.packs.bucket import Bucket
from replaydb.packs.urls import PlaceURL


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Milliseconds, the ratios to the client with the same bytes, and the requests of a put."""
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

    async def put(number: int = count) -> float:
        groups = source.take(number)
        return await seconds(other.put(groups))

    async def put_unproven() -> float:
        with patch.object(Place, "_prove", _not_proven):
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
    facts["groups"] = 1
    proofs: dict[str, TimedWork] = {"put, not proven": put_unproven, "put": lambda: put(1)}
    timings = await bench.race(f"{shape}: proofs", proofs, 4 * bench.options.rounds, warm_up=2)
    results += [
        bench.result(f"1 of {shape}: {name}", 1e3 * timings.median(name), "ms", side=name, **facts)
        for name in proofs
    ]
    side = "put / put, not proven"
    ratio = timings.ratio("put", "put, not proven")
    results.append(bench.result(f"1 of {shape}: {side}", ratio, "x", side=side, **facts))
    with _requests() as requests:
        await put(1)
    results += [
        bench.result(f"1 of {shape}: {kind} of a put", times, "requests", side=kind, **facts)
        for kind, times in requests.items()
    ]
    return results


async def _not_proven(*_: object) -> None:
    """Take the place of the proof."""


@contextmanager
def _requests() -> Iterator[Counter[str]]:
    """Count what is asked of the service; a list of up to 1000 objects is one request."""
    counts: Counter[str] = Counter()
    kinds = {
        "put_async": "PUT", "list": "LIST", "head_async": "HEAD", "get_async": "GET",
        "get_range_async": "GET",
    }  # fmt: skip

    def counted(name: str) -> Any:
        call = getattr(obstore, name)

        def asked(*args: Any, **kwargs: Any) -> Any:
            counts[kinds[name]] += 1
            return call(*args, **kwargs)

        return asked

    with ExitStack() as stack:
        for name in kinds:
            stack.enter_context(patch.object(obstore, name, counted(name)))
        yield counts
