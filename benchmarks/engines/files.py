"""Puts and samples of groups with payloads in a folder, compared with writing and reading files.

The bare file is written, synchronized to disk and renamed, as a pack is. It is read in one thread.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.engines.sample import batch_size
from benchmarks.groups import ROUTED, Shape, Source
from benchmarks.results import Result, TimedWork, seconds
from replaydb.database.tables.records import to_record

TARGET = 0.8
#: Number of different groups.
VARIETY = 8
#: Bytes per write, as of a pack. Larger ones can take several times as long.
PIECE = 256 << 10


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure rates of puts and samples, and ratios to the bare files in the same rounds."""
    with tempfile.TemporaryDirectory(prefix="replaydb-bench-") as folder:
        for shape in (*bench.options.shapes, ROUTED):
            payloads = Path(folder, uuid4().hex)
            url = await bench.database()
            async with rdb.Store.open(url, payloads=payloads.as_uri()) as store:
                for result in await _one_shape(bench, store, Path(folder), shape):
                    yield result


async def _one_shape(bench: Bench, store: rdb.Store, folder: Path, shape: Shape) -> list[Result]:
    count, source = batch_size(bench.options, shape), Source(shape, variety=VARIETY)
    sampled, put_into = await store.buffer("sampled", seed=0), await store.buffer("put")
    contents = [
        b"".join(bytes(one.data) for one in to_record(group, None).payloads)
        for group in source.take(min(count, VARIETY))
    ]
    written = [contents[i % len(contents)] for i in range(count)]
    files = [folder / uuid4().hex for _ in range(2 * count)]
    bench.report(f"{shape}: putting")
    for file in files:
        _write(contents[:1], file)
        await sampled.put(source.take(1))
    rng = np.random.default_rng(0)

    async def write() -> float:
        return await seconds(asyncio.to_thread(_write, written, folder / uuid4().hex))

    async def put() -> float:
        groups = source.take(count)
        return await seconds(put_into.put(groups))

    async def read() -> float:
        chosen = rng.choice(np.array(files), count, replace=False).tolist()
        return await seconds(asyncio.to_thread(_read, chosen, len(contents[0])))

    async def sample() -> float:
        return await seconds(sampled.sample(count))

    works: dict[str, TimedWork] = {"write": write, "put": put, "read": read, "sample": sample}
    timings = await bench.race(str(shape), works, bench.options.rounds, warm_up=2)
    size = len(contents[0]) / 1e6
    megabytes, what = count * size, f"{count} of {size:.3g} MB"
    result: Callable[..., Result] = partial(bench.result, groups=what)
    results = [
        result(f"{what}: {name}", megabytes / timings.median(name), "MB/s", side=name)
        for name in works
    ]
    for mine, theirs in (("put", "write"), ("sample", "read")):
        side = f"{mine} / {theirs}"
        rate = 1 / timings.ratio(mine, theirs)
        facts: dict[str, Any] = {"more_is_better": True, "side": side}
        results.append(result(f"{what}: {side}", rate, "x", TARGET, **facts))
    return results


def _write(contents: list[bytes], file: Path) -> None:
    unfinished = file.with_suffix(".part")
    with unfinished.open("wb", buffering=0) as stream:
        for content in map(memoryview, contents):
            for start in range(0, len(content), PIECE):
                stream.write(content[start : start + PIECE])
        os.fsync(stream.fileno())
    unfinished.rename(file)
    descriptor = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(files: list[Path], num_bytes: int) -> list[np.ndarray]:
    contents = []
    for file in files:
        content = np.empty(num_bytes, np.uint8)
        with file.open("rb", buffering=0) as stream:
            stream.readinto(content.data)
        contents.append(content)
    return contents
