"""How much memory a trainer needs beside its own, as multiples of the batch it asks for.

A process draws batches and pads them, in line or through a loader. Its peak of resident memory is
the kernel's (Linux), counted from before the first batch. Pages of a SQLite file that are mapped,
not copied, are part of it, though the kernel can take them back at any time.

A `for` loop holds its batch until it has the next one, which is a batch more than a trainer needs
that lets go of it first.
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

BAR = 2.0
#: Time enough for a loader to have all ready that it prefetches.
STEP_SECONDS = 0.25
_STATUS = Path("/proc/self/status")


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Peak over bytes of the tensors."""
    shape = bench.options.shapes[min(1, len(bench.options.shapes) - 1)]
    count = 32
    url = await bench.database()
    bench.say("putting")
    async with rdb.Store.open(url) as store:
        await put_all(await store.buffer("bench"), Source(shape), 3 * count)
    for prefetch, holds in ((0, False), (0, True), (2, True)):
        bench.say(f"prefetch {prefetch}")
        how = f"loader, prefetch {prefetch}" if prefetch else "in line"
        if holds:
            how += ", the last one held"
        async with children(__name__, 1, url) as [trainer]:
            peak, mapped, size = await trainer.ask(
                count, prefetch, min(10, 2 + bench.options.rounds), holds
            )
        what = f"{count} of {shape} as padded tensors, {how}"
        facts: dict[str, Any] = {
            "shape": str(shape),
            "prefetch": prefetch,
            "last one": "held" if holds else "let go",
        }
        yield bench.result(f"{what}: the batch", size / 1e6, "MB", side="batch", **facts)
        yield bench.result(f"{what}: peak", peak / 1e6, "MB", side="peak", **facts)
        yield bench.result(f"{what}: mapped", mapped / 1e6, "MB", side="mapped", **facts)
        bar = BAR + holds + prefetch  # each batch held or made ready is one more
        yield bench.result(f"{what}: peak / batch", peak / size, "x", bar, side="ratio", **facts)
        own = (peak - mapped) / size
        yield bench.result(f"{what}: peak - mapped / batch", own, "x", side="own", **facts)


async def _serve(url: str) -> None:
    import torch

    torch.zeros(1)
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        await serve(partial(_train, buffer))


async def _train(
    buffer: rdb.Buffer, count: int, prefetch: int, steps: int, holds: bool
) -> tuple[int, int, int]:
    """Bytes more than before the first batch: the peak, and mapped at the end; and of a batch."""
    resident, mapped, size = _status("VmRSS"), _status("RssFile"), 0
    collate = partial(rdb.Batch.padded, pad_token_id=0)
    async with buffer.loader(count, prefetch=prefetch, collate=collate, num_steps=steps) as loader:
        async for batch in loader:
            size = _tensor_bytes(batch)
            await asyncio.sleep(STEP_SECONDS)
            if not holds:
                del batch
    return _status("VmHWM") - resident, _status("RssFile") - mapped, size


def _tensor_bytes(batch: PaddedBatch) -> int:
    names = [name for kind in type(batch).__mro__ for name in getattr(kind, "__slots__", ())]
    return sum(getattr(getattr(batch, name), "nbytes", 0) for name in names)


def _status(name: str) -> int:
    """Bytes that the kernel accounts this process for; VmHWM is the peak of VmRSS."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return 1024 * int(lines[name].split()[0])


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
