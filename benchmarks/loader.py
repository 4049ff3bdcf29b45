"""What a loader hides from the trainer: `python -m benchmarks.loader`.

A trainer asks for batches of 32 groups of 8 x 1,024 tokens and makes padded tensors of them; its
step is a sleep. The time it waits between steps is what is measured.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

import replaydb as rdb

NUM_GROUPS, NUM_EPISODES, NUM_TOKENS = 400, 8, 1024
BATCH_SIZE = 32
STEPS = 40
STEP_SECONDS = 0.05


def main() -> None:
    Console().print(asyncio.run(measure()))


async def measure() -> Table:
    table = Table(title="waiting for 32 groups of 72 KB as padded tensors", title_justify="left")
    for column in ("how", "median ms", "worst ms"):
        table.add_column(column, justify="left" if column == "how" else "right")
    with tempfile.TemporaryDirectory() as folder:
        async with rdb.Store.open(f"sqlite:///{folder}/replay.db") as store:
            buffer = await store.buffer("math")
            rng = np.random.default_rng(0)
            for i in range(0, NUM_GROUPS, 50):
                await buffer.put([make_group(j, rng) for j in range(i, i + 50)])
            for name, prefetch in (("sample and pad", 0), ("loader, prefetch 2", 2)):
                waits = await waiting_times(buffer, prefetch)
                table.add_row(
                    name, f"{1e3 * statistics.median(waits):.2f}", f"{1e3 * max(waits):.2f}"
                )
    return table


def make_group(i: int, rng: np.random.Generator) -> rdb.EpisodeGroup:
    prompt = NUM_TOKENS // 4
    return rdb.EpisodeGroup(
        "t",
        [
            rdb.Episode(
                prompt_ids=rng.integers(0, 150_000, prompt, np.int32),
                response_ids=rng.integers(0, 150_000, NUM_TOKENS - prompt, np.int32),
                logprobs=rng.standard_normal(NUM_TOKENS - prompt).astype(np.float32),
                reward=float(rng.random()),
            )
            for _ in range(NUM_EPISODES)
        ],
        group_uid=str(i),
    )


async def waiting_times(buffer: rdb.Buffer, prefetch: int) -> list[float]:
    waits = []
    collate = partial(rdb.Batch.padded, pad_token_id=0)
    async with buffer.loader(
        BATCH_SIZE, prefetch=prefetch, collate=collate, num_steps=STEPS
    ) as loader:
        begin = time.perf_counter()
        async for _ in loader:
            waits.append(time.perf_counter() - begin)
            await asyncio.sleep(STEP_SECONDS)
            begin = time.perf_counter()
    return waits[1:]


if __name__ == "__main__":
    main()
