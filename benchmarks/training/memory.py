"""Peak memory of a trainer that draws batches, as multiples of the batch size.

A process draws batches and pads them, without or with prefetching. The peak of its resident memory
is reported by the kernel (Linux); the size before the first batch is subtracted. It includes mapped
pages of a SQLite file, which the kernel can reclaim at any time.

A `for` loop keeps its batch until it has the next one. That takes one batch more than a trainer
that releases its batch first.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.groups import Source, put_all
from benchmarks.processes import children, serve
from benchmarks.results import Result
from replaydb.training import PaddedBatch

TARGET = 2.0
#: Long enough for a loader to prefetch all batches.
STEP_SECONDS = 0.25
_STATUS = Path("/proc/self/status")


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure the peak divided by the bytes of the tensors of a batch."""
    shape = bench.options.shapes[min(1, len(bench.options.shapes) - 1)]
    count = 32
    url = await bench.database()
    bench.report("putting")
    async with rdb.Store.open(url) as store:
        await put_all(await store.buffer("bench"), Source(shape), 3 * count)
    for prefetch, keeps in ((0, False), (0, True), (2, True)):
        bench.report(f"prefetch {prefetch}")
        how = f"prefetch {prefetch}"
        if keeps:
            how += ", previous batch kept"
        async with children(__name__, 1, url) as [trainer]:
            peak, mapped, size = await trainer.ask(
                count, prefetch, min(10, 2 + bench.options.rounds), keeps
            )
        what = f"{count} groups of {shape} as padded tensors, {how}"
        facts: dict[str, Any] = {
            "shape": str(shape),
            "prefetch": prefetch,
            "previous batch": "kept" if keeps else "released",
        }
        target = TARGET + keeps + prefetch  # one more for each batch kept or prefetched
        for side, value, unit, limit in (
            ("batch", size / 1e6, "MB", None),
            ("peak", peak / 1e6, "MB", None),
            ("mapped", mapped / 1e6, "MB", None),
            ("peak / batch", peak / size, "x", target),
            ("(peak - mapped) / batch", (peak - mapped) / size, "x", None),
        ):
            yield bench.result(f"{what}: {side}", value, unit, limit, side=side, **facts)


async def _serve(url: str) -> None:
    import torch

    torch.zeros(1)
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        await serve(partial(_train, buffer))


async def _train(
    buffer: rdb.Buffer, count: int, prefetch: int, steps: int, keeps: bool
) -> tuple[int, int, int]:
    """Draw batches. Return the growth of peak and mapped memory, and the batch size, in bytes."""
    resident, mapped, size = _status("VmRSS"), _status("RssFile"), 0
    collate = partial(rdb.Batch.padded, pad_token_id=0)
    async with buffer.loader(count, prefetch=prefetch, collate=collate, num_steps=steps) as loader:
        async for batch in loader:
            size = _tensor_bytes(batch)
            await asyncio.sleep(STEP_SECONDS)
            if not keeps:
                del batch
    return _status("VmHWM") - resident, _status("RssFile") - mapped, size


def _tensor_bytes(batch: PaddedBatch) -> int:
    names = [name for kind in type(batch).__mro__ for name in getattr(kind, "__slots__", ())]
    return sum(getattr(getattr(batch, name), "nbytes", 0) for name in names)


def _status(name: str) -> int:
    """Return a memory size of this process in bytes; VmHWM is the peak of VmRSS."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return 1024 * int(lines[name].split()[0])


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
